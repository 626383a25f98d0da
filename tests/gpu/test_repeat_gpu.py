"""The same call gives the same bits, a thousand times."""

import pytest
import torch

import flash_qla
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import INPUT_NAMES

FORWARDS, BACKWARDS = 1000, 200
PROBLEMS = {
    "row20": ((1, 1000), (4, 4)),
    "ragged": ([130, 0, 7, 64, 513], (2, 8)),
    "full": ([900] * 4, (16, 64)),
}


def differing(results, first, bad):
    """Adds to the counter on the device, so that repeats follow each other without a pause."""
    for x, y in zip(results, first, strict=True):
        bad += (x.view(torch.uint8) != y.view(torch.uint8)).any()


def make(name, with_state):
    lengths, heads = PROBLEMS[name]
    return make_inputs(lengths, *heads, 128, 128, "strong", device="cuda", with_state=with_state)


@pytest.mark.slow
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "no_state"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_case20_forward(name, with_state):
    """Guards races that show once in hundreds of launches: fences between generic and async proxies, barriers."""
    inputs = make(name, with_state)
    bad = torch.zeros((), dtype=torch.int64, device="cuda")

    def call():
        return flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True)

    first = call()
    for _ in range(FORWARDS):
        differing(call(), first, bad)
    assert bad.item() == 0, f"{bad.item()} of {2 * FORWARDS} tensors differ"


@pytest.mark.slow
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "no_state"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_case20_backward(name, with_state):
    """Guards atomics and races: all gradients bitwise repeatable."""
    inputs = make(name, with_state).differentiable()
    leaves = [x for x in (getattr(inputs, n) for n in INPUT_NAMES) if x is not None]
    bad = torch.zeros((), dtype=torch.int64, device="cuda")

    def call():
        o, ht = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True)
        return torch.autograd.grad([o, ht], leaves, [inputs.do, inputs.dht])

    first = call()
    for _ in range(BACKWARDS):
        differing(call(), first, bad)
    assert bad.item() == 0, f"{bad.item()} of {len(leaves) * BACKWARDS} tensors differ"

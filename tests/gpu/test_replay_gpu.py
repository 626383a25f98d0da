"""Replayed calls on the GPU: the same bits as ordinary ones, on new data, in graphs, on other streams."""

import pytest
import torch

import flash_qla
from flash_qla.ops.gated_delta_rule.chunk import replay
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import assert_same_bits, capture, run_public, strided_copy

BF16 = torch.bfloat16

CASES = {
    "varlen": (lambda seed: make_inputs([70, 0, 3], 2, 4, seed=seed, device="cuda"), {}),
    "dense": (lambda seed: make_inputs((2, 100), 2, 4, seed=seed, device="cuda"), {}),
    "int64_offsets": (lambda seed: make_inputs([70, 3], 2, 4, seed=seed, device="cuda", index_dtype=torch.int64), {}),
    "v_first": (lambda seed: make_inputs([70, 3], 2, 4, seed=seed, device="cuda"), {"state_v_first": True}),
    "no_states": (lambda seed: make_inputs([70], 2, 2, seed=seed, device="cuda", with_state=False), {}),
    "l2norm": (lambda seed: make_inputs([70, 3], 2, 4, seed=seed, device="cuda"), {"use_qk_l2norm_in_kernel": True}),
    "split": (lambda seed: make_inputs([8192], 2, 8, gate_profile="mild", seed=seed, device="cuda"), {}),
}


def call(inputs, **options):
    with torch.no_grad():
        return flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True, **options)


@pytest.mark.parametrize("case", CASES)
def test_same_bits_on_new_data(case):
    make, options = CASES[case]
    for _ in range(2):
        call(make(0), **options)
    assert [type(x) for x in replay._known.values()] == [replay.Replay], "this call was not recorded"
    inputs = make(1)
    replayed = call(inputs, **options)
    assert len(replay._known) == 1
    replay.forget()
    for x, y in zip(replayed, call(inputs, **options), strict=True):
        assert torch.equal(x, y)


def test_other_lengths_of_the_same_total():
    """Guards a recorded call against the values of its offsets: they are read on the device."""
    for _ in range(2):
        call(make_inputs([70, 30], 2, 4, device="cuda"))
    inputs = make_inputs([1, 99], 2, 4, seed=1, device="cuda")
    replayed = call(inputs)
    assert len(replay._known) == 1
    replay.forget()
    for x, y in zip(replayed, call(inputs), strict=True):
        assert torch.equal(x, y)


def test_replay_inside_a_graph():
    inputs = make_inputs([70, 30], 2, 4, device="cuda")
    for _ in range(3):
        expected = call(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(inputs)
    for x in results:
        x.fill_(float("nan"))
    graph.replay()
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)


def test_copied_inputs_take_the_ordinary_way():
    """Guards inputs that TMA cannot read: their copy is no launch of ours."""
    inputs = make_inputs([70, 30], 2, 4, device="cuda")
    expected = call(inputs)
    replay.forget()
    from dataclasses import replace

    odd = replace(inputs, v=strided_copy(inputs.v, pad=3))
    for _ in range(3):
        for x, y in zip(call(odd), expected, strict=True):
            assert torch.equal(x, y)
    assert not any(isinstance(x, replay.Replay) for x in replay._known.values())


@pytest.mark.parametrize("case", CASES)
def test_same_bits_with_gradients(case):
    """Guards both halves of a training step, on new data, with and without the final state in the loss."""
    make, options = CASES[case]
    with_dht = "state_v_first" not in options
    for seed in (0, 0, 1):
        inputs = make(seed)
        replayed = run_public(inputs, use_dht=with_dht, **options)
    assert [type(x) for x in replay._known.values()] == [replay.Replay] * 2, "this step was not recorded"
    replay.forget()
    assert_same_bits(replayed, run_public(inputs, use_dht=with_dht, **options))


def test_checkpoints_replay():
    """Guards the recomputation, which may be the first replayed call of its kind."""
    from torch.utils.checkpoint import checkpoint

    inputs = make_inputs([70, 30], 2, 4, device="cuda")
    leaves = inputs.differentiable()
    kwargs = {**leaves.kwargs, "output_final_state": True}
    expected = run_public(inputs)
    for _ in range(3):
        o, ht = checkpoint(lambda: flash_qla.chunk_gated_delta_rule(**kwargs), use_reentrant=False)
        wanted = [leaves.q, leaves.k, leaves.v, leaves.g, leaves.beta, leaves.initial_state]
        grads = torch.autograd.grad([o, ht], wanted, [inputs.do, inputs.dht])
        names = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
        assert_same_bits(dict(zip(names, grads, strict=True)), {name: expected[name] for name in names})


def test_training_step_inside_a_graph():
    inputs = make_inputs([70, 30], 2, 4, device="cuda")
    leaves = inputs.differentiable()
    wanted = [leaves.q, leaves.k, leaves.v, leaves.g, leaves.beta, leaves.initial_state]

    def step():
        o, ht = flash_qla.chunk_gated_delta_rule(**leaves.kwargs, output_final_state=True)
        return torch.autograd.grad([o, ht], wanted, [inputs.do, inputs.dht])

    expected = step()
    graph, grads = capture(step)
    for x in grads:
        x.fill_(float("nan"))
    graph.replay()
    for x, y in zip(grads, expected, strict=True):
        assert torch.equal(x, y)

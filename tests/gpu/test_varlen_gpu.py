"""Varlen without the host: no synchronisation, and CUDA graphs that follow `cu_seqlens`."""

import contextlib
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

import flash_qla
from flash_qla.testing.compare import assert_close_per_head
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import INPUT_NAMES, assert_same_bits, capture, gradient_name, run_public, truth

BF16 = torch.bfloat16
LENGTHS = [1000, 0, 24, 777, 1]


def make(lengths, heads=(4, 8), dims=(128, 128), profile="mild", **kwargs):
    return make_inputs(lengths, *heads, *dims, profile, BF16, device="cuda", **kwargs)


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("l2norm", [False, True], ids=["plain", "l2norm"])
@pytest.mark.parametrize("host_copy", [False, True], ids=["device_only", "host_copy"])
def test_no_synchronisation(index_dtype, l2norm, host_copy):
    """Guards the hot path: forward and backward, warm, never wait for the device."""
    inputs = make(LENGTHS, index_dtype=index_dtype)
    options = {"use_qk_l2norm_in_kernel": l2norm}
    if host_copy:
        options["cu_seqlens_cpu"] = inputs.cu_seqlens.cpu()
    expected = run_public(inputs, **options)
    with no_synchronisation():
        actual = run_public(inputs, **options)
    assert_same_bits(actual, expected)


def test_no_synchronisation_with_activations():
    """Guards the steps around the operator."""
    inputs = make(LENGTHS)
    gate = torch.zeros(8, device="cuda", requires_grad=True)

    def call():
        o, ht = flash_qla.chunk_gated_delta_rule(
            **inputs.differentiable().kwargs, output_final_state=True, use_gate_in_kernel=True, A_log=gate,
            dt_bias=gate, use_beta_sigmoid_in_kernel=True, state_v_first=False,
        )  # fmt: skip
        torch.autograd.backward([o, ht], [inputs.do, inputs.dht])

    call()
    with no_synchronisation():
        call()


def test_no_synchronisation_of_new_shapes():
    """Guards lazily built tables: a first call with other T and N synchronises no more than the second."""
    run_public(make(LENGTHS))
    fresh = [make(lengths) for lengths in ([5] * 40, [2000, 3], [64])]
    with no_synchronisation():
        results = [run_public(inputs) for inputs in fresh]
    for inputs, actual in zip(fresh, results, strict=True):
        assert_close_per_head(actual, truth(inputs), BF16)


# N = 16 slots within T = 4096.
REPLAYS = {
    "as_captured": [256] * 16,
    "short_then_long": [5, 4091] + [0] * 14,
    "one_thousand": [1000] + [0] * 15,
    "empty_everywhere": [0, 0, 70, 0, 1, 0, 64, 0, 0, 0, 3000, 0, 0, 0, 0, 1],
    "all_empty": [0] * 16,
    "tail": [100] * 16,
    "ones": [1] * 16,
    "last_only": [0] * 15 + [4096],
}


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_graph_follows_the_offsets(passes, index_dtype):
    """Guards grids and tables that must not depend on the captured lengths: replayed with others, empty ones too."""
    inputs = make(REPLAYS["as_captured"], index_dtype=index_dtype)
    leaves = inputs.differentiable()
    tensors = [getattr(leaves, name) for name in INPUT_NAMES]

    def call():
        if passes == "forward":
            with torch.no_grad():
                return flash_qla.chunk_gated_delta_rule(**leaves.kwargs, output_final_state=True)
        o, ht = flash_qla.chunk_gated_delta_rule(**leaves.kwargs, output_final_state=True)
        return o, ht, *torch.autograd.grad([o, ht], tensors, [inputs.do, inputs.dht])

    graph, outputs = capture(call)
    names = ("o", "ht", *map(gradient_name, INPUT_NAMES))[: len(outputs)]
    for label, lengths in REPLAYS.items():
        cu = torch.tensor([0, *accumulate(lengths)], dtype=index_dtype, device="cuda")
        leaves.cu_seqlens.copy_(cu)
        for x in outputs:
            x.detach().fill_(float("nan"))
        graph.replay()
        actual = {name: x.detach().clone() for name, x in zip(names, outputs, strict=True)}
        problem = replace(inputs, cu_seqlens=cu, lengths=lengths)
        expected = run_public(problem, gradients=passes == "backward")
        assert_same_bits(actual, {name: expected[name] for name in names}, label)
        if label in ("empty_everywhere", "short_then_long"):
            assert_close_per_head(actual, truth(problem, gradients=passes == "backward"), BF16, label=label)


def test_graph_follows_the_inputs():
    """Guards pointers: a replay reads the captured tensors' new values, dense inputs too."""
    inputs, other = make((2, 300), seed=0), make((2, 300), seed=1)

    def call():
        return flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True)

    graph, (o, ht) = capture(call)
    expected = run_public(other, gradients=False)
    for name in INPUT_NAMES:
        getattr(inputs, name).copy_(getattr(other, name))
    graph.replay()
    assert torch.equal(o, expected["o"]) and torch.equal(ht, expected["ht"])


def with_offsets(inputs, cu):
    return replace(inputs, cu_seqlens=torch.tensor(cu, dtype=torch.int32, device="cuda"))


def test_offsets_beyond_the_tensors():
    """Guards cu_seqlens[-1] > T, which nobody reads on the host: clipped, so every row is written and finite."""
    inputs = make([100, 28], tail_tokens=0)
    for cu in ([0, 100, 5000], [0, 5000, 5000], [0, -7, 128]):
        results = run_public(with_offsets(inputs, cu))
        assert all(torch.isfinite(x).all() for x in results.values()), cu
    assert_close_per_head(run_public(inputs), truth(inputs), BF16)


def test_offsets_that_are_no_offsets():
    """Guards falling offsets and a first one above 0: their rows mean nothing, but no access leaves the tensors."""
    inputs = make([100, 28], tail_tokens=0)
    for cu in ([0, 60, 30], [90, 100, 128], [128, 0, 5]):
        run_public(with_offsets(inputs, cu))
        torch.cuda.synchronize()
    assert_close_per_head(run_public(inputs), truth(inputs), BF16)

"""Memory: no copies of q, k, v; tensors of more than 2^31 elements; thousands of sequences."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import flash_qla
from flash_qla.testing.compare import assert_close_per_head, chunked_reference
from flash_qla.testing.workloads import Inputs, make_inputs
from tests.case_inputs import as_float64, check, run_public, truth

BF16 = torch.bfloat16
MIB = 1 << 20


def extra_memory(call):
    """Peak bytes that a call takes beyond what is allocated, its results included."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del results
    return peak


def rounded(x):
    """Bytes of a tensor as the allocator rounds them."""
    return -(-x.numel() * x.element_size() // 512) * 512


def test_case31_no_copies_of_packed_views():
    """Guards reads through strides: the forward allocates o, g_cumsum and T, and nothing of the size of q, k or v."""
    hq, hv, dim, tokens = 16, 32, 128, 4096
    buffer = torch.randn(1, tokens, (2 * hq + hv) * dim, device="cuda", dtype=BF16)
    q, k, v = buffer.split([hq * dim, hq * dim, hv * dim], -1)
    q, k, v = q.unflatten(-1, (hq, dim)), k.unflatten(-1, (hq, dim)), v.unflatten(-1, (hv, dim))
    gates = torch.rand(1, tokens, 2 * hv, device="cuda")
    g, beta = -gates[..., :hv], gates[..., hv:]
    state = torch.zeros(1, hv, dim, dim, device="cuda")

    with torch.no_grad():
        peak = extra_memory(
            lambda: flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
        )
    inverse = v.numel() // dim * 64 * 2
    needed = v.numel() * 2 + inverse + g.numel() * 4 + rounded(state)
    assert peak <= needed + 2 * MIB, f"{peak / MIB:.1f} MiB, {needed / MIB:.1f} needed; q is {q.numel() * 2 / MIB:.1f}"


def test_saved_for_backward():
    """Guards the memory between the passes: beyond the outputs, g_cumsum and T only."""
    inputs = make_inputs([4096], 16, 32, device="cuda")
    leaves = inputs.differentiable()
    flash_qla.chunk_gated_delta_rule(**leaves.kwargs)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    o, _ = flash_qla.chunk_gated_delta_rule(**leaves.kwargs)
    held = torch.cuda.memory_allocated() - before
    needed = o.numel() * 2 + inputs.g.numel() * 4 + inputs.g.numel() * 64 * 2
    assert held <= needed + MIB, f"{held / MIB:.1f} MiB held, {needed / MIB:.1f} needed"


def test_peak_of_a_backward():
    """Guards the states' memory: S and dS of every chunk are there at once, but half of S in v's gradient to be."""
    tokens, hv, dim = 8192, 32, 128
    inputs = make_inputs([tokens], 16, hv, device="cuda")
    leaves = inputs.differentiable()
    wanted = [leaves.q, leaves.k, leaves.v, leaves.g, leaves.beta]
    o, _ = flash_qla.chunk_gated_delta_rule(**leaves.kwargs)
    peak = extra_memory(lambda: torch.autograd.grad(o, wanted, inputs.do, retain_graph=True))
    states = (tokens // 64 + 1) * hv * dim * dim * 2
    needed = sum(rounded(x) for x in (*wanted, inputs.initial_state)) + 3 * states // 2
    assert peak <= needed + 4 * MIB, f"{peak / MIB:.1f} MiB, {needed / MIB:.1f} needed, {states / MIB:.1f} of states"


def window(inputs, start, end):
    """Rows start to end in float64, as a problem of their own without a state."""
    names = ("q", "k", "v", "g", "beta", "do")
    rows = {name: getattr(inputs, name)[:, start:end].detach() for name in names if getattr(inputs, name) is not None}
    piece = replace(inputs, **rows, dht=inputs.dht[:1], cu_seqlens=None, lengths=[end - start])
    return as_float64(piece if piece.do is not None else replace(piece, do=piece.v))


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_more_than_two_billion_elements(passes):
    """Guards 64-bit offsets: rows beyond element 2^31, against a window that is long enough to forget what was before.

    The gate is at most -0.05, so 1024 tokens away a state has decayed by e^-51.
    """
    tokens, heads, dim = 1_100_000, 16, 128
    assert tokens * heads * dim > 2**31
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(unit=False):
        x = torch.empty(1, tokens, heads, dim, device="cuda", dtype=BF16)
        for rows in x.split(100_000, 1):
            draw = torch.randn(rows.shape, device="cuda", generator=generator)
            rows.copy_(F.normalize(draw, dim=-1) if unit else draw)
        return x

    backward = passes == "backward"
    gates = torch.rand(2, 1, tokens, heads, device="cuda", generator=generator)
    inputs = Inputs(
        q=normal(unit=True), k=normal(unit=True), v=normal(), g=-0.05 - gates[0], beta=gates[1], initial_state=None,
        cu_seqlens=torch.tensor([0, 70, tokens - 9], device="cuda"), do=normal() if backward else None,
        dht=torch.zeros(2, heads, dim, dim, device="cuda"), scale=dim**-0.5,
    )  # fmt: skip
    names = ("q", "k", "v", "g", "beta")
    for name in names:
        getattr(inputs, name).requires_grad_(backward)
    o, ht = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True)
    actual = {"o": o}
    if backward:
        grads = torch.autograd.grad(o, [getattr(inputs, name) for name in names], inputs.do)
        actual |= {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    for name, x in actual.items():
        assert not x[:, tokens - 9 :].any(), f"{name}: rows after the last sequence"
    for first in (70 + 64 * 7, 1_048_576 - 300, tokens - 9 - 600):
        last = min(first + 600, tokens - 9)
        start, end = max(70, first - 1024), min(last + 1024, tokens - 9)
        expected = chunked_reference(window(inputs, start, end), gradients=backward)
        keep = slice(first - start, last - start)
        assert_close_per_head(
            {name: x[:, first:last] for name, x in actual.items()},
            {name: expected[name][:, keep] for name in actual},
            BF16,
            label=f"rows {first} to {last}",
        )
        if not backward and end == tokens - 9:
            assert_close_per_head({"ht": ht[1:]}, {"ht": expected["ht"]}, BF16)


@pytest.mark.parametrize("count", [3000, 70_000], ids=str)
def test_thousands_of_sequences(count):
    """Guards grid limits (65,535 on every axis but x) and tables per sequence."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 20 if count < 10_000 else 2, (count,), generator=generator).tolist()
    lengths[count // 2] = 300
    check(make_inputs(lengths, 1, 2, 64, 64, "mild", BF16, device="cuda", tail_tokens=5))


def test_many_heads_and_batches():
    """Guards batch times heads beyond 65,535 CTAs."""
    inputs = make_inputs((1100, 3), 64, 64, 16, 16, "mild", BF16, device="cuda")
    check(inputs)


def test_memory_is_given_back():
    """Guards leaks: a hundred calls hold what one holds."""
    inputs = make_inputs([1000, 24], 4, 8, device="cuda")
    run_public(inputs)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for n in range(100):
        lengths = [1000 - n, 24 + n]
        run_public(make_inputs(lengths, 4, 8, device="cuda"))
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + MIB


def test_long_sequence_beside_short_ones():
    """Guards plans for very uneven lengths."""
    inputs = make_inputs([1] * 50 + [9000] + [65] * 20, 2, 8, gate_profile="mild", device="cuda")
    actual = run_public(inputs)
    assert_close_per_head(actual, truth(inputs), BF16)

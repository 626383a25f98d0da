"""Splitting inside the card through the public functions, on the kernels (PyTorch's: `tests/cpu/test_cp.py`)."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flash_qla
from flash_qla.ops.gated_delta_rule.chunk import replay
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context, planner
from flash_qla.testing.compare import assert_close_per_head, block_errors, chunked_reference, head_errors
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import INPUT_NAMES, assert_same_bits, capture, gradient_name, run_public, truth

BF16, FP32 = torch.bfloat16, torch.float32
# Off against on, per 64-row block: bf16 rounding and no more.
LIMIT = 1e-2
# By head: states, and dg. A head that does not decay has blocks whose dg is a small sum of large terms (<S, dS'>), so
# that rounding S and dS to bf16 alone moves the worst block by 4e-2, the head by 5e-3 (emulated); `test_blocks_of_dg`.
BY_HEAD = ("ht", "h0", "dh0", "dg")
RAGGED = [1000, 0, 24, 777, 1, 2500]
FORCED = {"force_intra_cp": True}


def make(lengths, heads=(2, 8), profile="mild", **kwargs):
    return make_inputs(lengths, *heads, 128, 128, profile, BF16, device="cuda", **kwargs)


def assert_blocks_agree(actual, expected, by_head=BY_HEAD):
    for name, x in expected.items():
        if x is not None and x.numel():
            errors = head_errors(name, actual[name], x) if name in by_head else block_errors(actual[name], x)
            assert errors.max() <= LIMIT, f"{name}: {errors.max().item():.2e}"


@pytest.fixture
def splits(monkeypatch):
    """Every decision of the planner: (passes, chunks of a segment or None)."""
    seen, decide = [], planner.split_of_call

    def watched(passes, *args, **kwargs):
        split = decide(passes, *args, **kwargs)
        seen.append((passes, split and split.segment_chunks))
        return split

    monkeypatch.setattr(planner, "split_of_call", watched)
    replay.forget()  # a replayed call asks nobody
    yield seen
    replay.forget()


@pytest.mark.parametrize("profile", ["none", "mild", "strong", "mixed", "extreme"])
@pytest.mark.parametrize("lengths", [[8192], RAGGED, (2, 4000)], ids=["long", "ragged", "dense_batch"])
def test_on_against_off(lengths, profile):
    """Guards the drivers: every output and gradient, block by block, with whatever gates."""
    tail = {} if isinstance(lengths, tuple) else {"tail_tokens": 30}
    inputs = make(lengths, profile=profile, **tail)
    expected, actual = run_public(inputs, auto_cp=False), run_public(inputs, **FORCED)
    assert_blocks_agree(actual, expected)
    if tail:
        assert not any(actual[name][:, -30:].any() for name in ("o", "dq", "dk", "dv", "dg", "dbeta"))


@pytest.mark.parametrize("profile", ["none", "mild"])
def test_blocks_of_dg(profile):
    """Guards dg block by block: a split's error against float64 is at most half as large again as without.

    The worst block of all heads, and each head's median: the worst block of one head is luck (0.029 to 0.061 seen).
    """
    inputs = make([8192], profile=profile)
    wide = replace(inputs, **{n: getattr(inputs, n).double() for n in (*INPUT_NAMES, "do", "dht")})
    exact = chunked_reference(wide)["dg"]
    off, on = (block_errors(run_public(inputs, **o)["dg"], exact)[0] for o in ({"auto_cp": False}, FORCED))
    assert on.max() <= 1.5 * off.max() + LIMIT, f"off {off.max():.1e}, on {on.max():.1e}"
    assert (on.median(0).values <= 1.5 * off.median(0).values + 1e-3).all()


def test_against_float64():
    """Guards the absolute error, not only the agreement."""
    inputs = make([500, 20, 333], heads=(2, 4), profile="mixed")
    for segment_chunks in (1, 3):
        context = FlashQLACPContext(segment_chunks=segment_chunks)
        assert_close_per_head(run_public(inputs, cp_context=context), truth(inputs), BF16)


def test_the_planner_splits_by_itself(splits):
    """2/8 heads at 32768: the case that it is there for, forward and backward."""
    inputs = make([32768])
    actual = run_public(inputs)
    assert dict(splits)["fwd"] and dict(splits)["bwd"]
    assert_blocks_agree(actual, run_public(inputs, auto_cp=False))


@pytest.mark.parametrize("scale", [0.5, 1.6], ids="keys{}".format)
def test_keys_that_are_not_normalised(scale):
    """Guards the growth in the bound: such transitions do not decay as their gates say."""
    inputs = make([4096], heads=(2, 4))
    inputs = replace(inputs, k=scale * inputs.k, g=inputs.g - 0.02)
    assert_blocks_agree(run_public(inputs, **FORCED), run_public(inputs, auto_cp=False))


@pytest.mark.parametrize("offset", [-320, -64, -1, 0, 1, 100], ids="edge{:+}".format)
def test_huge_value_near_an_edge(offset):
    """Guards the cut-off: a value 1000 times the others on either side of an edge, or just before a warm-up."""
    inputs = make([4096], heads=(2, 4))
    v, do = inputs.v.clone(), inputs.do.clone()
    v[:, 1024 + offset] *= 1000
    do[:, 1023 - offset] *= 1000
    inputs = replace(inputs, v=v, do=do)
    # Beside bf16 operands that held the outlier small blocks are its rounding, without a split as well (dq 4e-2 in a
    # block, dbeta 2.5e-2, dg 1.2e-2 by head between the two): each block's own error, against float64, decides.
    wide = replace(inputs, **{n: getattr(inputs, n).double() for n in (*INPUT_NAMES, "do", "dht")})
    exact, off = chunked_reference(wide), run_public(inputs, auto_cp=False)
    on = run_public(inputs, cp_context=FlashQLACPContext(segment_chunks=16))
    for name, x in exact.items():
        errors = head_errors if name in BY_HEAD else lambda _, actual, expected: block_errors(actual, expected)
        e_on, e_off = (errors(name, each[name], x) for each in (on, off))
        limit = 1.5 * e_off.max() + LIMIT
        assert e_on.max() <= limit, f"{name}: {e_on.max().item():.2e}, without a split {e_off.max().item():.2e}"


def test_same_bits_however_it_is_called():
    """Guards what must not change a bit: gradients or none, cache or none, checkpoints, V-first states, repeats."""
    inputs = make([8192, 100], profile="mixed")
    expected = run_public(inputs, **FORCED)
    assert_same_bits(run_public(inputs, **FORCED, enable_fwd_cp_cache=False), expected, "no cache")
    assert_same_bits(run_public(inputs, **FORCED, v_first=True), expected, "V-first")
    forward = run_public(inputs, **FORCED, gradients=False)
    assert_same_bits(forward, {name: expected[name] for name in forward}, "no gradients")
    for _ in range(20):
        assert_same_bits(run_public(inputs, **FORCED), expected, "repeat")


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensor_hooks"])
def test_checkpointed_calls_are_bit_equal(reentrant, splits):
    inputs = make([32768])
    results = []
    for wrapped in (False, True):
        x = inputs.differentiable()
        leaves = [getattr(x, name) for name in INPUT_NAMES]

        def call(*tensors):
            kwargs = {**inputs.kwargs, **dict(zip(INPUT_NAMES, tensors))}
            return flash_qla.chunk_gated_delta_rule(**kwargs, output_final_state=True)[0]

        o = checkpoint(call, *leaves, use_reentrant=reentrant) if wrapped else call(*leaves)
        o.backward(inputs.do)
        results.append({"o": o.detach(), **{gradient_name(n): leaf.grad for n, leaf in zip(INPUT_NAMES, leaves)}})
    assert dict(splits)["fwd"]
    assert_same_bits(*results)


@pytest.mark.parametrize("with_cache", [True, False], ids=["cached", "recomputed"])
def test_low_level(with_cache):
    """Guards cp_cache, and the states of all chunks in order."""
    inputs = make(RAGGED, heads=(2, 4))
    arguments = {"scale": inputs.scale, "initial_state": inputs.initial_state, "cu_seqlens": inputs.cu_seqlens}
    tensors, results = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta), []
    for context in (None, FlashQLACPContext(segment_chunks=5)):
        options = {**arguments, "auto_cp": False, "cp_context": context}
        g_cumsum, A, o, h, ht, cache = flash_qla.chunk_gated_delta_rule_fwd(
            *tensors, **options, output_h=True, enable_fwd_cp_cache=with_cache
        )
        assert (cache is not None) == (with_cache and context is not None)
        names = ("dq", "dk", "dv", "dbeta", "dg", "dh0")
        grads = flash_qla.chunk_gated_delta_rule_bwd(
            *tensors[:3], g_cumsum, inputs.beta, A, inputs.do, inputs.dht, **options, cp_cache=cache
        )
        results.append({"o": o, "ht": ht, **dict(zip(names, grads))})
        results[-1]["h0"] = h[0]
    assert_blocks_agree(
        {k: v for k, v in results[1].items() if k != "h0"}, {k: v for k, v in results[0].items() if k != "h0"}
    )
    assert head_errors("h0", results[1]["h0"], results[0]["h0"]).max() <= LIMIT


def test_no_synchronisation():
    """Guards the plan and the tables: neither reads the device, with lengths that only the device knows."""
    inputs = make([20000, 3000, 0, 9768])
    expected = run_public(inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = run_public(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_graph_follows_the_offsets(passes):
    """Guards the segments' places, which a replay must find anew: other lengths, empty sequences, one long sequence."""
    captured = [2048] * 4
    inputs = make(captured)
    leaves = inputs.differentiable()
    tensors = [getattr(leaves, name) for name in INPUT_NAMES]
    options = {"output_final_state": True, "cp_context": FlashQLACPContext(segment_chunks=8)}

    def call():
        if passes == "forward":
            with torch.no_grad():
                return flash_qla.chunk_gated_delta_rule(**leaves.kwargs, **options)
        o, ht = flash_qla.chunk_gated_delta_rule(**leaves.kwargs, **options)
        return o, ht, *torch.autograd.grad([o, ht], tensors, [inputs.do, inputs.dht])

    graph, outputs = capture(call)
    names = ("o", "ht", *map(gradient_name, INPUT_NAMES))[: len(outputs)]
    for lengths in (captured, [8192, 0, 0, 0], [0, 5, 8187, 0], [100, 0, 1, 700], [0] * 4):
        cu = torch.tensor([0, *accumulate(lengths)], dtype=leaves.cu_seqlens.dtype, device="cuda")
        leaves.cu_seqlens.copy_(cu)
        for x in outputs:
            x.detach().fill_(float("nan"))
        graph.replay()
        problem = replace(inputs, cu_seqlens=cu, lengths=lengths)
        expected = run_public(problem, gradients=passes == "backward", auto_cp=False)
        assert_blocks_agree(dict(zip(names, outputs)), {name: expected[name] for name in names})


def test_nan_stays_in_its_sequence():
    inputs = make([2000, 1500, 2000], profile="mixed")
    v = inputs.v.clone()
    v[:, 2000:3500] = torch.nan
    context = FlashQLACPContext(segment_chunks=8)
    actual, expected = (run_public(x, cp_context=context) for x in (replace(inputs, v=v), inputs))
    for name in ("o", "dq", "dk", "dv", "dbeta", "dg"):
        for rows in (slice(0, 2000), slice(3500, 5500)):
            assert torch.equal(actual[name][:, rows], expected[name][:, rows]), name


def test_lengths_and_heads_do_not_compile():
    """Guards the segments' compile keys: segment length, tolerance and everything else are run-time values."""
    for segment_chunks in (1, 40):  # one value warpgroup a CTA, or two
        run_public(make([8192], (4, 16)), cp_context=FlashQLACPContext(segment_chunks=segment_chunks))
    run_public(make([8192]), **FORCED)
    compiled = flash_qla.compile_count()
    for heads, lengths in (((2, 8), [3000, 5000]), ((1, 4), (2, 3000)), ((4, 16), [20000])):
        for segment_chunks in (1, 6, 40):
            run_public(make(lengths, heads), cp_context=FlashQLACPContext(segment_chunks=segment_chunks))
    assert flash_qla.compile_count() == compiled


def test_context_with_gates(splits):
    """Guards build_cp_context(g=...): fast gates make segments cheap, none decaying makes them dear."""
    plans = {}
    for profile, rate in (("fast", -1.0), ("none", 0.0)):
        inputs = make([32768])
        inputs = replace(inputs, g=torch.full_like(inputs.g, rate))
        context = build_cp_context(inputs.cu_seqlens, enable_intra=True, g=inputs.g, num_v_heads=8)
        splits.clear()
        actual = run_public(inputs, cp_context=context, gradients=False)
        plans[profile] = dict(splits)["fwd"]
        assert_blocks_agree(actual, run_public(inputs, auto_cp=False, gradients=False))
    assert plans["fast"]

"""Sequences split into segments give, in the kernels, what they give unsplit: block by block, up to rounding."""

from dataclasses import replace

import pytest
import torch

from flash_qla.ops.gated_delta_rule.chunk.split import Split
from flash_qla.testing.compare import block_errors, head_errors
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import assert_same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = 1e-2
RAGGED = [100, 0, 1, 63, 64, 65, 0, 857, 0]


def run(inputs, segment_chunks=None, tolerance=-12.0):
    """All results of the kernels' stages, every sequence split or none."""
    from flash_qla.ops.gated_delta_rule.chunk.kernels import stages

    q, k, v, beta, h0, seqs = inputs.q, inputs.k, inputs.v, inputs.beta, inputs.initial_state, inputs.seqs
    split = (
        Split(segment_chunks, tolerance, sum(-(-n // segment_chunks) for n in seqs.num_chunks()))
        if segment_chunks
        else None
    )
    g_cumsum, T_inv = stages.solve(k, inputs.g, beta, seqs)
    solved = (T_inv, g_cumsum, beta)
    entering = leaving = None
    if segment_chunks is not None:
        split = Split(segment_chunks, tolerance, sum(-(-n // segment_chunks) for n in seqs.num_chunks()))
        entering = stages.entering_states(k, v, *solved, h0, seqs, split, for_backward=True)
        leaving = stages.leaving_cotangents(q, k, *solved, inputs.do, inputs.dht, inputs.scale, seqs, split, entering)
    ht = inputs.do.new_empty((seqs.num_seqs, v.shape[2], k.shape[3], v.shape[3]), dtype=FP32)
    found = {"o": torch.empty_like(v), "ht": ht, "dh0": None if h0 is None else torch.empty_like(h0)}
    stages.fused_forward(found["o"], ht, None, q, k, v, *solved, inputs.scale, h0, seqs, entering)
    S, dS = stages.backward_states(
        q, k, v, *solved, inputs.do, inputs.scale, h0, inputs.dht, found["dh0"], seqs, entering, leaving
    )
    sources = {"dq": q, "dk": k, "dv": v, "dbeta": g_cumsum, "dg": g_cumsum}
    found |= {name: torch.empty_like(x) for name, x in sources.items()}
    stages.gradients(*(found[name] for name in sources), q, k, v, *solved, inputs.do, inputs.scale, S, dS, seqs)
    return {name: x for name, x in found.items() if x is not None}


def check(inputs, segment_chunks, limits=None, **kwargs):
    """Asserts that split and unsplit agree in every 64-row block of every tensor; returns the split results.

    Args:
        limits: per head instead of per block, for these tensors.
    """
    limits = {"ht": LIMIT, "dh0": LIMIT, "dg": LIMIT} | (limits or {})
    expected, actual = run(inputs), run(inputs, segment_chunks, **kwargs)
    for name, x in expected.items():
        # dg's last row of a chunk holds <S, dS>, whose terms drown their sum where nothing decays: no two roundings of
        # the states agree to 1e-2 in every block, split or not.
        errors = head_errors(name, actual[name], x) if name in limits else block_errors(actual[name], x)
        limit = limits.get(name, LIMIT)
        assert errors.numel() == 0 or errors.max() <= limit, f"{name}: {errors.max().item():.2e}"
    return actual


def make(lengths, heads=(2, 4), dims=(128, 128), profile="mixed", dtype=BF16, **kwargs):
    return make_inputs(lengths, *heads, *dims, profile, dtype, device="cuda", **kwargs)


@pytest.mark.parametrize("profile", ["none", "mild", "strong", "mixed", "extreme"])
@pytest.mark.parametrize("segment_chunks", [1, 4, 32], ids="S{}".format)
def test_gates(profile, segment_chunks):
    """Guards the carry decision, the warm-up and the scan: heads that never, slowly and always forget."""
    check(make([2048 if segment_chunks < 32 else 8192], profile=profile), segment_chunks)


@pytest.mark.parametrize("segment_chunks", [1, 2, 5], ids="S{}".format)
def test_ragged_and_empty(segment_chunks):
    """Guards the segment slots, sequences shorter than a segment, and the rows after the last sequence."""
    actual = check(make(RAGGED, tail_tokens=19), segment_chunks)
    assert actual["o"][:, sum(RAGGED) :].abs().max() == 0


def test_many_sequences():
    """Guards the search for a slot's sequence."""
    check(make([65, 0, 130] * 200, profile="none"), 1)


def test_dense_batch():
    """Guards the batch index of dense inputs, whose length is no multiple of a segment."""
    check(make((3, 500), heads=(2, 6)), 3)


def test_without_states():
    """Guards the first step of each scan from zero, whose transition nobody computed."""
    inputs = make([330, 900], with_state=False)
    check(replace(inputs, dht=None), 2)


@pytest.mark.parametrize("scale", [0.5, 1.6], ids="keys{}".format)
def test_keys_that_are_not_normalised(scale):
    """Guards the growth in the bound: a transition of long keys does not decay as its gate says."""
    inputs = make([2048], profile="mild")
    check(replace(inputs, k=inputs.k * scale, g=inputs.g - 0.02), 4)


@pytest.mark.parametrize("offset", [-1, 0, 1, -64, 130], ids="edge{:+}".format)
def test_huge_value_near_an_edge(offset):
    """Guards what crosses a segment's edge: one token a thousand times larger, at every place relative to it.

    dbeta and dg are small sums of large terms then: states that differ by rounding move a head's dg by 1.3e-2 and
    single blocks of both by more (emulated), so these two are held to 3e-2 per head.
    """
    inputs = make([1024], profile="mild")
    v, do = inputs.v.clone(), inputs.do.clone()
    v[:, 256 + offset] *= 1000
    do[:, 255 + offset] *= 1000
    check(replace(inputs, v=v, do=do), 4, {"dbeta": 3e-2, "dg": 3e-2})


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (80, 32)], ids=str)
def test_head_sizes(dims):
    """Guards the tiles of K and V, and padding."""
    check(make([530, 300], dims=dims), 2)


@pytest.mark.parametrize("dtype, state", [(FP16, FP32), (BF16, BF16)], ids=["fp16", "bf16-state"])
def test_dtypes(dtype, state):
    """Guards the variants by dtype."""
    inputs = make([530, 300], dtype=dtype, state_dtype=state, beta_dtype=state)
    check(replace(inputs, dht=inputs.dht.to(state)), 2)


def test_cutting_nothing_off_is_as_good():
    """Guards the transitions: with a tolerance of 0 as norm every head carries."""
    check(make([2048], profile="mild"), 4, tolerance=-torch.inf)


def test_repeats_bit_by_bit():
    """Guards against races between the launches and inside them."""
    inputs = make([4000, 100, 2000], heads=(2, 8))
    first = run(inputs, 4)
    for _ in range(50):
        assert_same_bits(run(inputs, 4), first)

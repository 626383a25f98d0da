"""Values that nobody should send and somebody does, judged by the recurrence, by isolation and by symmetries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qla.testing.compare import ground_truth
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import GRADIENTS, run_public

LENGTHS = [130, 0, 200, 64]
SPLIT = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])


@pytest.fixture(autouse=True)
def exact_splits(monkeypatch):
    """A split that leaves nothing out equals no split."""
    monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", "-1e9")


# --- against the recurrence

GATES = (-math.inf, -1e30, -1e4, -100.0, -99.9, -30.0, -1.0, -1e-8, -1e-300, -0.0, 0.0, 1e-3, 0.05)


@settings(max_examples=15)
@given(
    gates=st.lists(st.sampled_from(GATES), min_size=1, max_size=4),
    share=st.sampled_from([0.05, 0.5, 1.0]),
    key_scale=st.sampled_from([1e-160, 0.3, 1.0, 1.4, 4.0]),
    betas=st.tuples(st.floats(-0.5, 0.0), st.floats(0.0, 2.0)),
    zero=st.sampled_from(["", "q", "k", "v", "beta", "do", "initial_state"]),
    split=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_values_equal_the_recurrence(gates, share, key_scale, betas, zero, split, seed):
    """Gates that reset, that barely decay and that grow; keys of any length; beta below 0 and up to 2; zeros.

    beta |k|^2 stays within the rule's stable range, where float64 has digits left to compare: gates of +0.05 over 130
    tokens are a factor of 665.
    """
    x = make_inputs([130, 3], 1, 2, 4, 3, "none", torch.float64, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.tensor(gates, dtype=torch.float64)[torch.randint(len(gates), x.g.shape, generator=generator)]
    g = torch.where(torch.rand(x.g.shape, generator=generator) < share, chosen, -0.01)
    draw = torch.rand(x.beta.shape, generator=generator, dtype=torch.float64)
    beta = (betas[0] + (betas[1] - betas[0]) * draw) / max(1.0, key_scale**2)
    x = replace(x, k=key_scale * x.k, g=g, beta=beta)
    if zero:
        x = replace(x, **{zero: torch.zeros_like(getattr(x, zero))})
    actual, expected = run_public(x, force_intra_cp=split), ground_truth(x)
    for name in ("o", "ht", *GRADIENTS):
        bound = 1e-9 * max(expected[name].abs().max().item(), 1e-6)
        assert (actual[name] - expected[name]).abs().max() <= bound, name


# --- isolation


@SPLIT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "do", "initial_state", "dht"])
def test_bad_values_stay_in_their_sequence(name, value, split):
    """Guards every gather past a chunk's or segment's end, and every table shared by sequences: the same bits."""
    clean = make_inputs(LENGTHS, 1, 2, 4, 3, "mild", torch.float32)
    start, end = clean.cu_seqlens[2:4].tolist()
    x = getattr(clean, name).clone()
    (x[2] if name in ("initial_state", "dht") else x[:, start:end]).fill_(value)
    actual, expected = (run_public(y, force_intra_cp=split) for y in (replace(clean, **{name: x}), clean))
    for result, y in actual.items():
        of_states = result in ("ht", "dh0")
        rows = torch.tensor([0, 1, 3]) if of_states else torch.cat([torch.arange(start), torch.arange(end, y.shape[1])])
        axis = 0 if of_states else 1
        assert torch.equal(y.index_select(axis, rows), expected[result].index_select(axis, rows)), result


@SPLIT
@pytest.mark.parametrize("name", ["v", "g", "beta", "do", "initial_state", "dht"])
def test_bad_values_stay_in_their_head(name, split):
    """Guards products over heads: of value heads nothing is shared but their key head's q and k, and its gradients."""
    clean = make_inputs(LENGTHS, 2, 4, 4, 3, "mild", torch.float32)
    x = getattr(clean, name).clone()
    x.select(1 if name in ("initial_state", "dht") else 2, 0).fill_(math.nan)
    actual, expected = (run_public(y, force_intra_cp=split) for y in (replace(clean, **{name: x}), clean))
    for result, y in actual.items():
        axis, first = (1 if result in ("ht", "dh0") else 2), 1
        kept = y.shape[axis] - first
        assert torch.equal(y.narrow(axis, first, kept), expected[result].narrow(axis, first, kept)), result


# --- symmetries


@SPLIT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("power", [-30, 30])
def test_scaling_by_a_power_of_two(power, dtype, split):
    """The rule is linear in (v, h0) and its gradients are in (do, dht): no constant is added anywhere, no value is
    cut off, and nothing is rounded in a format of fewer exponents.
    """
    x, factor = make_inputs(LENGTHS, 1, 2, 4, 3, "mild", dtype), 2.0**power  # strong gates would underflow
    expected = run_public(x, force_intra_cp=split)
    forward = run_public(replace(x, v=factor * x.v, initial_state=factor * x.initial_state), force_intra_cp=split)
    backward = run_public(replace(x, do=factor * x.do, dht=factor * x.dht), force_intra_cp=split)
    for name, y in expected.items():
        assert torch.equal(forward[name], y if name in ("dv", "dh0") else factor * y), name
        assert torch.equal(backward[name], y if name in ("o", "ht") else factor * y), name


@SPLIT
def test_order_of_sequences_and_heads(split):
    """Neither the company of a sequence changes it, nor the place of a key head with its value heads (up to rounding:
    a matrix product's bits may depend on where its operands lie).
    """
    x = make_inputs([130, 5, 70], 2, 4, 4, 3, "mild", torch.float32)
    expected = run_public(x, force_intra_cp=split)
    heads = {"q": [1, 0], "k": [1, 0]}
    swapped = replace(
        x,
        **{n: getattr(x, n)[:, :, heads.get(n, [2, 3, 0, 1])] for n in ("q", "k", "v", "g", "beta", "do")},
        **{n: getattr(x, n)[:, [2, 3, 0, 1]] for n in ("initial_state", "dht")},
    )
    actual = run_public(swapped, force_intra_cp=split)
    for name, y in expected.items():
        order = [1, 0] if name in ("dq", "dk") else [2, 3, 0, 1]
        moved = y[:, order] if name in ("ht", "dh0") else y[:, :, order]
        torch.testing.assert_close(actual[name], moved, rtol=1e-5, atol=1e-6, msg=name)
    alone = replace(
        x,
        **{n: getattr(x, n)[:, :130] for n in ("q", "k", "v", "g", "beta", "do")},
        **{n: getattr(x, n)[:1] for n in ("initial_state", "dht")},
        cu_seqlens=None,
        lengths=[130],
    )
    for name, y in run_public(alone, force_intra_cp=split).items():
        mine = expected[name][:1] if name in ("ht", "dh0") else expected[name][:, :130]
        torch.testing.assert_close(mine, y, rtol=1e-5, atol=1e-6, msg=name)

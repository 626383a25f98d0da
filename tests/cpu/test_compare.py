"""The comparison itself: what it must catch, and what it must let pass. And the input builder."""

import math

import pytest
import torch

from flash_qla.testing.compare import (
    NEAR_ZERO,
    assert_close_per_head,
    block_errors,
    compare,
    compare_all,
    ground_truth,
    head_errors,
    tolerance,
)
from flash_qla.testing.workloads import FIELD_HEADS, GATE_PROFILES, PEER_ROWS, Workload, make_inputs

BF16 = torch.bfloat16


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "bf16_cap"),
    [("o", 5e-3), ("ht", 5e-3), ("dq", 8e-3), ("dk", 8e-3), ("dv", 8e-3), ("dbeta", 8e-3), ("dh0", 8e-3), ("dg", 1e-2)],
)
def test_caps_of_the_issue(name, bf16_cap):
    assert tolerance(name, BF16) == bf16_cap
    caps = [tolerance(name, dtype) for dtype in (torch.float64, torch.float32, torch.float16, BF16)]
    assert caps == sorted(caps)


def test_one_bad_head_among_many_is_caught():
    expected = randn(1, 100, 32, 16)
    actual = expected.clone()
    expected[:, :, 5] *= 1e-3
    actual[:, :, 5] *= 1.02e-3
    assert (actual - expected).norm() / expected.norm() < 1e-4
    result = compare("o", actual, expected, BF16)
    assert result.failed_heads == [5]
    assert result.worst_head == 5
    assert "head 5" in str(result)
    assert result.errors[5] == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "head_axis"),
    [
        ("o", (2, 7, 3, 4), 2),
        ("dg", (2, 7, 3), 2),
        ("ht", (5, 3, 4, 4), 1),
        ("dh0", (5, 3, 4, 4), 1),
        ("dA_log", (3,), 0),
    ],
    ids=lambda x: str(x),
)
def test_head_axis(name, shape, head_axis):
    expected = randn(*shape)
    actual = expected.clone()
    actual.select(head_axis, 1).mul_(1.5)
    torch.testing.assert_close(head_errors(name, actual, expected), torch.tensor([0, 0.5, 0], dtype=torch.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_not_finite_fails(bad):
    expected = randn(1, 10, 4, 8)
    actual = expected.clone()
    actual[0, 3, 2, 1] = bad
    result = compare("o", actual, expected, BF16)
    assert result.failed_heads == [2]
    assert result.worst_head == 2


def test_near_zero_head_is_judged_absolutely():
    expected = {"dv": randn(1, 50, 2, 8), "dg": randn(1, 50, 2) * 1e-12}
    largest = expected["dv"].abs().max()
    noise = torch.full_like(expected["dg"], 0.5 * NEAR_ZERO * largest)
    assert_close_per_head({"dg": expected["dg"] + noise}, expected, BF16)
    with pytest.raises(AssertionError, match="dg: absolute error"):
        assert_close_per_head({"dg": expected["dg"] + 3 * noise}, expected, BF16)


def test_small_but_meaningful_head_is_judged_relatively():
    expected = randn(1, 50, 2)
    expected[..., 1] *= 1e-4
    actual = expected.clone()
    actual[..., 1] *= 1.1
    assert compare("dg", actual, expected, BF16).failed_heads == [1]


def test_all_zero_expected():
    zero = torch.zeros(1, 5, 2)
    assert compare("dg", zero, zero, BF16).passed
    assert not compare("dg", zero + 1e-30, zero, BF16).passed


def test_empty_tensors_pass():
    assert compare("o", torch.zeros(1, 0, 2, 4), torch.zeros(1, 0, 2, 4), BF16).passed
    assert compare("ht", torch.zeros(0, 2, 4, 4), torch.zeros(0, 2, 4, 4), BF16).passed


def test_shape_and_missing_tensors_are_named():
    x = randn(1, 5, 2, 4)
    with pytest.raises(AssertionError, match=r"o: shape \(1, 5, 2, 3\), expected \(1, 5, 2, 4\)"):
        compare("o", x[..., :3], x, BF16)
    with pytest.raises(AssertionError, match="dh0: missing"):
        compare_all({"dh0": None}, {"dh0": x}, BF16)
    with pytest.raises(AssertionError, match="dh0: not expected"):
        compare_all({"dh0": x}, {"dh0": None}, BF16)


def test_reference_error_bounds_as_well():
    expected = randn(1, 50, 2, 4)
    reference = expected * (1 + 1e-3)
    assert compare("o", expected * (1 + 1.9e-3), expected, BF16, reference=reference).passed
    assert not compare("o", expected * (1 + 2.1e-3), expected, BF16, reference=reference).passed
    assert not compare("o", expected * (1 + 6e-3), expected, BF16, reference=expected * (1 + 5e-3)).passed


def test_caps_may_only_be_tightened():
    x = randn(1, 5, 2, 4)
    with pytest.raises(ValueError, match="looser"):
        compare("o", x, x, BF16, cap=1e-2)
    assert not compare("o", x * 1.004, x, BF16, cap=3e-3).passed


def test_block_errors_localise():
    expected = randn(1, 130, 2, 4)
    actual = expected.clone()
    actual[0, 128:, 1] *= 1.5
    errors = block_errors(actual, expected)
    assert errors.shape == (1, 3, 2)
    torch.testing.assert_close(errors[0, 2, 1].item(), 0.5)
    assert errors.flatten()[:-1].abs().max() == 0
    assert block_errors(actual[..., 0], expected[..., 0]).shape == (1, 3, 2)


@pytest.mark.parametrize("profile", GATE_PROFILES)
def test_gate_profiles(profile):
    inputs = make_inputs([200, 56], 4, 8, 8, 8, profile, torch.float32)
    g = inputs.g
    assert g.shape == (1, 256, 8)
    assert g.max() <= 0
    undecayed = (g == 0).all(1).sum().item()
    assert undecayed == {"none": 8, "mild": 2, "strong": 1, "mixed": 2}.get(profile, 0)
    if profile == "strong":
        assert g[..., -1].mean() < -16
    if profile == "extreme":
        assert torch.isinf(g).any()
        assert (g == -1e4).any()


def test_unknown_profile_is_named():
    with pytest.raises(ValueError, match="gate_profile='weak'"):
        make_inputs([5], 1, 1, 4, 4, "weak")


def test_inputs_are_reproducible_and_complete():
    first, second = (make_inputs([5, 0, 9], 2, 4, 8, 6, seed=3, tail_tokens=2) for _ in range(2))
    assert torch.equal(first.q, second.q)
    assert first.v.shape == (1, 16, 4, 6)
    assert first.q.dtype == torch.bfloat16
    assert first.g.dtype == first.beta.dtype == first.initial_state.dtype == torch.float32
    assert first.cu_seqlens.tolist() == [0, 5, 5, 14]
    assert first.initial_state.shape == first.dht.shape == (3, 4, 8, 6)
    torch.testing.assert_close(first.k.float().norm(dim=-1), torch.ones(1, 16, 2), rtol=0, atol=1e-2)
    dense = make_inputs((2, 7), 2, 4, 8, 6, with_state=False, dtype=torch.float64)
    assert dense.cu_seqlens is None
    assert dense.initial_state is None
    assert dense.g.dtype == torch.float64
    assert dense.seqs.num_seqs == 2


def test_peer_rows_and_field_heads():
    assert len(PEER_ROWS) == 33
    assert len({row.id for row in PEER_ROWS}) == 33
    assert PEER_ROWS[0].id == "fwd-16h64-32768x1-mild"
    assert {(16, 16), (16, 48), (2, 4), (2, 6), (2, 8)} <= set(FIELD_HEADS)
    assert Workload((2, 100), 2, 4, 64, 64).id == "fwd-2h4-64x64-B2T100-mild"


def test_ground_truth_without_gradients_and_state():
    inputs = make_inputs([5, 0], 1, 2, 4, 4, with_state=False)
    assert set(ground_truth(inputs, gradients=False)) == {"o", "ht"}
    truth = ground_truth(inputs)
    assert truth["dh0"] is None
    assert all(x.dtype == torch.float64 for x in truth.values() if x is not None)

"""Unit tests of the operator on the device that is there: `python -m pytest tests/test_gdr_unit.py -v`.

A GPU runs whatever `FLASH_QLA_BACKEND` chooses (auto: the kernels where they exist), a machine without one PyTorch, at
sizes that two cores take in a minute. Everything is judged against float64, per head.
"""

from dataclasses import replace

import pytest
import torch

import flash_qla
from flash_qla.testing.compare import assert_close_per_head
from flash_qla.testing.workloads import GATE_PROFILES, LENGTH_CASES, make_inputs
from flash_qla.utils import l2norm
from tests.case_inputs import assert_same_bits, check, run_public, truth

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIMS = (128, 128) if DEVICE == "cuda" else (32, 32)
BF16, FP16 = torch.bfloat16, torch.float16


def make(lengths, heads=(2, 4), dims=DIMS, profile="strong", dtype=BF16, **kwargs):
    return make_inputs(lengths, *heads, *dims, profile, dtype, device=DEVICE, **kwargs)


@pytest.mark.parametrize("profile", GATE_PROFILES)
@pytest.mark.parametrize("lengths", LENGTH_CASES.values(), ids=LENGTH_CASES)
def test_packed(lengths, profile):
    """Guards chunk boundaries and gate arithmetic, forward and backward."""
    check(make(lengths, profile=profile))


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (2, 100), (3, 129), (4, 0)], ids="B{0[0]}-T{0[1]}".format)
def test_dense(shape):
    """Guards dense inputs: N = B sequences of equal length."""
    check(make(shape))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (1, 2), (1, 3), (2, 8), (1, 8)], ids=str)
def test_head_ratios(heads):
    """Guards the map from value heads to key heads, and the sums of dq and dk over a group."""
    check(make([70, 130], heads))


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (64, 128), (128, 64), (80, 96), (128, 128)], ids=str)
def test_head_sizes(dims):
    """Guards padded head sizes."""
    check(make([70, 64], dims=dims))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("gate_dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16], ids=str)
def test_dtypes(dtype, gate_dtype, state_dtype):
    """Guards the dtypes that servers and trainers use, result dtypes included."""
    inputs = make([70, 64], dtype=dtype, gate_dtype=gate_dtype, beta_dtype=gate_dtype, state_dtype=state_dtype)
    results = run_public(inputs)
    assert results["o"].dtype == dtype and results["ht"].dtype == torch.float32
    assert results["dg"].dtype == gate_dtype and results["dh0"].dtype == state_dtype
    expected = truth(inputs)
    rounded = ("dg", "dbeta") if gate_dtype == BF16 else ()
    assert_close_per_head({n: x for n, x in results.items() if n not in rounded}, expected, dtype)


@pytest.mark.parametrize("with_state", [False, True], ids=["no_state", "state"])
@pytest.mark.parametrize("final", [False, True], ids=["no_final", "final"])
def test_states(with_state, final):
    """Guards absent states on either side."""
    inputs = make([70, 0, 64], with_state=with_state)
    if not final:
        inputs = replace(inputs, dht=torch.zeros_like(inputs.dht))
    results = run_public(inputs, output_final_state=final)
    if not final:
        assert results.pop("ht") is None
    assert_close_per_head(results, truth(inputs), BF16)


def test_v_first():
    """Guards the state's other layout: the same bits."""
    inputs = make([70, 0, 130])
    assert_same_bits(run_public(inputs, v_first=True), run_public(inputs))


def test_l2norm_in_kernel():
    """Guards the fused norm against the helper applied outside."""
    inputs = make([70, 130], normalize=False)
    outside = replace(inputs, q=l2norm(inputs.q), k=l2norm(inputs.k))
    actual, expected = run_public(inputs, use_qk_l2norm_in_kernel=True), run_public(outside)
    for name in ("o", "ht", "dv", "dg", "dbeta", "dh0"):
        assert torch.equal(actual[name], expected[name]), name
    assert_close_per_head({n: actual[n] for n in ("o", "ht")}, truth(outside, gradients=False), BF16)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7], ids="pieces{}".format)
def test_prompt_in_pieces(pieces):
    """Guards the carried state: a prompt in pieces gives what it gives in one call."""
    inputs = make((1, 400), profile="mild")
    state, outputs = inputs.initial_state, []
    for rows in torch.arange(400).chunk(pieces):
        part = {n: getattr(inputs, n)[:, rows[0] : rows[-1] + 1] for n in ("q", "k", "v", "g", "beta")}
        o, state = flash_qla.chunk_gated_delta_rule(**part, initial_state=state, output_final_state=True)
        outputs.append(o)
    assert_close_per_head({"o": torch.cat(outputs, 1), "ht": state}, truth(inputs, gradients=False), BF16)


def test_low_level():
    """Guards the separate halves."""
    inputs = make([70, 130])
    expected = run_public(inputs)
    tensors = (inputs.q, inputs.k, inputs.v)
    g_cumsum, A, o, _, ht, cache = flash_qla.chunk_gated_delta_rule_fwd(
        *tensors, inputs.g, inputs.beta, inputs.scale, inputs.initial_state, inputs.cu_seqlens
    )
    grads = flash_qla.chunk_gated_delta_rule_bwd(
        *tensors, g_cumsum, inputs.beta, A, inputs.do, inputs.dht, inputs.scale, inputs.initial_state,
        inputs.cu_seqlens, cp_cache=cache,
    )  # fmt: skip
    results = {"o": o, "ht": ht} | dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), grads, strict=True))
    assert_same_bits(results, {name: expected[name] for name in results})

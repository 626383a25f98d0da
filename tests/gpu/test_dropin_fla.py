"""flash-linear-attention hands its gated delta rule to this package, and agrees with its own Triton kernels.

PEER_FLA may name a folder that holds `fla`. FLA_FLASH_QLA=0 makes FLA use its own kernels; it reads it at every call.
"""

import importlib
import os
import sys

import pytest
import torch

import flash_qla
from flash_qla.testing.compare import assert_close_per_head, ground_truth
from flash_qla.testing.workloads import make_inputs
from tests import kernel_roundings

DEVICE = "cuda"
# ‖ours - FLA's‖ / ‖FLA's‖, as FLA's own tests of this operator compare; both round to bf16.
RATIOS = {"o": 5e-3, "ht": 5e-3, "dg": 2e-2}
GRADIENT_RATIO = 8e-3

CASES = {
    # id: (lengths, q/k heads, value heads, gate profile, options of the call)
    # One pair of head counts: FLA compiles 60 candidates of 8 kernels for each pair and layout.
    "dense": ((2, 257), 2, 4, "mild", {}),
    "dense_of_two_chunks": ((3, 128), 2, 4, "mild", {}),
    "varlen_gva": ([130, 7, 64, 200], 2, 4, "mild", {}),
    "varlen_v_first": ([65, 1, 190], 2, 4, "mild", {"state_v_first": True}),
    "varlen_l2norm": ([100, 93], 2, 4, "mild", {"use_qk_l2norm_in_kernel": True}),
    "no_decay": ([128, 77], 2, 4, "none", {}),
    "no_scale": ([128, 77], 2, 4, "mild", {"scale": None}),
}


@pytest.fixture(scope="module")
def fla_function():
    """FLA's public function, from PEER_FLA where the environment has no FLA of its own."""
    folder = os.environ.get("PEER_FLA")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except ImportError as error:
        pytest.skip(f"flash-linear-attention is not here: {error}")


@pytest.fixture
def our_calls(monkeypatch):
    """The keyword arguments of every call that reaches flash_qla.chunk_gated_delta_rule."""
    monkeypatch.delenv("FLA_FLASH_QLA", raising=False)
    calls, function = [], flash_qla.chunk_gated_delta_rule

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule", spy)
    return calls


def _run(function, inputs, options, *, gradients=True):
    """Calls with FLA's keywords; states in the caller's layout go in, K-first results come back."""
    v_first = options.get("state_v_first", False)

    def turned(state):
        return state.transpose(-1, -2).contiguous() if v_first else state

    x = inputs.differentiable() if gradients else inputs
    arguments = {**x.kwargs, **options, "output_final_state": True}
    state = turned(x.initial_state.detach()).requires_grad_(gradients)
    arguments["initial_state"] = state
    o, ht = function(**arguments)
    results = {"o": o, "ht": turned(ht)}
    if gradients:
        leaves = {"dq": x.q, "dk": x.k, "dv": x.v, "dg": x.g, "dbeta": x.beta, "dh0": state}
        grads = torch.autograd.grad([o, ht], list(leaves.values()), [x.do, turned(x.dht).to(ht.dtype)])
        results |= dict(zip(leaves, grads, strict=True))
        results["dh0"] = turned(results["dh0"])
    return {name: tensor.detach() for name, tensor in results.items()}


def _assert_agree(ours, theirs):
    for name, expected in theirs.items():
        ratio = float((ours[name].double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
        assert ratio <= RATIOS.get(name, GRADIENT_RATIO), f"{name}: differs from FLA's Triton path by {ratio:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_fla_routes_to_us_and_agrees_with_its_own_kernels(case, fla_function, our_calls, monkeypatch):
    lengths, num_k_heads, num_v_heads, gate, options = CASES[case]
    inputs = make_inputs(lengths, num_k_heads, num_v_heads, gate_profile=gate, device=DEVICE)
    ours = _run(fla_function, inputs, options)
    assert len(our_calls) == 1, "FLA did not hand the call to flash_qla"
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    theirs = _run(fla_function, inputs, options)
    assert len(our_calls) == 1, "FLA_FLASH_QLA=0 did not turn us off: nothing was compared"
    _assert_agree(ours, theirs)
    if not options.get("use_qk_l2norm_in_kernel"):
        assert_close_per_head(ours, ground_truth(inputs), torch.bfloat16, label=f"{case} through FLA")


@pytest.mark.parametrize("case", ["varlen_gva", "varlen_v_first"])
def test_forward_only(case, fla_function, our_calls, monkeypatch):
    lengths, num_k_heads, num_v_heads, gate, options = CASES[case]
    inputs = make_inputs(lengths, num_k_heads, num_v_heads, gate_profile=gate, device=DEVICE)
    with torch.no_grad():
        ours = _run(fla_function, inputs, options, gradients=False)
        assert len(our_calls) == 1
        monkeypatch.setenv("FLA_FLASH_QLA", "0")
        theirs = _run(fla_function, inputs, options, gradients=False)
    assert len(our_calls) == 1
    assert not ours["o"].requires_grad
    _assert_agree(ours, theirs)


def test_strong_gates_are_right_through_fla(fla_function, our_calls):
    """Against float64 alone: FLA's own dg is not right there. Where a sum all but cancels, roundings are the bound."""
    inputs = make_inputs([130, 70], 2, 4, gate_profile="strong", device=DEVICE)
    results = _run(fla_function, inputs, {})
    assert len(our_calls) == 1
    kernel_roundings.judge(inputs, results, ["dg"])

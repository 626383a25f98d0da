"""The public contract: names, signatures, what every argument means, and how it behaves under autograd.

One file of more than 600 lines: one section per clause of the contract, in its order.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import flash_qla
from flash_qla.ops.gated_delta_rule.chunk import interface
from flash_qla.ops.gated_delta_rule.chunk import reference as stages
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context
from flash_qla.testing.compare import assert_close_per_head
from flash_qla.testing.workloads import GATE_PROFILES, make_inputs
from tests.case_inputs import (
    GRADIENTS,
    INPUT_NAMES,
    assert_same_bits,
    digest,
    gradient_name,
    run_public,
    strided_copy,
    truth,
    without_dht,
)

LENGTHS = [70, 0, 5, 130]


def small(dtype=torch.float32, lengths=LENGTHS, profile="mild", heads=(2, 4), dims=(16, 12), **kwargs):
    return make_inputs(lengths, *heads, *dims, profile, dtype, **kwargs)


# --- names and signatures

NAMES = {
    "flash_qla": (
        *("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd", "__version__"),
        *("supports", "warmup", "compile_count"),
    ),
    "flash_qla.ops": ("chunk_gated_delta_rule",),
    "flash_qla.ops.gated_delta_rule": (
        *("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"),
    ),
    "flash_qla.ops.gated_delta_rule.chunk": (
        *("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"),
        *("kkt_solve", "fused_gdr_fwd", "fused_gdr_h"),
    ),
    "flash_qla.ops.gated_delta_rule.chunk.cp": ("build_cp_context", "FlashQLACPContext"),
    "flash_qla.utils": ("l2norm", "l2norm_fwd", "l2norm_bwd"),
    "flash_qla.ops.utils": ("chunk_local_cumsum",),
}

SIGNATURES = {
    "flash_qla:chunk_gated_delta_rule": (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "cu_seqlens=None, head_first=False, state_v_first=False, auto_cp=True, enable_fwd_cp_cache=True, "
        "cp_context=None, force_intra_cp=False, *, use_gate_in_kernel=False, A_log=None, dt_bias=None, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, cu_seqlens_cpu=None, chunk_indices=None, "
        "chunk_size=None, transpose_state_layout=None, out=None, state_dtype=None"
    ),
    "flash_qla:chunk_gated_delta_rule_fwd": (
        "q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, output_final_state=True, output_h=False, "
        "auto_cp=True, state_v_first=False, enable_fwd_cp_cache=False, cp_context=None, is_train=None, *, "
        "cu_seqlens_cpu=None"
    ),
    "flash_qla:chunk_gated_delta_rule_bwd": (
        "q, k, v, g, beta, A, do, dht=None, scale=None, initial_state=None, cu_seqlens=None, state_v_first=False, "
        "auto_cp=True, cp_cache=None, cp_context=None, *, cu_seqlens_cpu=None"
    ),
    "flash_qla.ops.gated_delta_rule.chunk.cp:build_cp_context": (
        "cu_seqlens=None, *, enable_inter=False, enable_intra=False, group=None, num_v_heads=None, chunk_size=None, "
        "conv1d_kernel_size=None, cu_seqlens_cpu=None, g=None, is_train=False, force_intra_cp=False"
    ),
    "flash_qla.utils:l2norm": "x, eps=1e-6",
    "flash_qla.utils:l2norm_fwd": "x, eps=1e-6, dim=-1",
    "flash_qla.utils:l2norm_bwd": "y, rstd, dy, eps=1e-6, dim=-1",
    "flash_qla.ops.utils:chunk_local_cumsum": "g, chunk_size=64, reverse=False, cu_seqlens=None",
    "flash_qla.ops.gated_delta_rule.chunk:kkt_solve": "k, b, chunk_size=64, cu_seqlens=None, g=None",
    "flash_qla.ops.gated_delta_rule.chunk:fused_gdr_fwd": (
        "q, k, v, a, g, b, scale=None, initial_state=None, output_final_state=True, output_h=False, output_o=True, "
        "cu_seqlens=None, state_v_first=False"
    ),
    "flash_qla.ops.gated_delta_rule.chunk:fused_gdr_h": (
        "k, v, a, g, b, initial_state=None, output_final_state=True, output_h=True, cu_seqlens=None, "
        "num_warmup_chunks=None, state_v_first=False"
    ),
    "flash_qla:warmup": (
        "num_k_heads, num_v_heads, head_dim_k=128, head_dim_v=128, dtype=torch.bfloat16, gate_dtype=torch.float32, "
        "state_dtype=torch.float32, backward=True, device=None"
    ),
    "flash_qla:compile_count": "",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    """Guards the import lines of existing callers."""
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path):
    """Guards positional callers: the documented order and defaults come first; more may follow by keyword only."""
    module, name = path.split(":")
    wanted = inspect.signature(eval(f"lambda {SIGNATURES[path]}: None", {"torch": torch})).parameters
    actual = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    positional = [p for p in wanted.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = [p for p in actual.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in positional]
    for parameter in wanted.values():
        assert actual[parameter.name].default == parameter.default
        assert actual[parameter.name].kind == parameter.kind
    extra = [p for p in actual.values() if p.name not in wanted]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in extra)


def test_one_function_under_every_name():
    from flash_qla.ops import chunk_gated_delta_rule as in_ops
    from flash_qla.ops.gated_delta_rule import chunk_gated_delta_rule_bwd as bwd
    from flash_qla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd as fwd

    assert in_ops is flash_qla.chunk_gated_delta_rule
    assert bwd is flash_qla.chunk_gated_delta_rule_bwd
    assert fwd is flash_qla.chunk_gated_delta_rule_fwd


# --- results: shapes, dtypes, layouts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes_of_results_and_gradients(dtype):
    inputs = small(dtype, gate_dtype=torch.bfloat16, beta_dtype=torch.float16, state_dtype=torch.bfloat16)
    results = run_public(inputs)
    assert results["o"].dtype == dtype and results["o"].shape == inputs.v.shape
    assert results["ht"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name in INPUT_NAMES:
        source, grad = getattr(inputs, name), results[gradient_name(name)]
        assert grad.dtype == source.dtype and grad.shape == source.shape, name


@pytest.mark.parametrize("gate", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beta", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gate_and_beta_dtypes(gate, beta):
    """Guards the conversion: what counts is the value that was handed in, not a rounding of ours."""
    inputs = small(torch.float32, gate_dtype=gate, beta_dtype=beta)
    wide = replace(inputs, g=inputs.g.float(), beta=inputs.beta.float())
    actual, expected = run_public(inputs), run_public(wide)
    for name in ("o", "ht", "dq", "dk", "dv", "dh0"):
        assert torch.equal(actual[name], expected[name]), name
    assert torch.equal(actual["dg"], expected["dg"].to(gate))
    assert torch.equal(actual["dbeta"], expected["dbeta"].to(beta))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_dtypes(dtype):
    """Guards the state's rounding: in once, out once, float32 between."""
    inputs = small(torch.bfloat16, state_dtype=dtype)
    wide = replace(inputs, initial_state=inputs.initial_state.float())
    expected = run_public(wide)
    actual = run_public(inputs)
    assert actual["ht"].dtype == torch.float32 and actual["dh0"].dtype == dtype
    assert torch.equal(actual["ht"], expected["ht"]) and torch.equal(actual["o"], expected["o"])
    assert torch.equal(actual["dh0"], expected["dh0"].to(dtype))
    _, narrow = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True, state_dtype=dtype)
    assert narrow.dtype == dtype and torch.equal(narrow, expected["ht"].to(dtype))


@pytest.mark.parametrize("lengths", [LENGTHS, (2, 100)], ids=["packed", "dense"])
@pytest.mark.parametrize("option", ["state_v_first", "transpose_state_layout"])
def test_v_first_is_bit_equal_to_k_first(option, lengths):
    inputs = small(torch.bfloat16, lengths)
    extra = {"transpose_state_layout": True} if option == "transpose_state_layout" else {}
    assert_same_bits(run_public(inputs, v_first=True, **extra), run_public(inputs))


def test_v_first_state_is_really_transposed():
    inputs = small()
    _, k_first = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True)
    kwargs = inputs.kwargs | {"initial_state": inputs.initial_state.mT}
    _, v_first = flash_qla.chunk_gated_delta_rule(**kwargs, output_final_state=True, state_v_first=True)
    assert v_first.shape == (4, 4, 12, 16) and v_first.is_contiguous()
    assert torch.equal(v_first.mT, k_first)


def test_final_state_only_when_asked_for():
    inputs = small()
    o, state = flash_qla.chunk_gated_delta_rule(**inputs.kwargs)
    assert state is None
    other, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True)
    assert torch.equal(o, other)


def test_scale():
    inputs = small()
    assert_same_bits(run_public(replace(inputs, scale=None)), run_public(replace(inputs, scale=16**-0.5)))
    zero = run_public(replace(inputs, scale=0.0))
    assert zero["o"].abs().max() == 0 and zero["dq"].abs().max() == 0
    assert torch.equal(zero["ht"], run_public(inputs)["ht"])
    double = run_public(replace(inputs, scale=2 * inputs.scale))
    torch.testing.assert_close(double["o"], 2 * run_public(inputs)["o"], rtol=1e-5, atol=1e-6)
    integer = run_public(replace(inputs, scale=1))
    assert_same_bits(integer, run_public(replace(inputs, scale=1.0)))


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_out(strided):
    inputs = small(torch.bfloat16, tail_tokens=3)
    expected, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs)
    out = strided_copy(inputs.v) if strided else torch.full_like(inputs.v, 7.0)
    o, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, out=out)
    assert o.data_ptr() == out.data_ptr() and o.stride() == out.stride()
    assert torch.equal(out, expected)
    with torch.no_grad():  # inputs that require gradients are fine where nobody tracks them
        flash_qla.chunk_gated_delta_rule(**inputs.differentiable().kwargs, out=out)
    assert torch.equal(out, expected)


# --- sequences


@pytest.mark.parametrize("form", ["int64", "strided", "host_copy", "host_copy_int64", "context", "indices"])
def test_forms_of_cu_seqlens(form):
    inputs = small(torch.bfloat16, tail_tokens=4)
    cu, options = inputs.cu_seqlens, {}
    expected = run_public(inputs)
    if form == "int64":
        inputs = replace(inputs, cu_seqlens=cu.long())
    elif form == "strided":
        inputs = replace(inputs, cu_seqlens=torch.stack([cu, -cu], 1)[:, 0])
    elif form == "host_copy":
        options = {"cu_seqlens_cpu": cu.clone()}
    elif form == "host_copy_int64":
        options = {"cu_seqlens_cpu": cu.long()}
    elif form == "context":
        inputs = replace(inputs, cu_seqlens=None)
        options = {"cp_context": build_cp_context(cu)}
    else:
        options = {"chunk_indices": torch.zeros(5, 2, dtype=torch.long), "chunk_offsets": torch.zeros(5)}
    assert_same_bits(run_public(inputs, **options), expected)


def test_packed_equals_one_by_one():
    """Guards the boundaries: no sequence sees another, whatever its start is modulo the chunk."""
    inputs = small(torch.float32, [1, 64, 63, 129, 0, 7])
    packed = run_public(inputs)
    start = 0
    for n, length in enumerate(inputs.lengths):
        rows = slice(start, start + length)
        start += length
        names = ("q", "k", "v", "g", "beta", "do")
        one = replace(inputs, **{name: getattr(inputs, name)[:, rows] for name in names})
        one = replace(one, cu_seqlens=None, initial_state=inputs.initial_state[n : n + 1], dht=inputs.dht[n : n + 1])
        alone = run_public(one)
        for name, x in alone.items():
            mine = packed[name][n : n + 1] if name in ("ht", "dh0") else packed[name][:, rows]
            torch.testing.assert_close(mine, x, rtol=1e-5, atol=1e-6, msg=f"{name} of sequence {n}")


def test_dense_equals_packed():
    dense = small(torch.float32, (3, 100))
    flat = {n: getattr(dense, n).flatten(0, 1)[None] for n in ("q", "k", "v", "g", "beta", "do")}
    packed = replace(dense, **flat, cu_seqlens=torch.tensor([0, 100, 200, 300]))
    actual, expected = run_public(packed), run_public(dense)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name].view_as(x), x, rtol=1e-5, atol=1e-6)


def test_rows_after_the_last_sequence_are_zero():
    """Guards rows of no sequence: zero in o and in every gradient, though they hold NaN; nothing else notices them."""
    inputs = small(torch.bfloat16, [70, 5], tail_tokens=100)
    expected = run_public(small(torch.bfloat16, [70, 5], tail_tokens=100))
    for name in ("q", "k", "v", "g", "beta", "do"):
        getattr(inputs, name)[:, 75:] = float("nan")
    actual = run_public(inputs)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert actual[name][:, 75:].abs().max() == 0, name
        assert torch.equal(actual[name][:, :75], expected[name][:, :75]), name
    assert torch.equal(actual["ht"], expected["ht"]) and torch.equal(actual["dh0"], expected["dh0"])


def test_empty_sequences_pass_their_state_through():
    inputs = small(torch.float32, [0, 5, 0, 0, 70, 0])
    results = run_public(inputs)
    empty = [0, 2, 3, 5]
    assert torch.equal(results["ht"][empty], inputs.initial_state[empty])
    assert torch.equal(results["dh0"][empty], inputs.dht[empty])
    without = run_public(replace(inputs, initial_state=None))
    assert without["ht"][empty].abs().max() == 0


@pytest.mark.parametrize(
    ("lengths", "tail"),
    [([0, 0], 0), ([0, 0], 9), ([], 9), ([], 0), ((2, 0), 0), ((0, 5), 0), ((0, 0), 0)],
    ids=["all_empty", "all_empty_with_tail", "no_sequence", "nothing", "dense_T0", "dense_B0", "dense_B0_T0"],
)
def test_nothing_to_do(lengths, tail):
    inputs = small(torch.bfloat16, lengths, tail_tokens=tail)
    results = run_public(inputs, use_qk_l2norm_in_kernel=True)
    assert results["o"].shape == inputs.v.shape and not results["o"].any()
    assert torch.equal(results["ht"], inputs.initial_state)
    assert torch.equal(results["dh0"], inputs.dht)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not results[name].any(), name


OUT_OF_RANGE = {"ends_late": [0, 60, 200], "starts_late": [9, 60, 100], "falls": [0, 60, 30], "negative": [0, -5, 100]}


@pytest.mark.parametrize("cu", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_wrong_offsets_stay_inside_the_tensors(cu):
    """Guards the hot path, which does not read the values: finite results of the right shape, no access outside."""
    inputs = replace(small(torch.float32, [60, 40]), cu_seqlens=torch.tensor(cu))
    results = run_public(inputs)
    assert all(torch.isfinite(x).all() for x in results.values())
    if cu[0] > 0:
        assert results["o"][:, : cu[0]].abs().max() == 0


# --- autograd


@pytest.mark.parametrize("wanted", [*INPUT_NAMES, "none_but_state_pair"])
def test_only_some_inputs_require_gradients(wanted):
    """Guards skipped work: what is asked for does not depend on what else is."""
    inputs = small(torch.float32)
    expected = run_public(inputs)
    names = ("initial_state", "g") if wanted == "none_but_state_pair" else (wanted,)
    tensors = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
    o, ht = flash_qla.chunk_gated_delta_rule(**{**inputs.kwargs, **tensors}, output_final_state=True)
    torch.autograd.backward([o, ht], [inputs.do, inputs.dht])
    for name, x in tensors.items():
        assert torch.equal(x.grad, expected[gradient_name(name)]), name


def test_gradients_stage_is_left_out_for_the_state_alone(monkeypatch):
    inputs = small(torch.float32)
    monkeypatch.setattr(stages, "gradients", lambda *args, **kwargs: pytest.fail("nobody needs these gradients"))
    state = inputs.initial_state.clone().requires_grad_()
    o, _ = flash_qla.chunk_gated_delta_rule(**{**inputs.kwargs, "initial_state": state})
    o.backward(inputs.do)
    assert state.grad is not None


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_one_output_is_not_differentiated(used):
    """Guards a None cotangent: it must act as zeros, and cost no wrong dtype or shape."""
    inputs = small(torch.float32)
    leaves = inputs.differentiable()
    o, ht = flash_qla.chunk_gated_delta_rule(**leaves.kwargs, output_final_state=True)
    (o if used == "o" else ht).backward(inputs.do if used == "o" else inputs.dht)
    zeroed = replace(inputs, do=inputs.do * 0) if used == "final_state" else without_dht(inputs)
    expected = truth(zeroed)
    actual = {gradient_name(name): getattr(leaves, name).grad for name in INPUT_NAMES}
    if used == "final_state":
        actual["dq"] = torch.zeros_like(inputs.q) if actual["dq"] is None else actual["dq"]
    assert_close_per_head(actual, expected, torch.float32)


def test_final_state_that_nobody_asked_for_changes_no_gradient():
    inputs = small(torch.bfloat16)
    assert_same_bits({**run_public(inputs, use_dht=False), "ht": None}, run_public(inputs, output_final_state=False))


def test_cotangents_of_any_layout():
    """Guards expanded and transposed cotangents, as sum() and permute() send them."""
    inputs = small(torch.float32)
    leaves = inputs.differentiable()
    o, ht = flash_qla.chunk_gated_delta_rule(**leaves.kwargs, output_final_state=True)
    (o.sum() + ht.mT.contiguous().sum()).backward()
    ones = replace(inputs, do=torch.ones_like(inputs.do), dht=torch.ones_like(inputs.dht))
    expected = run_public(ones)
    for name in INPUT_NAMES:
        assert torch.equal(getattr(leaves, name).grad, expected[gradient_name(name)]), name


@pytest.mark.parametrize("pair", [("q", "k"), ("g", "beta"), ("k", "v")], ids="-".join)
def test_one_tensor_as_two_inputs(pair):
    """Guards double use: the gradients add up, and no input is changed under the other's feet."""
    inputs = small(torch.float32, heads=(2, 2), dims=(16, 16))
    first, second = pair
    inputs = replace(inputs, **{second: getattr(inputs, first)})
    expected = truth(inputs)
    shared = getattr(inputs, first).clone().requires_grad_()
    kwargs = {**inputs.kwargs, first: shared, second: shared}
    o, ht = flash_qla.chunk_gated_delta_rule(**kwargs, output_final_state=True)
    (grad,) = torch.autograd.grad([o, ht], [shared], [inputs.do, inputs.dht])
    name = gradient_name(first)
    both = {name: expected[gradient_name(first)] + expected[gradient_name(second)]}
    assert_close_per_head({name: grad}, both, torch.float32)


def test_inputs_are_not_modified():
    inputs = small(torch.bfloat16, tail_tokens=3).differentiable()
    tensors = [*(getattr(inputs, name) for name in INPUT_NAMES), inputs.cu_seqlens, inputs.do, inputs.dht]
    before = [digest(x) for x in tensors]
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    gate = torch.zeros(4, requires_grad=True)
    o, ht = flash_qla.chunk_gated_delta_rule(
        **inputs.kwargs, output_final_state=True, A_log=gate, dt_bias=gate, **options
    )
    torch.autograd.backward([o, ht], [inputs.do, inputs.dht])
    assert [digest(x) for x in tensors] == before


def test_results_do_not_share_memory_with_inputs():
    inputs = small(torch.float32, [0, 0])
    results = run_public(inputs, gradients=False)
    assert results["ht"].data_ptr() != inputs.initial_state.data_ptr()


@pytest.mark.parametrize("flags", [{}, {"use_qk_l2norm_in_kernel": True}], ids=["plain", "l2norm"])
def test_gradcheck(flags):
    inputs = make_inputs([3, 0, 66], 1, 2, 3, 2, "mild", torch.float64).differentiable()
    tensors = [getattr(inputs, name) for name in INPUT_NAMES]

    def call(q, k, v, g, beta, h0):
        return flash_qla.chunk_gated_delta_rule(
            q, k, v, g, beta, 0.7, h0, output_final_state=True, cu_seqlens=inputs.cu_seqlens, **flags
        )

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


def test_gradcheck_with_activations():
    inputs = make_inputs((2, 5), 1, 2, 3, 2, "none", torch.float64).differentiable()
    tensors = [getattr(inputs, name) for name in INPUT_NAMES]
    gate = [torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def call(q, k, v, g, beta, h0, A_log, dt_bias):
        return flash_qla.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=h0, output_final_state=True, use_gate_in_kernel=True, A_log=A_log,
            dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, use_qk_l2norm_in_kernel=True,
            state_v_first=False,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, [*tensors, *gate])


@pytest.mark.parametrize("penalised", INPUT_NAMES)
def test_second_derivative_is_refused(penalised):
    """Guards gradient penalties: a silently missing term is worse than an error."""
    inputs = small(torch.float32, [9]).differentiable()
    o, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True)
    (grad,) = torch.autograd.grad(o.sum(), [getattr(inputs, penalised)], create_graph=True)
    with pytest.raises(RuntimeError, match="chunk_gated_delta_rule has no second derivative"):
        (grad.float() ** 2).sum().backward()


def test_backward_twice():
    inputs = small(torch.float32).differentiable()
    o, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs)
    o.backward(inputs.do, retain_graph=True)
    first = inputs.q.grad.clone()
    inputs.q.grad = None
    o.backward(inputs.do)
    assert torch.equal(inputs.q.grad, first)


def test_saved_for_backward():
    """Guards the memory between the passes: the inputs, g_cumsum and T; nothing else that grows with T."""
    inputs = small(torch.bfloat16, [256], dims=(32, 32)).differentiable()
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        flash_qla.chunk_gated_delta_rule(**inputs.kwargs)
    theirs = {getattr(inputs, name).data_ptr() for name in INPUT_NAMES} | {inputs.cu_seqlens.data_ptr()}
    own = [tuple(x.shape) for x in saved if x.data_ptr() not in theirs]
    assert sorted(own) == [(1, 256, 4), (1, 256, 4, 64)]


def test_offsets_overwritten_before_the_backward():
    """Guards a reused buffer: autograd refuses instead of walking other sequences."""
    inputs = small(torch.float32).differentiable()
    o, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs)
    inputs.cu_seqlens.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.backward(inputs.do)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_activation_checkpointing(reentrant):
    inputs = small(torch.bfloat16)
    leaves = inputs.differentiable()
    runs = []

    def layer(q, k, v, g, beta, h0):
        runs.append(1)
        return flash_qla.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=h0, output_final_state=True, cu_seqlens=inputs.cu_seqlens,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    tensors = [getattr(leaves, name) for name in INPUT_NAMES]
    o, ht = checkpoint(layer, *tensors, use_reentrant=reentrant)
    torch.autograd.backward([o, ht], [inputs.do, inputs.dht])
    assert len(runs) == 2
    expected = run_public(inputs, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o, expected["o"]) and torch.equal(ht, expected["ht"])
    for name in INPUT_NAMES:
        assert torch.equal(getattr(leaves, name).grad, expected[gradient_name(name)]), name


def test_no_grad_and_inference_mode():
    inputs = small(torch.bfloat16)
    expected = run_public(inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o, ht = flash_qla.chunk_gated_delta_rule(**inputs.differentiable().kwargs, output_final_state=True)
        assert not o.requires_grad and torch.equal(o, expected["o"]) and torch.equal(ht, expected["ht"])


def test_only_inference_mode_gives_up_the_inverse(monkeypatch):
    """A reentrant checkpoint's first forward runs under no_grad: it must round as the recomputation does."""
    kept, inner = [], interface.forward

    def forward(*args, keep_inverse=True, **kwargs):
        kept.append(keep_inverse)
        return inner(*args, keep_inverse=keep_inverse, **kwargs)

    monkeypatch.setattr(interface, "forward", forward)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            flash_qla.chunk_gated_delta_rule(**small().kwargs)
    assert kept == [True, True, False]


def test_integer_state_is_no_obstacle_to_grad_mode():
    """Without any input that requires gradients nothing is tracked, in grad mode too."""
    o, ht = flash_qla.chunk_gated_delta_rule(**small().kwargs, output_final_state=True)
    assert o.grad_fn is None and ht.grad_fn is None


@pytest.mark.parametrize("flags", [{}, {"use_qk_l2norm_in_kernel": True}], ids=["plain", "l2norm"])
def test_autocast(flags):
    """Guards mixed precision: q, k, v in the autocast dtype, gates and states as they are, gradients in the leaves'."""
    inputs = small(torch.float32)
    narrow = replace(inputs, **{name: getattr(inputs, name).bfloat16() for name in ("q", "k", "v")})
    expected = run_public(narrow, **flags)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run_public(inputs, **flags)
    assert actual["o"].dtype == torch.bfloat16 and actual["ht"].dtype == torch.float32
    assert actual["dq"].dtype == torch.float32
    assert_same_bits({n: x.to(expected[n].dtype) for n, x in actual.items()}, expected)


def test_autocast_leaves_float64_alone():
    inputs = small(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(run_public(inputs), run_public(inputs))
        assert run_public(inputs)["o"].dtype == torch.float64


def test_autocast_with_mixed_inputs():
    """A model's q and k may be float32 (a norm's output) while v is bfloat16 (a linear layer's)."""
    inputs = small(torch.float32)
    mixed = replace(inputs, v=inputs.v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits({**run_public(mixed), "dv": None}, {**run_public(inputs), "dv": None})


def test_threads():
    """Guards shared state (caches, warnings): several threads at once give what one gives."""
    problems = [small(torch.float32, [70 + n, n, 9], seed=n) for n in range(4)]
    expected = [run_public(inputs) for inputs in problems]
    barrier = threading.Barrier(4)

    def work(n):
        barrier.wait()
        return [run_public(problems[n]) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for n, runs in enumerate(pool.map(work, range(4))):
            for results in runs:
                assert_same_bits(results, expected[n])


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4), (1, 8)]),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    profile=st.sampled_from(list(GATE_PROFILES)),
    with_state=st.booleans(),
    v_first=st.booleans(),
    tail=st.integers(0, 70),
    seed=st.integers(0, 1000),
)
def test_any_call_equals_the_recurrence(lengths, heads, dims, profile, with_state, v_first, tail, seed):
    inputs = make_inputs(
        lengths, *heads, *dims, profile, torch.float64, with_state=with_state, seed=seed, tail_tokens=tail
    )
    actual, expected = run_public(inputs, v_first=v_first), truth(inputs)
    for name in ("o", "ht", *GRADIENTS):
        if expected[name] is not None:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)


# --- low level


def test_low_level_halves_equal_the_public_function():
    inputs = small(torch.bfloat16, tail_tokens=3)
    expected = run_public(inputs)
    names = ("q", "k", "v", "g", "beta")
    tensors = [getattr(inputs, name) for name in names]
    g_cumsum, A, o, h, ht, cache = flash_qla.chunk_gated_delta_rule_fwd(
        *tensors, inputs.scale, inputs.initial_state, inputs.cu_seqlens
    )
    assert h is None and torch.equal(o, expected["o"]) and torch.equal(ht, expected["ht"])
    assert g_cumsum.dtype == torch.float32 and g_cumsum.shape == inputs.g.shape
    assert A.dtype == torch.bfloat16 and A.shape == (*inputs.g.shape, 64)
    results = []
    for cp_cache in (cache, None):
        grads = flash_qla.chunk_gated_delta_rule_bwd(
            *tensors[:3], g_cumsum, inputs.beta, A, inputs.do, inputs.dht, inputs.scale, inputs.initial_state,
            inputs.cu_seqlens, cp_cache=cp_cache,
        )  # fmt: skip
        results.append(dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), grads, strict=True)))
    for grads in results:
        assert_same_bits(grads, {name: expected[name] for name in grads})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_low_level_without_states(dtype):
    """The same bits, but for float32: g_cumsum is handed over in float32, and kept in float64 inside."""
    inputs = replace(small(dtype), initial_state=None)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    fwd = flash_qla.chunk_gated_delta_rule_fwd(*tensors, cu_seqlens=inputs.cu_seqlens, output_final_state=False)
    assert fwd[3] is None and fwd[4] is None
    grads = flash_qla.chunk_gated_delta_rule_bwd(
        *tensors[:3], fwd[0], inputs.beta, fwd[1], inputs.do, cu_seqlens=inputs.cu_seqlens
    )
    assert grads[5] is None
    expected = run_public(replace(inputs, scale=None), use_dht=False)
    assert fwd[0].dtype == grads[3].dtype == grads[4].dtype == torch.float32
    actual = dict(zip(("dq", "dk", "dv", "dbeta", "dg"), grads))
    if dtype == torch.float32:
        assert_close_per_head(actual, truth(without_dht(inputs)), dtype)
    else:
        assert_same_bits(actual, {name: expected[name] for name in actual})


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
def test_h_is_the_state_entering_each_chunk(v_first):
    inputs = small(torch.float32, [130, 0, 64, 1])
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    h0 = inputs.initial_state.mT.contiguous() if v_first else inputs.initial_state
    *_, h, _, _ = flash_qla.chunk_gated_delta_rule_fwd(
        *tensors, initial_state=h0, cu_seqlens=inputs.cu_seqlens, output_h=True, state_v_first=v_first,
        cu_seqlens_cpu=inputs.cu_seqlens.cpu(),
    )  # fmt: skip
    assert h.shape == (1, 3 + 0 + 1 + 1, 4, *((12, 16) if v_first else (16, 12)))
    chunks = [(0, 0), (0, 64), (0, 128), (2, 0), (3, 0)]
    starts = inputs.cu_seqlens.tolist()
    for i, (n, length) in enumerate(chunks):
        piece = [x[:, starts[n] : starts[n] + length] for x in tensors]
        _, state = flash_qla.chunk_gated_delta_rule(
            *piece, initial_state=h0[n : n + 1], output_final_state=True, state_v_first=v_first
        )
        torch.testing.assert_close(h[0, i], state[0], rtol=1e-5, atol=1e-6)


def test_h_of_a_dense_input():
    inputs = small(torch.bfloat16, (2, 100))
    *_, h, _, _ = flash_qla.chunk_gated_delta_rule_fwd(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, initial_state=inputs.initial_state, output_h=True
    )
    assert h.shape == (2, 2, 4, 16, 12) and h.dtype == torch.bfloat16
    assert torch.equal(h[:, 0], inputs.initial_state.bfloat16())


def test_single_stages_equal_the_forward():
    from flash_qla.ops.gated_delta_rule.chunk import fused_gdr_fwd, fused_gdr_h, kkt_solve
    from flash_qla.ops.utils import chunk_local_cumsum

    inputs = small(torch.bfloat16)
    cu = inputs.cu_seqlens
    g_cumsum, A, o, h, ht, _ = flash_qla.chunk_gated_delta_rule_fwd(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, None, inputs.initial_state, cu, output_h=True
    )
    assert torch.equal(chunk_local_cumsum(inputs.g, cu_seqlens=cu), g_cumsum)
    assert torch.equal(kkt_solve(inputs.k, inputs.beta, cu_seqlens=cu, g=g_cumsum), A)
    ungated = kkt_solve(inputs.k, inputs.beta, cu_seqlens=cu)
    assert torch.equal(ungated, kkt_solve(inputs.k, inputs.beta, cu_seqlens=cu, g=torch.zeros_like(g_cumsum)))
    arguments = (inputs.k, inputs.v, A, g_cumsum, inputs.beta)
    fused = fused_gdr_fwd(inputs.q, *arguments, None, inputs.initial_state, True, True, cu_seqlens=cu)
    assert all(torch.equal(x, y) for x, y in zip(fused, (o, h, ht), strict=True))
    assert fused_gdr_fwd(inputs.q, *arguments, cu_seqlens=cu, output_final_state=False, output_o=False)[0::2] == (
        None,
        None,
    )
    walked = fused_gdr_h(*arguments, inputs.initial_state, cu_seqlens=cu)
    assert torch.equal(walked[0], h) and torch.equal(walked[1], ht) and walked[2] is None


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_steps_of_a_gate_cumsum(packed):
    """Guards what kkt_solve hands to the solve kernel: chunks start with their sequence, empty ones included."""
    from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
    from flash_qla.ops.gated_delta_rule.chunk.stages import _gate_steps
    from flash_qla.ops.utils import chunk_local_cumsum

    cu = torch.tensor([0, 70, 70, 71, 200]) if packed else None
    g = -torch.rand(1 if packed else 2, 200, 3)
    seqs = Sequences.build(g.shape[0], 200, 64, cu)
    assert torch.allclose(_gate_steps(chunk_local_cumsum(g, cu_seqlens=cu), seqs), g, atol=1e-5)


def test_context_object():
    cu = torch.tensor([0, 5])
    context = build_cp_context(cu, enable_intra=True, conv1d_kernel_size=4, cu_seqlens_cpu=cu, num_v_heads=4)
    assert isinstance(context, FlashQLACPContext)
    fields = "group cu_seqlens cu_seqlens_cpu is_first_rank is_last_rank pre_num_ranks post_num_ranks"
    for name in [*fields.split(), "conv1d_kernel_size", "pre_num_conv_tokens", "is_inter", "is_intra"]:
        assert hasattr(context, name), name
    assert context.cu_seqlens is cu and context.is_intra and not context.is_inter
    assert context.is_first_rank and context.is_last_rank and context.conv1d_kernel_size == 4


def test_warmup_and_compile_count_on_the_cpu():
    before = flash_qla.compile_count()
    assert isinstance(before, int)
    assert flash_qla.warmup(16, 32, device="cpu") == 0
    assert flash_qla.compile_count() == before


# --- supports


def test_supports_says_why():
    inputs = small(torch.bfloat16)
    q, k, v, g, beta = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta
    for arguments, options, word in (
        ((q, k, v), {}, "cpu"),
        ((q, k, v, g, beta), {"initial_state": inputs.initial_state, "cu_seqlens": inputs.cu_seqlens}, "cpu"),
        ((q, k, v, g), {}, "cpu"),
        ((q, k, v.half()), {}, "float16"),
        ((q, k[:, 1:], v), {}, "k must have shape"),
        ((q, k, v[:, :, :3]), {}, "multiple"),
        ((q, k, v, g[0], beta), {}, "g must have"),
        ((q, k, v), {"initial_state": inputs.initial_state}, "N = 1"),
        ((q, k, v), {"state_dtype": torch.float64}, "state_dtype"),
        ((None, None, None), {}, "q must be a torch.Tensor"),
        ((q, k, "v"), {}, "v must be a torch.Tensor"),
        ((q, k, torch.nested.as_nested_tensor([v, v], layout=torch.jagged)), {}, "v must be a torch.Tensor"),
        ((q, k, v.to_sparse()), {}, "v must be a torch.Tensor"),
        ((q.to("meta"), k.to("meta"), v.to("meta")), {}, "meta"),
    ):
        answer = flash_qla.supports(*arguments, **options)
        assert isinstance(answer, tuple) and answer[0] is False
        assert word in answer[1], (word, answer[1])


def test_supports_follows_the_chosen_backend(monkeypatch):
    """Guards that a call which would run in PyTorch by choice is not announced as the kernels' (a Hopper is faked)."""
    from flash_qla.ops.gated_delta_rule.chunk import backend

    inputs = small(torch.bfloat16)
    monkeypatch.setattr(backend, "why_no_kernels", lambda problem: None)
    assert flash_qla.supports(inputs.q, inputs.k, inputs.v)[0] is True
    monkeypatch.setenv("FLASH_QLA_BACKEND", "reference")
    supported, reason = flash_qla.supports(inputs.q, inputs.k, inputs.v)
    assert supported is False and "FLASH_QLA_BACKEND" in reason

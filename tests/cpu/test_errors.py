"""Every error of the public functions: its type, the words that matter, and that nothing ran before it was raised.

`CASES` is the table; `check_table` goes through it without pytest and without `assert`, so that one process can do so
under `python -O`. More than 600 lines: the table's.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flash_qla
from flash_qla import arch
from flash_qla.ops.gated_delta_rule.chunk import backend, interface, reference, stages
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context
from flash_qla.ops.gated_delta_rule.chunk.problem import Problem
from flash_qla.ops.utils import chunk_local_cumsum
from flash_qla.testing.workloads import make_inputs
from flash_qla.utils import l2norm
from tests.case_inputs import run_python

T, HQ, HV, K, V = 70, 2, 4, 8, 6
LENGTHS = [5, 65]


def tensors() -> dict:
    """Valid arguments of chunk_gated_delta_rule, packed."""
    return make_inputs(LENGTHS, HQ, HV, K, V, "mild", torch.bfloat16).kwargs


def dense(batch=2) -> dict:
    """Valid arguments of chunk_gated_delta_rule, dense."""
    return make_inputs((batch, T), HQ, HV, K, V, "mild", torch.bfloat16).kwargs


def forward_arguments() -> dict:
    return tensors()


def backward_arguments() -> dict:
    kwargs = tensors()
    return kwargs | {
        "g": torch.zeros(1, T, HV),
        "A": torch.zeros(1, T, HV, 64, dtype=torch.bfloat16),
        "do": torch.zeros(1, T, HV, V, dtype=torch.bfloat16),
    }


def zeros(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def to(name, *args, **kwargs):
    """A change: the argument `name` converted by `Tensor.to`."""
    return lambda a: {name: a[name].to(*args, **kwargs)}


def nested(x):
    """The older kind of nested tensor, whose layout is torch.strided."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch advises the other kind
        return torch.nested.nested_tensor(list(x))


def gate_parameter(change):
    """A change: A_log given, in another form."""
    return lambda a: {"use_gate_in_kernel": True, "A_log": change(torch.zeros(HV))}


def made_in_inference_mode():
    with torch.inference_mode():
        return zeros(1, T, HV, V)


def sized(head_dim_k, head_dim_v):
    """A change: other head sizes, everything else consistent."""
    return lambda a: {
        **{name: zeros(1, T, HQ, head_dim_k) for name in "qk"},
        "v": zeros(1, T, HV, head_dim_v),
        "initial_state": zeros(2, HV, head_dim_k, head_dim_v),
        "scale": 1.0,
    }


@dataclass(frozen=True)
class Case:
    """One bad call.

    Attributes:
        id: what is wrong.
        change: the arguments to replace: a dict, or a function of the valid arguments that returns one.
        error: the exception's type.
        words: what the message must contain: the argument, the value, what is supported.
        function: a key of FUNCTIONS.
    """

    id: str
    change: object
    error: type
    words: tuple[str, ...]
    function: str = "public"


FUNCTIONS = {
    "public": (flash_qla.chunk_gated_delta_rule, tensors),
    "dense": (flash_qla.chunk_gated_delta_rule, dense),
    "fwd": (flash_qla.chunk_gated_delta_rule_fwd, forward_arguments),
    "bwd": (flash_qla.chunk_gated_delta_rule_bwd, backward_arguments),
    "kkt": (stages.kkt_solve, lambda: {"k": tensors()["k"], "b": tensors()["beta"]}),
    "fused": (
        stages.fused_gdr_fwd,
        lambda: {
            **{name: tensors()[name] for name in ("q", "k", "v", "cu_seqlens")},
            "a": zeros(1, T, HV, 64),
            "g": zeros(1, T, HV, dtype=torch.float32),
            "b": zeros(1, T, HV),
        },
    ),
    "walk": (
        stages.fused_gdr_h,
        lambda: {
            **{name: tensors()[name] for name in ("k", "v", "cu_seqlens")},
            "a": zeros(1, T, HV, 64),
            "g": zeros(1, T, HV, dtype=torch.float32),
            "b": zeros(1, T, HV),
        },
    ),
    "context": (build_cp_context, lambda: {"cu_seqlens": torch.tensor([0, 5])}),
    "l2norm": (l2norm, lambda: {"x": zeros(3, 4)}),
    "cumsum": (chunk_local_cumsum, lambda: {"g": zeros(1, T, HV)}),
    "warmup": (flash_qla.warmup, lambda: {"num_k_heads": 2, "num_v_heads": 4, "device": "cpu"}),
}
META = {"device": "meta"}
SEVERAL_CARDS = SimpleNamespace(size=lambda: 2)
VALUE, UNBUILT = ValueError, NotImplementedError

SHAPES = [
    Case("q_no_tensor", {"q": [1.0]}, VALUE, ("q", "list", "torch.Tensor")),
    Case("k_none", {"k": None}, VALUE, ("k", "None")),
    Case("v_none", {"v": None}, VALUE, ("v", "None")),
    Case("g_none", {"g": None}, VALUE, ("g", "None", "[B, T, Hv]")),
    Case("beta_none", {"beta": None}, VALUE, ("beta", "None", "[B, T, Hv]")),
    Case("q_3d", lambda a: {"q": a["q"][0]}, VALUE, ("q", "4 dimensions", f"({T}, {HQ}, {K})")),
    Case("k_5d", lambda a: {"k": a["k"][None]}, VALUE, ("k", "4 dimensions", "[B, T, Hq, K]")),
    Case("v_3d", lambda a: {"v": a["v"][0]}, VALUE, ("v", "4 dimensions", "[B, T, Hv, V]")),
    Case("k_tokens", lambda a: {"k": a["k"][:, 1:]}, VALUE, ("k", f"(1, {T}, {HQ}, {K})", f"(1, {T - 1}, {HQ}, {K})")),
    Case("k_heads", lambda a: {"k": zeros(1, T, HV, K)}, VALUE, ("k", f"(1, {T}, {HQ}, {K})", str(HV))),
    Case("k_head_dim", lambda a: {"k": zeros(1, T, HQ, K + 1)}, VALUE, ("k", f"(1, {T}, {HQ}, {K + 1})")),
    Case("v_tokens", lambda a: {"v": a["v"][:, 1:]}, VALUE, ("v", f"(1, {T - 1}, {HV}, {V})")),
    Case("v_batch", lambda a: {"v": a["v"].expand(2, -1, -1, -1)}, VALUE, ("v", f"(2, {T}, {HV}, {V})")),
    Case("g_2d", lambda a: {"g": a["g"][0]}, VALUE, ("g", "3 dimensions", f"({T}, {HV})")),
    Case("g_heads", lambda a: {"g": a["g"][..., :HQ]}, VALUE, ("g", "[B, T, Hv]", f"(1, {T}, {HQ})")),
    Case("g_per_channel", lambda a: {"g": zeros(1, T, HV, K)}, VALUE, ("g", "3 dimensions", "[B, T, Hv]")),
    Case("beta_2d", lambda a: {"beta": a["beta"][0]}, VALUE, ("beta", "3 dimensions", f"({T}, {HV})")),
    Case("beta_tokens", lambda a: {"beta": a["beta"][:, 1:]}, VALUE, ("beta", f"(1, {T - 1}, {HV})")),
    Case("heads_no_multiple", lambda a: {"v": zeros(1, T, 3, V)}, VALUE, ("v has 3 heads", "q has 2", "multiple")),
    Case("fewer_v_heads", lambda a: {"v": zeros(1, T, 1, V)}, VALUE, ("v has 1 heads", "q has 2", "multiple")),
    Case("no_v_heads", lambda a: {"v": zeros(1, T, 0, V)}, VALUE, ("v has 0 heads", "positive")),
    Case(
        "no_heads",
        lambda a: {"q": zeros(1, T, 0, K), "k": zeros(1, T, 0, K), "v": zeros(1, T, 0, V)},
        VALUE,
        ("0 heads", "positive"),
    ),
    Case("head_dim_k_0", sized(0, V), VALUE, ("q and k", "K = 0", "1 to 256")),
    Case("head_dim_v_0", sized(K, 0), VALUE, ("v", "V = 0", "1 to 256")),
    Case("head_dim_k_257", sized(257, V), VALUE, ("q and k", "K = 257", "1 to 256")),
    Case("head_dim_v_512", sized(K, 512), VALUE, ("v", "V = 512", "1 to 256")),
    Case(
        "too_many_tokens",
        lambda a: {
            **{name: zeros(2, 2**30, 1, 1, **META) for name in "qkv"},
            **{name: zeros(2, 2**30, 1, **META) for name in ("g", "beta")},
        },
        VALUE,
        ("q", str(2**31), "2^31"),
        "dense",
    ),
]

DTYPES = [
    Case("q_int", to("q", torch.int32), VALUE, ("q", "int32", "bfloat16, float16, float32, float64")),
    Case("q_complex", to("q", torch.complex64), VALUE, ("q", "complex64", "bfloat16")),
    Case("mixed_v", to("v", torch.float16), VALUE, ("v", "float16", "q has bfloat16", "one dtype")),
    Case("mixed_k", to("k", torch.float32), VALUE, ("k", "float32", "q has bfloat16", "one dtype")),
    Case("g_float64", to("g", torch.float64), VALUE, ("g", "float64", "float32, bfloat16, float16", "float64 q")),
    Case("g_int", to("g", torch.int64), VALUE, ("g", "int64", "float32, bfloat16, float16")),
    Case("beta_float64", to("beta", torch.float64), VALUE, ("beta", "float64", "float32, bfloat16, float16")),
    Case("beta_bool", to("beta", torch.bool), VALUE, ("beta", "bool", "float32")),
    Case("state_float64", to("initial_state", torch.float64), VALUE, ("initial_state", "float64", "float32")),
    Case("state_int", to("initial_state", torch.int32), VALUE, ("initial_state", "int32", "float32")),
    Case("state_dtype_float64", {"state_dtype": torch.float64}, VALUE, ("state_dtype", "float64", "float32")),
    Case("state_dtype_int", {"state_dtype": torch.int8}, VALUE, ("state_dtype", "int8", "float32")),
    Case("state_dtype_text", {"state_dtype": "bfloat16"}, VALUE, ("state_dtype", "torch.dtype", "'bfloat16'")),
]

DEVICES = [
    Case("k_device", to("k", **META), VALUE, ("k", "meta", "cpu", "one device")),
    Case("v_device", to("v", **META), VALUE, ("v", "meta", "cpu", "one device")),
    Case("g_device", to("g", **META), VALUE, ("g", "meta", "cpu", "one device")),
    Case("beta_device", to("beta", **META), VALUE, ("beta", "meta", "cpu", "one device")),
    Case("state_device", to("initial_state", **META), VALUE, ("initial_state", "meta", "cpu", "one device")),
    Case("cu_device", to("cu_seqlens", **META), VALUE, ("cu_seqlens", "meta", "cpu")),
    Case("cu_cpu_device", lambda a: {"cu_seqlens_cpu": a["cu_seqlens"].to("meta")}, VALUE, ("cu_seqlens_cpu", "meta")),
    Case("out_device", lambda a: {"out": a["v"].to("meta")}, VALUE, ("out", "meta", "cpu")),
    Case(
        "A_log_device",
        {"use_gate_in_kernel": True, "A_log": zeros(HV, **META)},
        VALUE,
        ("A_log", "meta", "cpu"),
    ),
]

SEQUENCES = [
    Case(
        "cu_with_batch",
        {"cu_seqlens": torch.tensor([0, 5, T]), "initial_state": None},
        VALUE,
        ("cu_seqlens", "B = 1", "B = 2"),
        "dense",
    ),
    Case("cu_list", {"cu_seqlens": [0, 5, T]}, VALUE, ("cu_seqlens", "torch.Tensor", "list")),
    Case("cu_2d", lambda a: {"cu_seqlens": a["cu_seqlens"][None]}, VALUE, ("cu_seqlens", "1 dimensions", "[N + 1]")),
    Case("cu_empty", lambda a: {"cu_seqlens": a["cu_seqlens"][:0]}, VALUE, ("cu_seqlens", "N + 1", "(0,)")),
    Case("cu_int16", to("cu_seqlens", torch.int16), VALUE, ("cu_seqlens", "int16", "int32, int64")),
    Case("cu_float", to("cu_seqlens", torch.float32), VALUE, ("cu_seqlens", "float32", "int32, int64")),
    Case("cu_cpu_alone", {"cu_seqlens": None, "cu_seqlens_cpu": torch.tensor([0, T])}, VALUE, ("cu_seqlens_cpu",)),
    Case("cu_cpu_size", {"cu_seqlens_cpu": torch.tensor([0, T])}, VALUE, ("cu_seqlens_cpu", "2 offsets", "3")),
    Case("cu_cpu_float", {"cu_seqlens_cpu": torch.zeros(3)}, VALUE, ("cu_seqlens_cpu", "float32", "int32, int64")),
    Case("cu_cpu_list", {"cu_seqlens_cpu": [0, 5, T]}, VALUE, ("cu_seqlens_cpu", "list")),
    Case(
        "states_of_packed",
        lambda a: {"initial_state": a["initial_state"][:1]},
        VALUE,
        ("initial_state", "1 states", "N = 2"),
    ),
    Case(
        "states_of_dense",
        lambda a: {"initial_state": a["initial_state"][:1]},
        VALUE,
        ("initial_state", "1 states", "N = 2"),
        "dense",
    ),
    Case("state_3d", lambda a: {"initial_state": a["initial_state"][0]}, VALUE, ("initial_state", "4 dimensions")),
    Case("state_list", {"initial_state": [0.0]}, VALUE, ("initial_state", "list")),
    Case(
        "state_heads",
        lambda a: {"initial_state": a["initial_state"][:, :HQ]},
        VALUE,
        ("initial_state", f"(2, {HV}, {K}, {V})", f"(2, {HQ}, {K}, {V})"),
    ),
    Case("state_k_first", {"state_v_first": True}, VALUE, ("initial_state", "[N, Hv, V, K]", f"(2, {HV}, {V}, {K})")),
    Case(
        "state_old_layout_name",
        {"transpose_state_layout": True},
        VALUE,
        ("initial_state", "[N, Hv, V, K]", f"(2, {HV}, {V}, {K})"),
    ),
    Case(
        "state_v_first",
        lambda a: {"initial_state": a["initial_state"].mT},
        VALUE,
        ("initial_state", "[N, Hv, K, V]", f"(2, {HV}, {V}, {K})"),
    ),
]

OPTIONS = [
    Case("head_first", {"head_first": True}, VALUE, ("head_first", "True", "[B, T, H, D]")),
    Case("chunk_size", {"chunk_size": 32}, VALUE, ("chunk_size", "32", "64")),
    Case("chunk_size_0", {"chunk_size": 0}, VALUE, ("chunk_size", "0", "64")),
    Case("chunk_indices", {"chunk_indices": torch.zeros(3, 3)}, VALUE, ("chunk_indices", "[chunks, 2]", "(3, 3)")),
    Case("chunk_indices_1d", {"chunk_indices": torch.zeros(3)}, VALUE, ("chunk_indices", "[chunks, 2]", "(3,)")),
    Case("chunk_indices_list", {"chunk_indices": [[0, 0]]}, VALUE, ("chunk_indices", "list")),
    Case("scale_text", {"scale": "0.1"}, VALUE, ("scale", "'0.1'", "number")),
    Case("scale_tensor", {"scale": torch.tensor(0.1)}, VALUE, ("scale", "tensor", "number")),
    Case("scale_bool", {"scale": True}, VALUE, ("scale", "True", "number")),
    Case("scale_beyond_floats", {"scale": 10**400}, VALUE, ("scale", "float64")),
    Case("chunk_size_tensor", {"chunk_size": torch.tensor([64, 64])}, VALUE, ("chunk_size", "64")),
    Case("gate_without_A_log", {"use_gate_in_kernel": True}, VALUE, ("A_log", "use_gate_in_kernel", "None")),
    Case("A_log_without_gate", {"A_log": torch.zeros(HV)}, VALUE, ("A_log", "use_gate_in_kernel")),
    Case("dt_bias_without_gate", {"dt_bias": torch.zeros(HV)}, VALUE, ("dt_bias", "use_gate_in_kernel")),
    Case(
        "A_log_shape",
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HQ)},
        VALUE,
        ("A_log", "[Hv]", f"({HV},)", f"({HQ},)"),
    ),
    Case("A_log_number", {"use_gate_in_kernel": True, "A_log": 1.0}, VALUE, ("A_log", "torch.Tensor", "float")),
    Case(
        "A_log_int",
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HV, dtype=torch.int32)},
        VALUE,
        ("A_log", "floating", "int32"),
    ),
    Case(
        "dt_bias_shape",
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(1, HV)},
        VALUE,
        ("dt_bias", "[Hv]", f"(1, {HV})"),
    ),
    Case("neg_eigval_alone", {"allow_neg_eigval": True}, VALUE, ("allow_neg_eigval", "use_beta_sigmoid_in_kernel")),
    Case("out_shape", {"out": zeros(1, T, HQ, V)}, VALUE, ("out", f"(1, {T}, {HV}, {V})", f"(1, {T}, {HQ}, {V})")),
    Case("out_3d", {"out": zeros(T, HV, V)}, VALUE, ("out", "4 dimensions")),
    Case("out_dtype", {"out": zeros(1, T, HV, V, dtype=torch.float32)}, VALUE, ("out", "float32", "bfloat16")),
    Case("out_list", {"out": []}, VALUE, ("out", "list")),
    Case(
        "out_with_gradients",
        lambda a: {"out": zeros(1, T, HV, V), "q": a["q"].requires_grad_()},
        VALUE,
        ("out", "gradients", "no_grad"),
    ),
    Case("out_that_requires_gradients", {"out": zeros(1, T, HV, V).requires_grad_()}, VALUE, ("out", "detach")),
    Case("out_of_a_graph", {"out": zeros(1, T, HV, V).requires_grad_() * 1}, VALUE, ("out", "detach")),
    Case(
        "out_with_gate_gradients",
        {
            "out": zeros(1, T, HV, V),
            "use_gate_in_kernel": True,
            "A_log": torch.zeros(HV, requires_grad=True),
        },
        VALUE,
        ("out", "gradients"),
    ),
    Case(
        "cp_host_offsets_alone",
        {
            "cu_seqlens": None,
            "initial_state": None,
            "cp_context": FlashQLACPContext(cu_seqlens_cpu=torch.tensor([0, T])),
        },
        VALUE,
        ("cu_seqlens_cpu", "without cu_seqlens"),
    ),
    *(
        Case(f"cp_{name}", {"cp_context": SimpleNamespace(group=None, **{name: "no"})}, VALUE, (f"{name} must", "'no'"))
        for name in ("is_intra", "force_intra")
    ),
    Case("unknown_keyword", {"use_beta_in_kernel": True}, TypeError, ("use_beta_in_kernel", "chunk_gated_delta_rule")),
    Case("misspelt_keyword", {"cu_seqlen": None}, TypeError, ("cu_seqlen",)),
    Case("cp_group", {"cp_context": SimpleNamespace(group=SEVERAL_CARDS)}, UNBUILT, ("cp_context", "2 ranks")),
    *(
        Case(
            f"cp_segments_{length!r}",
            {"cp_context": SimpleNamespace(group=None, segment_chunks=length)},
            VALUE,
            ("segment_chunks", repr(length), "integer >= 1"),
        )
        for length in (0, -3, 1.5, "4", True)
    ),
    *(
        Case(
            f"cp_decays_{x}", {"cp_context": SimpleNamespace(group=None, decays=(x,) * HV)}, VALUE, ("decays", repr(x))
        )
        for x in (float("nan"), float("inf"), -1.0, "1")
    ),
    Case("A_log_sparse", gate_parameter(lambda x: x.to_sparse()), VALUE, ("A_log must", "sparse_coo")),
    Case("A_log_nested", gate_parameter(lambda x: nested(x[None])), VALUE, ("A_log must", "nested")),
    Case("A_log_negated", gate_parameter(torch._neg_view), VALUE, ("A_log must", "negated")),
    Case("out_of_inference_mode", {"out": made_in_inference_mode()}, VALUE, ("out", "inference mode")),
    Case("cp_decays", {"cp_context": SimpleNamespace(group=None, decays=3.2)}, VALUE, ("cp_context.decays", "3.2")),
    Case(
        "all_on_meta",
        lambda a: {n: x.to("meta") for n, x in a.items() if isinstance(x, torch.Tensor)},
        VALUE,
        ("q is on meta", "CPU", "GPU"),
    ),
    Case("nested", lambda a: {"q": nested(a["q"])}, VALUE, ("q must", "nested")),
    Case("negated", lambda a: {"g": torch._neg_view(a["g"])}, VALUE, ("g must", "negated", "resolve_neg")),
]

LOW_LEVEL = [
    Case("fwd_k", lambda a: {"k": a["k"][:, 1:]}, VALUE, ("k", "[B, T, Hq, K]"), "fwd"),
    Case("fwd_mixed", to("v", torch.float16), VALUE, ("v", "float16"), "fwd"),
    Case("fwd_states", lambda a: {"initial_state": a["initial_state"][:1]}, VALUE, ("initial_state", "N = 2"), "fwd"),
    Case("fwd_cu_cpu", {"cu_seqlens_cpu": torch.tensor([0])}, VALUE, ("cu_seqlens_cpu",), "fwd"),
    Case("fwd_unknown", {"nonsense": 1}, TypeError, ("nonsense",), "fwd"),
    Case("fwd_cp_group", {"cp_context": SimpleNamespace(group=SEVERAL_CARDS)}, UNBUILT, ("2 ranks",), "fwd"),
    Case("bwd_q", to("q", torch.float16), VALUE, ("float16", "bfloat16"), "bwd"),
    Case("bwd_A_none", {"A": None}, VALUE, ("A", "None", "[B, T, Hv, C]"), "bwd"),
    Case("bwd_A_chunk", {"A": zeros(1, T, HV, 32)}, VALUE, ("A", "C = 32", "64"), "bwd"),
    Case("bwd_A_shape", {"A": zeros(1, T, HQ, 64)}, VALUE, ("A", f"(1, {T}, {HV}, 64)"), "bwd"),
    Case("bwd_A_dtype", {"A": zeros(1, T, HV, 64, dtype=torch.float32)}, VALUE, ("A", "float32", "bfloat16"), "bwd"),
    Case(
        "bwd_on_meta",
        lambda a: {n: x.to("meta") for n, x in a.items() if isinstance(x, torch.Tensor)},
        VALUE,
        ("q is on meta",),
        "bwd",
    ),
    Case("bwd_A_device", to("A", **META), VALUE, ("A", "meta"), "bwd"),
    Case("bwd_g_dtype", {"g": zeros(1, T, HV)}, VALUE, ("g", "g_cumsum", "bfloat16", "float32"), "bwd"),
    Case("bwd_do_none", {"do": None}, VALUE, ("do", "None"), "bwd"),
    Case("bwd_do_shape", {"do": zeros(1, T, HQ, V)}, VALUE, ("do", f"(1, {T}, {HV}, {V})"), "bwd"),
    Case("bwd_do_dtype", {"do": zeros(1, T, HV, V, dtype=torch.float32)}, VALUE, ("do", "float32", "bfloat16"), "bwd"),
    Case("bwd_dht_shape", {"dht": torch.zeros(2, HV, V, K)}, VALUE, ("dht", f"(2, {HV}, {K}, {V})"), "bwd"),
    Case("bwd_dht_dtype", {"dht": zeros(2, HV, K, V, dtype=torch.int32)}, VALUE, ("dht", "int32"), "bwd"),
    Case("bwd_dht_device", {"dht": zeros(2, HV, K, V, **META)}, VALUE, ("dht", "meta"), "bwd"),
    Case("kkt_beta", {"b": zeros(1, T, 3)}, VALUE, ("3 heads", "multiple"), "kkt"),
    Case("kkt_chunk", {"chunk_size": 128}, VALUE, ("chunk_size", "128", "64"), "kkt"),
    Case("kkt_gate", {"g": torch.zeros(1, T, HQ)}, VALUE, ("g", f"(1, {T}, {HV})"), "kkt"),
    Case("kkt_k", lambda a: {"k": a["k"].int()}, VALUE, ("k has dtype int32", "bfloat16"), "kkt"),
    Case("kkt_k_none", {"k": None}, VALUE, ("k must", "None"), "kkt"),
    Case("kkt_k_sparse", lambda a: {"k": a["k"].to_sparse()}, VALUE, ("k must", "sparse_coo"), "kkt"),
    Case("kkt_b_tokens", lambda a: {"b": a["b"][:, 1:]}, VALUE, ("b must", f"(1, {T - 1}, {HV})"), "kkt"),
    Case("kkt_b_device", to("b", **META), VALUE, ("b is on meta", "k is on cpu"), "kkt"),
    Case("kkt_b_dtype", to("b", torch.int64), VALUE, ("b has dtype int64", "float32"), "kkt"),
    Case("kkt_chunk_tensor", {"chunk_size": torch.tensor([64, 64])}, VALUE, ("chunk_size", "64"), "kkt"),
    Case("fused_a", {"a": zeros(1, T, HV, 32)}, VALUE, ("a has", "C = 32", "64"), "fused"),
    Case("fused_gate", {"g": zeros(1, T, HV)}, VALUE, ("g", "bfloat16", "float32"), "fused"),
    Case("fused_state", {"initial_state": torch.zeros(1, HV, K, V)}, VALUE, ("initial_state", "N = 2"), "fused"),
    Case("fused_q_none", {"q": None, "output_o": False}, VALUE, ("q must", "None", "[B, T, Hq, K]"), "fused"),
    Case("fused_b", {"b": zeros(1, T, HQ)}, VALUE, ("b must", f"(1, {T}, {HV})"), "fused"),
    Case("walk_k_sparse", lambda a: {"k": a["k"].to_sparse()}, VALUE, ("k must", "sparse_coo"), "walk"),
    Case("walk_v_dtype", to("v", torch.float16), VALUE, ("v has dtype float16 but k has bfloat16", "k and v"), "walk"),
    Case("walk_warmup", {"num_warmup_chunks": 2}, UNBUILT, ("num_warmup_chunks", "2"), "walk"),
    Case("walk_a", {"a": zeros(1, T, HQ, 64)}, VALUE, ("a must", f"(1, {T}, {HV}, 64)"), "walk"),
    Case("context_offsets_list", {"cu_seqlens": [0, 5]}, VALUE, ("cu_seqlens", "torch.Tensor", "list"), "context"),
    Case(
        "context_offsets_float", to("cu_seqlens", torch.float32), VALUE, ("cu_seqlens", "float32", "int64"), "context"
    ),
    Case(
        "context_offsets_with_g",
        {"cu_seqlens": [0, 5], "g": torch.zeros(1, 5, 2)},
        VALUE,
        ("cu_seqlens", "torch.Tensor", "list"),
        "context",
    ),
    Case("context_host_size", {"cu_seqlens_cpu": torch.tensor([0])}, VALUE, ("cu_seqlens_cpu", "1 offsets"), "context"),
    Case(
        "context_host_alone",
        {"cu_seqlens": None, "cu_seqlens_cpu": torch.tensor([0, 5])},
        VALUE,
        ("cu_seqlens_cpu", "without cu_seqlens"),
        "context",
    ),
    Case("context_g_meta", {"g": torch.ones(1, 5, 2, **META)}, VALUE, ("g must", "meta", "CPU"), "context"),
    Case("context_g_sparse", {"g": torch.ones(1, 5, 2).to_sparse()}, VALUE, ("g must", "sparse_coo"), "context"),
    Case("context_g_heads", {"g": torch.ones(1, 5, 2), "num_v_heads": 3}, VALUE, ("g must", "Hv = 3"), "context"),
    Case("context_inter", {"enable_inter": True}, UNBUILT, ("enable_inter", "cards"), "context"),
    Case("context_group", {"group": SEVERAL_CARDS}, UNBUILT, ("group", "2 ranks"), "context"),
    Case("context_chunk_tensor", {"chunk_size": torch.tensor([64, 64])}, VALUE, ("chunk_size", "64"), "context"),
    Case("context_g_int", {"g": torch.ones(1, 5, 2, dtype=torch.int32)}, VALUE, ("g must", "int32"), "context"),
    Case("context_g_nan", {"g": torch.full((1, 5, 2), torch.nan)}, VALUE, ("g holds NaN",), "context"),
    Case("context_g_batch", {"g": zeros(2, 5, 2)}, VALUE, ("cu_seqlens", "B = 1", "B = 2"), "context"),
    Case("context_chunk", {"chunk_size": 16}, VALUE, ("chunk_size", "16", "64"), "context"),
    Case("cumsum_shape", {"g": zeros(T, HV)}, VALUE, ("g", "[B, T, H]", f"({T}, {HV})"), "cumsum"),
    Case("cumsum_chunk", {"chunk_size": 0}, VALUE, ("chunk_size", "0"), "cumsum"),
    Case("cumsum_chunk_bool", {"chunk_size": True}, VALUE, ("chunk_size", "True"), "cumsum"),
    Case("cumsum_int", to("g", torch.int32), VALUE, ("g must", "floating-point", "int32"), "cumsum"),
    Case("cumsum_complex", to("g", torch.complex64), VALUE, ("g must", "floating-point", "complex64"), "cumsum"),
    Case("cumsum_sparse", lambda a: {"g": a["g"].to_sparse()}, VALUE, ("g must", "sparse_coo"), "cumsum"),
    Case("cumsum_meta", to("g", **META), VALUE, ("g must", "meta", "CPU"), "cumsum"),
    Case("l2norm_int", to("x", torch.int32), VALUE, ("x must", "floating-point", "int32"), "l2norm"),
    Case("l2norm_complex", to("x", torch.complex64), VALUE, ("x must", "floating-point", "complex64"), "l2norm"),
    Case("l2norm_float8", to("x", torch.float8_e4m3fn), VALUE, ("x must", "float8_e4m3fn", "bfloat16"), "l2norm"),
    Case("l2norm_sparse", lambda a: {"x": a["x"].to_sparse()}, VALUE, ("x must", "sparse_coo"), "l2norm"),
    Case("l2norm_nested", lambda a: {"x": nested(a["x"])}, VALUE, ("x must", "dense"), "l2norm"),
    Case("l2norm_list", {"x": [1.0]}, VALUE, ("x must", "torch.Tensor", "list"), "l2norm"),
    Case(
        "cumsum_batch",
        {"g": zeros(2, T, HV), "cu_seqlens": torch.tensor([0, 5])},
        VALUE,
        ("cu_seqlens", "B = 1", "B = 2"),
        "cumsum",
    ),
    Case("warmup_heads", {"num_v_heads": 3}, VALUE, ("3 heads", "2", "multiple"), "warmup"),
    Case("warmup_head_dim", {"head_dim_k": 300}, VALUE, ("K = 300", "256"), "warmup"),
    Case("warmup_dtype", {"dtype": torch.int8}, VALUE, ("int8", "bfloat16"), "warmup"),
    Case("warmup_gate_dtype", {"gate_dtype": torch.float64}, VALUE, ("g", "float64"), "warmup"),
    *(
        Case(f"warmup_device_{device}", {"device": device}, VALUE, (f"device={device!r}", "None", "GPU"), "warmup")
        for device in ("foo", "cuda:63", 63, -1, 2.5, "meta")
    ),
    Case("warmup_no_number", {"num_k_heads": True}, VALUE, ("num_k_heads", "True"), "warmup"),
    Case("warmup_state_dtype", {"state_dtype": torch.float64}, VALUE, ("state_dtype", "float64"), "warmup"),
]
FLAGS = {
    "public": (
        "output_final_state", "use_qk_l2norm_in_kernel", "head_first", "state_v_first", "auto_cp",
        "enable_fwd_cp_cache", "force_intra_cp", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval", "transpose_state_layout",
    ),
    "fwd": ("output_final_state", "output_h", "auto_cp", "state_v_first", "enable_fwd_cp_cache"),
    "bwd": ("state_v_first", "auto_cp"),
    "fused": ("output_final_state", "output_h", "output_o", "state_v_first"),
    "walk": ("output_final_state", "output_h", "state_v_first"),
    "context": ("enable_inter", "enable_intra", "is_train", "force_intra_cp"),
    "cumsum": ("reverse",),
    "warmup": ("backward",),
}  # fmt: skip
# Text is true whatever it says, a tensor's truth costs a device read or fails, another number is another argument's.
NO_FLAGS = {"text": ("False", "'False'"), "tensor": (torch.ones(2), "a tensor"), "number": (2, "2")}
FLAG_CASES = [
    Case(f"{function}_{name}_{kind}", {name: value}, VALUE, (f"{name} must be True or False", got), function)
    for function, names in FLAGS.items()
    for name in names
    for kind, (value, got) in NO_FLAGS.items()
]
CASES = SHAPES + DTYPES + DEVICES + SEQUENCES + OPTIONS + LOW_LEVEL + FLAG_CASES


def failure(case: Case) -> str | None:
    """Makes the bad call. Returns what is wrong with its error, None when nothing is."""
    function, make_arguments = FUNCTIONS[case.function]
    arguments = make_arguments()
    arguments |= case.change(arguments) if callable(case.change) else case.change
    try:
        function(**arguments)
    except Exception as error:  # noqa: BLE001 - the type is what is examined
        if type(error) is not case.error:
            return f"{case.id}: {type(error).__name__}({error}) instead of {case.error.__name__}"
        missing = [word for word in case.words if word not in str(error)]
        return f"{case.id}: {missing} not in {str(error)!r}" if missing else None
    return f"{case.id}: no error"


def check_table() -> int:
    """Goes through CASES; for `python -O`, where `assert` is gone. Returns how many were checked."""
    failures = [text for text in map(failure, CASES) if text]
    if failures:
        raise RuntimeError("\n".join(failures))
    return len(CASES)


@pytest.fixture
def nothing_may_run(monkeypatch):
    """Whatever computes or compiles raises: an error must come before all of it."""

    def run(*args, **kwargs):
        raise AssertionError("something ran before the error was raised")

    for name in (
        "normalize",
        "solve",
        "invert",
        "cumsum",
        "fused_forward",
        "forward_states",
        "reverse_states",
        "gradients",
    ):
        monkeypatch.setattr(reference, name, run)
    for name in ("_activate_gate", "_activate_beta", "forward", "backward"):
        monkeypatch.setattr(interface, name, run)
    monkeypatch.setattr("flash_qla.ops.gated_delta_rule.chunk.kernels.build.compile_now", run)


def test_ids_are_unique():
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_unchanged_arguments_are_valid(name):
    """Guards the table itself: an error must come from the change, not from the arguments around it."""
    function, make_arguments = FUNCTIONS[name]
    function(**make_arguments())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_error(case, nothing_may_run):
    text = failure(case)
    assert text is None, text


@pytest.mark.parametrize(
    "activations", [{"use_qk_l2norm_in_kernel": True}, {"use_beta_sigmoid_in_kernel": True}], ids=str
)
def test_nothing_is_computed_before_the_error(activations, nothing_may_run):
    """Guards the order inside the public function: the steps around the operator come after the checks."""
    with pytest.raises(ValueError, match="initial_state"):
        flash_qla.chunk_gated_delta_rule(**{**tensors(), "initial_state": torch.zeros(1, HV, K, V)}, **activations)
    with pytest.raises(AssertionError, match="something ran"):
        flash_qla.chunk_gated_delta_rule(**tensors(), **activations)


def test_errors_hold_under_python_O():
    """Guards against checks written as assert statements."""
    code = "import tests.cpu.test_errors as t; print(__debug__, t.check_table())"
    assert run_python(code, "-O").split() == ["False", str(len(CASES))]


def test_float64_only_together():
    """Guards the one exception of the dtype table: float64 q, k, v take float64 gates and states, and narrower ones."""
    inputs = make_inputs(LENGTHS, HQ, HV, K, V, "mild", torch.float64).kwargs
    o, ht = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert o.dtype == ht.dtype == torch.float64
    narrow = {**inputs, "g": inputs["g"].float(), "beta": inputs["beta"].bfloat16()}
    assert flash_qla.chunk_gated_delta_rule(**narrow)[0].dtype == torch.float64


def test_every_flag_is_in_the_table():
    """A new boolean argument is checked like the others."""
    for function, names in FLAGS.items():
        parameters = inspect.signature(FUNCTIONS[function][0]).parameters.values()
        flags = {p.name for p in parameters if isinstance(p.default, bool)}
        assert flags <= set(names) <= {p.name for p in parameters}, function


@pytest.mark.parametrize("off", [None, 0, np.False_], ids=["none", "zero", "numpy"])
def test_what_else_counts_as_a_flag(off):
    """`use_cache` may be None in a model, and configurations hold numpy's bools."""
    o, state = flash_qla.chunk_gated_delta_rule(**tensors(), output_final_state=off, use_qk_l2norm_in_kernel=np.True_)
    expected, _ = flash_qla.chunk_gated_delta_rule(**tensors(), use_qk_l2norm_in_kernel=True)
    assert state is None and torch.equal(o, expected)


def test_chunk_offsets_and_chunk_indices_are_accepted():
    expected, _ = flash_qla.chunk_gated_delta_rule(**tensors())
    extra = {"chunk_offsets": torch.tensor([0, 1, 3]), "chunk_indices": torch.zeros(3, 2, dtype=torch.int32)}
    actual, _ = flash_qla.chunk_gated_delta_rule(**tensors(), **extra, chunk_size=64)
    assert torch.equal(actual, expected)


def test_autocast_does_not_replace_the_checks():
    """Guards the cast to the autocast dtype, which comes first: what is no tensor still gets a named error."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="k must be a torch.Tensor"):
        flash_qla.chunk_gated_delta_rule(**{**tensors(), "k": None})


DEBUG_VALUES = {
    "cu_starts_late": ({"cu_seqlens": torch.tensor([1, 5, T])}, ("cu_seqlens", "start at 0", "1")),
    "cu_falls": ({"cu_seqlens": torch.tensor([0, 60, 5])}, ("cu_seqlens", "[60, 5]", "fall")),
    "cu_ends_late": ({"cu_seqlens": torch.tensor([0, 5, T + 1])}, ("cu_seqlens", str(T + 1), f"T = {T}")),
    "cu_negative": ({"cu_seqlens": torch.tensor([0, -5, T])}, ("cu_seqlens", "-5")),
    "cu_cpu_differs": ({"cu_seqlens_cpu": torch.tensor([0, 6, T])}, ("cu_seqlens_cpu", "differ")),
    "cu_cpu_falls": ({"cu_seqlens_cpu": torch.tensor([0, 6, 5])}, ("cu_seqlens_cpu",)),
}


@pytest.mark.parametrize(("change", "words"), DEBUG_VALUES.values(), ids=DEBUG_VALUES)
@pytest.mark.parametrize("function", ["public", "fwd"])
def test_debug_checks_sequences(function, change, words, monkeypatch):
    call = FUNCTIONS[function][0]
    call(**{**tensors(), **change})  # nobody reads the values otherwise: no error, and no access out of bounds
    monkeypatch.setenv("FLASH_QLA_DEBUG", "1")
    with pytest.raises(ValueError) as error:
        call(**{**tensors(), **change})
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_debug_finds_nan(name, monkeypatch):
    arguments = {**tensors(), "use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    monkeypatch.setenv("FLASH_QLA_DEBUG", "1")
    flash_qla.chunk_gated_delta_rule(**arguments)
    arguments[name].view(-1)[3] = float("nan")
    with pytest.raises(ValueError, match=rf"{name} holds NaN \(1 of"):
        flash_qla.chunk_gated_delta_rule(**arguments)


@pytest.mark.parametrize("offsets", [[0, 5, T - 3], [0]], ids=["tail", "no_sequence"])
def test_debug_looks_at_no_row_of_no_sequence(offsets, monkeypatch):
    """They are often torch.empty, and nothing reads them."""
    monkeypatch.setenv("FLASH_QLA_DEBUG", "1")
    states = {"initial_state": torch.zeros(len(offsets) - 1, HV, K, V), "cu_seqlens": torch.tensor(offsets)}
    for arguments in (tensors(), backward_arguments()):
        for name in {"q", "k", "v", "g", "beta", "A", "do"} & arguments.keys():
            arguments[name][:, offsets[-1] :] = float("nan")
        call = flash_qla.chunk_gated_delta_rule_bwd if "do" in arguments else flash_qla.chunk_gated_delta_rule
        call(**arguments | states)
        if offsets[-1]:
            arguments["beta"][0, offsets[-1] - 1, 0] = float("nan")
            with pytest.raises(ValueError, match=r"beta holds NaN \(1 of"):
                call(**arguments | states)


@pytest.mark.parametrize("name", ["q", "g", "A", "do", "dht"])
def test_debug_finds_nan_in_the_low_level_backward(name, monkeypatch):
    arguments = backward_arguments() | {"dht": torch.zeros(2, HV, K, V)}
    arguments[name].view(-1)[3] = float("nan")
    monkeypatch.setenv("FLASH_QLA_DEBUG", "1")
    with pytest.raises(ValueError, match=rf"{name} holds NaN"):
        flash_qla.chunk_gated_delta_rule_bwd(**arguments)


@pytest.mark.parametrize("value", ["", "0"], ids=["empty", "zero"])
def test_debug_is_off(value, monkeypatch):
    monkeypatch.setenv("FLASH_QLA_DEBUG", value)
    arguments = tensors()
    arguments["v"].view(-1)[0] = float("nan")
    flash_qla.chunk_gated_delta_rule(**arguments)


def test_backend_kernels_refuses_the_cpu(monkeypatch, nothing_may_run):
    monkeypatch.setenv("FLASH_QLA_BACKEND", "kernels")
    for function in ("public", "fwd", "warmup"):
        with pytest.raises(NotImplementedError) as error:
            # The forward is not patched here: it asks for its stages before it runs any.
            interface_free(FUNCTIONS[function][0], FUNCTIONS[function][1]())
        assert all(word in str(error.value) for word in ("FLASH_QLA_BACKEND=kernels", "cpu", "GPU"))


def interface_free(function, arguments):
    """Calls with the drivers in place, so that only the stages are watched."""
    from flash_qla.ops.gated_delta_rule.chunk.backward import backward
    from flash_qla.ops.gated_delta_rule.chunk.forward import forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "forward", forward)
        patch.setattr(interface, "backward", backward)
        return function(**arguments)


@pytest.mark.parametrize("function", ["public", "fwd", "bwd", "fused", "warmup"])
def test_backend_unknown(function, monkeypatch):
    monkeypatch.setenv("FLASH_QLA_BACKEND", "triton")
    call, arguments = FUNCTIONS[function]
    with pytest.raises(ValueError, match="FLASH_QLA_BACKEND='triton'.*auto, reference, kernels"):
        call(**arguments())


@pytest.mark.parametrize("value", ["auto", "reference"])
def test_backend_on_the_cpu(value, monkeypatch):
    monkeypatch.setenv("FLASH_QLA_BACKEND", value)
    o, _ = flash_qla.chunk_gated_delta_rule(**tensors())
    assert torch.isfinite(o).all()


GPU_REFUSALS = {
    "volta": ((7, 0), {}, "below 8.0"),
    "turing": ((7, 5), {}, "below 8.0"),
    "ampere": ((8, 0), {}, "8.0"),
    "ada": ((8, 9), {}, "8.9"),
    "blackwell": ((10, 0), {}, "10.0"),
    "blackwell_ultra": ((10, 3), {}, "10.3"),
    "thor": ((11, 0), {}, "11.0"),
    "spark": ((12, 1), {}, "12.1"),
    "unknown": ((13, 7), {}, "13.7"),
    "float32": ((9, 0), {"dtype": torch.float32}, "float32"),
    "float64": ((9, 0), {"dtype": torch.float64}, "float64"),
    "head_dim_k": ((9, 0), {"head_dim_k": 129}, "K = 129"),
    "head_dim_v": ((9, 0), {"head_dim_v": 256}, "V = 256"),
}


@pytest.mark.parametrize(("capability", "change", "word"), GPU_REFUSALS.values(), ids=GPU_REFUSALS)
def test_what_the_kernels_do_not_cover(capability, change, word, monkeypatch):
    """auto: PyTorch with one warning that says why; kernels: NotImplementedError; before anything is compiled."""
    problem, _ = Problem.check(**tensors())
    problem = replace(problem, device=torch.device("cuda", 0), **change)
    monkeypatch.setattr(arch, "of_device", lambda device: arch.from_capability(*capability))
    backend._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=word) as caught:
        assert backend.stages_for(problem) is reference
        assert backend.stages_for(problem) is reference
    assert len(caught) == 1
    monkeypatch.setenv("FLASH_QLA_BACKEND", "kernels")
    with pytest.raises(NotImplementedError, match=word):
        backend.stages_for(problem)
    backend._warn_once.cache_clear()


def test_hopper_is_covered(monkeypatch):
    problem, _ = Problem.check(**tensors())
    monkeypatch.setattr(arch, "of_device", lambda device: arch.SM90)
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in (1, 64, 96, 128):
            cuda = replace(problem, device=torch.device("cuda", 0), dtype=dtype, head_dim_k=head_dim)
            assert backend.why_no_kernels(cuda) is None


def test_a_kernel_is_not_built_for_another_arch():
    """Guards the build itself: an architecture without a schedule is refused with its reason."""
    from flash_qla.ops.gated_delta_rule.chunk.kernels import build

    for capability in ((8, 0), (10, 0), (12, 1), (7, 5)):
        other = arch.from_capability(*capability)
        with pytest.raises(NotImplementedError, match=other.name):
            build.target(other)
    assert build.target(arch.SM90)["arch"] == "sm_90a"

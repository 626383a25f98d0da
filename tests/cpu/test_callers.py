"""The callers' exact call forms: FLA, transformers, Megatron-Core, verl, LightLLM, SGLang, vLLM."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import flash_qla
from flash_qla.testing.compare import assert_close_per_head
from flash_qla.testing.workloads import FIELD_HEADS, make_inputs
from tests.case_inputs import (
    check,
    logits,
    truth,
)

LENGTHS = [70, 0, 5, 130]


A_LOG = torch.tensor([0.0, 1.0, -2.0, 2.7])
DT_BIAS = torch.tensor([0.5, -1.0, 0.0, 2.0])


def small(dtype=torch.float32, lengths=LENGTHS, profile="mild", heads=(2, 4), dims=(16, 12), **kwargs):
    return make_inputs(lengths, *heads, *dims, profile, dtype, **kwargs)


def assert_call(outputs, inputs, state=None):
    """The outputs of a caller's call, against float64."""
    o, ht = outputs
    expected = truth(inputs, gradients=False)
    actual = {"o": o} if ht is None else {"o": o, "ht": ht}
    assert_close_per_head(actual, expected, inputs.q.dtype)
    assert (ht is None) == (state is None)
    if state is not None:
        assert ht.dtype == state


def test_caller_flash_linear_attention():
    """`fla/ops/gated_delta_rule/backends/flash_qla.py`: everything by keyword, scale None."""
    inputs = small(torch.bfloat16, dims=(32, 32))
    outputs = flash_qla.chunk_gated_delta_rule(
        q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta, scale=None,
        initial_state=inputs.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=False,
        state_v_first=False, cu_seqlens=inputs.cu_seqlens, auto_cp=True,
    )  # fmt: skip
    assert_call(outputs, inputs, torch.float32)


def test_caller_transformers():
    """Qwen3-Next, Qwen3.5: q, k, v positional, g float32, beta bfloat16, dense batch, views of a split projection."""
    inputs = small(torch.bfloat16, (2, 75), dims=(32, 32), beta_dtype=torch.bfloat16, normalize=False, with_state=False)
    packed = torch.cat([inputs.q.flatten(2), inputs.k.flatten(2), inputs.v.flatten(2)], -1)
    query, key, value = torch.split(packed, [64, 64, 128], dim=-1)
    query, key = (x.reshape(2, 75, -1, 32) for x in (query, key))
    value = value.reshape(2, 75, -1, 32)
    o, state = flash_qla.chunk_gated_delta_rule(
        query, key, value, g=inputs.g, beta=inputs.beta, initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    normalised = replace(inputs, q=flash_qla.utils.l2norm(inputs.q), k=flash_qla.utils.l2norm(inputs.k))
    assert_call((o, state), normalised, torch.float32)


@pytest.mark.parametrize("form", ["cu_seqlens", "fla_context", "gate", "repeated_heads"])
def test_caller_megatron(form):
    """Megatron-Core: sometimes with an FLA context, the gate arguments, or q and k already repeated to Hv heads."""
    inputs = small(torch.bfloat16, dims=(32, 32), with_state=False)
    kwargs = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g, "beta": inputs.beta, "initial_state": None,
        "output_final_state": False, "use_qk_l2norm_in_kernel": False, "cu_seqlens": inputs.cu_seqlens,
    }  # fmt: skip
    if form == "fla_context":
        kwargs["cu_seqlens"] = None
        kwargs["cp_context"] = SimpleNamespace(
            group=None, cu_seqlens=inputs.cu_seqlens, cu_seqlens_cpu=inputs.cu_seqlens.clone(), is_first_rank=True,
            is_last_rank=True, pre_num_ranks=0, post_num_ranks=0, conv1d_kernel_size=4, pre_num_conv_tokens=0,
        )  # fmt: skip
    elif form == "gate":
        both = logits(inputs)
        kwargs |= {"g": both.g, "use_gate_in_kernel": True, "A_log": A_LOG, "dt_bias": DT_BIAS}
        inputs = replace(inputs, g=-A_LOG.exp() * F.softplus(both.g + DT_BIAS))
    elif form == "repeated_heads":
        kwargs |= {name: kwargs[name].repeat_interleave(2, dim=2) for name in "qk"}
    assert_call(flash_qla.chunk_gated_delta_rule(**kwargs), inputs)


def test_caller_megatron_group_of_one():
    """A context whose group has one rank is no context parallelism across cards."""
    inputs = small(torch.bfloat16, dims=(32, 32), with_state=False)
    context = SimpleNamespace(group=SimpleNamespace(size=lambda: 1), cu_seqlens=inputs.cu_seqlens)
    outputs = flash_qla.chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, cp_context=context)
    assert_call(outputs, inputs)


def test_caller_verl():
    """verl looks for these names in the signature."""
    names = inspect.signature(flash_qla.chunk_gated_delta_rule).parameters
    assert {"cu_seqlens_cpu", "cp_context"} <= set(names)


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32], ids=str)
def test_caller_lightllm(state):
    """LightLLM: head_first=False, int32 cu_seqlens, a K-first state in bfloat16 or float32."""
    inputs = small(torch.bfloat16, dims=(32, 32), state_dtype=state)
    outputs = flash_qla.chunk_gated_delta_rule(
        q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta, initial_state=inputs.initial_state,
        output_final_state=True, cu_seqlens=inputs.cu_seqlens, head_first=False, use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    assert_call(outputs, inputs, torch.float32)


def test_caller_sglang():
    """SGLang: V-first state, int64 cu_seqlens."""
    inputs = small(torch.bfloat16, dims=(32, 24), index_dtype=torch.int64)
    o, state = flash_qla.chunk_gated_delta_rule(
        q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta,
        initial_state=inputs.initial_state.mT.contiguous(), output_final_state=True, cu_seqlens=inputs.cu_seqlens,
        state_v_first=True,
    )  # fmt: skip
    assert_call((o, state.mT), inputs, torch.float32)


@pytest.mark.parametrize("state", [torch.bfloat16, torch.float32], ids=str)
def test_caller_vllm(state):
    """vLLM: V-first state, int32 cu_seqlens with a host copy, q and k normalised outside, its own output buffer."""
    inputs = small(torch.bfloat16, dims=(32, 24), state_dtype=state)
    out = torch.empty_like(inputs.v)
    o, final = flash_qla.chunk_gated_delta_rule(
        q=inputs.q, k=inputs.k, v=inputs.v, g=inputs.g, beta=inputs.beta,
        initial_state=inputs.initial_state.mT.contiguous(), output_final_state=True, cu_seqlens=inputs.cu_seqlens,
        cu_seqlens_cpu=inputs.cu_seqlens.clone(), state_v_first=True, out=out, state_dtype=state,
    )  # fmt: skip
    assert final.dtype == state and o.data_ptr() == out.data_ptr()
    wide = truth(inputs, gradients=False)
    assert_close_per_head({"o": o, "ht": final.mT.float()}, wide, torch.bfloat16)


@pytest.mark.parametrize("heads", FIELD_HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}")
def test_heads_in_the_field(heads):
    check(small(torch.bfloat16, [66], heads=heads, dims=(8, 8)))

"""The activations around the operator: gate, beta and l2norm in the kernel equal applying them outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import flash_qla
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import (
    INPUT_NAMES,
    assert_close_of_activations,
    assert_same_bits,
    gradient_name,
    logits,
    run_activations,
    run_public,
    truth_of_activations,
)

LENGTHS = [70, 0, 5, 130]


def small(dtype=torch.float32, lengths=LENGTHS, profile="mild", heads=(2, 4), dims=(16, 12), **kwargs):
    return make_inputs(lengths, *heads, *dims, profile, dtype, **kwargs)


A_LOG = torch.tensor([0.0, 1.0, -2.0, 2.7])
DT_BIAS = torch.tensor([0.5, -1.0, 0.0, 2.0])


FLAGS = {
    "gate": (A_LOG, DT_BIAS, False, False, False),
    "gate_no_bias": (A_LOG, None, False, False, False),
    "sigmoid": (None, None, True, False, False),
    "negative": (None, None, True, True, False),
    "l2norm": (None, None, False, False, True),
    "all": (A_LOG, DT_BIAS, True, True, True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_activations_equal_applying_them_outside(flags, dtype):
    """Guards the fused activations and their gradients, dA_log and ddt_bias included."""
    A_log, dt_bias, sigmoid, negative, l2norm = flags
    inputs = small(dtype, normalize=not l2norm)
    both = logits(inputs)
    inputs = replace(inputs, g=both.g if A_log is not None else inputs.g, beta=both.beta if sigmoid else inputs.beta)
    parameters = [x if x is None else x.to(dtype) for x in (A_log, dt_bias)]
    actual = run_activations(inputs, *parameters, sigmoid, negative, l2norm)
    expected = truth_of_activations(inputs, *parameters, sigmoid, negative, l2norm)
    assert actual.keys() == expected.keys()
    assert_close_of_activations(actual, expected, dtype)


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_are_computed_in_float32(gate_dtype):
    """Guards bfloat16 logits: the activation's result is not rounded to the logits' dtype."""
    inputs = logits(small(torch.bfloat16))
    inputs = replace(inputs, g=inputs.g.to(gate_dtype), beta=inputs.beta.to(gate_dtype))
    actual = run_activations(inputs, A_LOG, DT_BIAS, True, False, False)
    gate = -A_LOG.exp() * F.softplus(inputs.g.float() + DT_BIAS)
    expected = run_public(replace(inputs, g=gate, beta=inputs.beta.float().sigmoid()))
    assert torch.equal(actual["o"], expected["o"]) and torch.equal(actual["ht"], expected["ht"])
    assert actual["dg"].dtype == actual["dbeta"].dtype == gate_dtype
    assert actual["dA_log"].dtype == actual["ddt_bias"].dtype == torch.float32


def test_gate_parameters_of_other_dtypes():
    inputs = logits(small(torch.bfloat16))
    parameters = [A_LOG.bfloat16().requires_grad_(), DT_BIAS.half().requires_grad_()]
    o, _ = flash_qla.chunk_gated_delta_rule(
        **inputs.kwargs, use_gate_in_kernel=True, A_log=parameters[0], dt_bias=parameters[1]
    )
    o.sum().backward()
    assert [x.grad.dtype for x in parameters] == [torch.bfloat16, torch.float16]


def test_l2norm_is_the_helper():
    """Guards one rule for the norm: the flag equals flash_qla.utils.l2norm outside, bit for bit, all-zero rows too."""
    inputs = small(torch.bfloat16, normalize=False)
    inputs.q[:, 3] = 0
    inputs.k[:, 5:9] = 0
    actual = run_public(inputs, use_qk_l2norm_in_kernel=True)
    leaves = inputs.differentiable()
    q, k = flash_qla.utils.l2norm(leaves.q), flash_qla.utils.l2norm(leaves.k)
    o, ht = flash_qla.chunk_gated_delta_rule(**{**leaves.kwargs, "q": q, "k": k}, output_final_state=True)
    torch.autograd.backward([o, ht], [inputs.do, inputs.dht])
    expected = {"o": o.detach(), "ht": ht.detach()} | {gradient_name(n): getattr(leaves, n).grad for n in INPUT_NAMES}
    assert_same_bits(actual, {name: expected[name] for name in actual})
    assert all(torch.isfinite(x).all() for x in actual.values())

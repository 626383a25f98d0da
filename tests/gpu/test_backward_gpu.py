"""The backward kernels against float64 autograd of the recurrence, per head."""

from dataclasses import replace

import pytest
import torch

import flash_qla
from flash_qla.testing.compare import assert_close_per_head
from flash_qla.testing.workloads import GATE_PROFILES, make_inputs
from tests import kernel_roundings
from tests.case_inputs import (
    GRADIENTS,
    INPUT_NAMES,
    assert_same_bits,
    check,
    gradient_name,
    run_public,
    strided_copy,
    truth,
    without_dht,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = [1, 63, 64, 65, 0, 130, 7, 0, 200]
RATIOS = {1: (4, 4), 2: (2, 4), 3: (2, 6), 4: (2, 8), 8: (1, 8)}
HEAD_SIZES = [(16, 16), (32, 64), (64, 64), (64, 128), (80, 32), (96, 96), (127, 65), (128, 64), (128, 1), (1, 128)]
# Few columns of k: rounding the products' operands weighs more; where all keys of a chunk are +1 or -1, in everything.
FEW_KEY_COLUMNS = {16: ["o"], 1: [*kernel_roundings.OUTPUTS, *GRADIENTS]}


def make(lengths=RAGGED, heads=(2, 4), dims=(128, 128), profile="strong", dtype=BF16, **kwargs):
    return make_inputs(lengths, *heads, *dims, profile, dtype, device="cuda", **kwargs)


@pytest.mark.parametrize("profile", GATE_PROFILES)
@pytest.mark.parametrize("ratio", RATIOS, ids="ratio{}".format)
def test_gates_and_head_ratios(profile, ratio):
    """Guards dg's cancelling terms and the sums over a key head's value heads; zeros after the last sequence."""
    inputs = make(heads=RATIOS[ratio], profile=profile, tail_tokens=77)
    actual = kernel_roundings.check(inputs, ["dg"] if profile in ("strong", "mixed") else [])
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert actual[name][:, sum(RAGGED) :].abs().max() == 0, name


@pytest.mark.parametrize("rate", [1.0, 4.0, 16.0], ids="A{}".format)
def test_all_heads_decay_alike(rate):
    """Guards dg where every head is saturated."""
    inputs = make((1, 512), (4, 8))
    draw = torch.randn(inputs.g.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    check(replace(inputs, g=-rate * torch.nn.functional.softplus(0.5 * draw + 1)))


@pytest.mark.parametrize("length", [1, 16, 33, 64, 65, 128, 129, 257], ids="T{}".format)
@pytest.mark.parametrize("batch", [1, 3], ids="B{}".format)
def test_dense_lengths(length, batch):
    """Guards the ragged last chunk and the first of the next sequence."""
    inputs = make((batch, length), profile="mild")
    kernel_roundings.check(inputs, ["dg"])
    # dbeta of one token that begins with nothing is one number, X·v.
    alone = without_dht(replace(inputs, initial_state=None))
    kernel_roundings.check(alone, ["dbeta"] if length == 1 else [])


@pytest.mark.parametrize("heads", [(16, 64), (16, 16)], ids=str)
@pytest.mark.parametrize("lengths", [[512] * 8, [2048], [1000, 24, 0, 777]], ids=["batch", "long", "mixed"])
def test_many_heads(heads, lengths):
    """Guards the variants for many CTAs."""
    check(make(lengths, heads, profile="mild"))


@pytest.mark.parametrize("profile", GATE_PROFILES)
def test_float16(profile):
    check(make(profile=profile, dtype=FP16))


@pytest.mark.parametrize("dims", HEAD_SIZES, ids="{0[0]}x{0[1]}".format)
def test_head_sizes(dims):
    """Guards native sizes and zero padding to them."""
    kernel_roundings.check(make(dims=dims, profile="mild"), FEW_KEY_COLUMNS.get(dims[0], []))


@pytest.mark.parametrize("gate", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("state", [FP32, BF16, None], ids=str)
def test_small_dtypes(gate, state):
    """Guards dg, dbeta and dh0 in their inputs' dtypes: one rounding of the float32 result."""
    inputs = make([130, 70], profile="mild", with_state=state is not None, state_dtype=state or FP32)
    inputs = replace(inputs, g=inputs.g.to(gate), beta=inputs.beta.to(gate))
    actual = run_public(inputs)
    assert actual["dg"].dtype == actual["dbeta"].dtype == gate
    wide = replace(inputs, g=inputs.g.float(), beta=inputs.beta.float())
    wide = wide if state is None else replace(wide, initial_state=inputs.initial_state.float())
    expected = run_public(wide)
    assert_close_per_head(expected, truth(wide), BF16)
    for name, x in actual.items():
        assert (x is None and state is None) or torch.equal(x, expected[name].to(x.dtype)), name


@pytest.mark.parametrize("lengths", [RAGGED, (3, 130)], ids=["packed", "dense"])
def test_v_first_is_bit_equal(lengths):
    inputs = make(lengths, (4, 16))
    assert_same_bits(run_public(inputs, v_first=True), run_public(inputs))


@pytest.mark.parametrize("with_state", [False, True], ids=["no_state", "state"])
@pytest.mark.parametrize("use_dht", [False, True], ids=["no_dht", "dht"])
def test_absent_states(with_state, use_dht):
    """Guards every combination of an absent initial state and an absent cotangent; absent equals zero, bit for bit."""
    inputs = make(with_state=with_state)
    inputs = inputs if use_dht else without_dht(inputs)
    if with_state and use_dht:
        actual = kernel_roundings.check(inputs, ["dg"])
    else:
        actual = run_public(inputs, use_dht=use_dht)
        assert_close_per_head(actual, truth(inputs), BF16)
    if not use_dht:
        assert_same_bits(actual, run_public(inputs))


@pytest.mark.parametrize("wanted", INPUT_NAMES)
def test_only_some_gradients(wanted):
    """Guards skipped work: a gradient does not depend on which others are asked for."""
    inputs = make()
    expected = run_public(inputs)
    tensor = getattr(inputs, wanted).clone().requires_grad_()
    o, ht = flash_qla.chunk_gated_delta_rule(**{**inputs.kwargs, wanted: tensor}, output_final_state=True)
    torch.autograd.backward([o, ht], [inputs.do, inputs.dht])
    assert torch.equal(tensor.grad, expected[gradient_name(wanted)])


def test_low_level_backward():
    """Guards the separate halves, with and without what the forward kept."""
    inputs = make(tail_tokens=9)
    expected = run_public(inputs)
    g_cumsum, A, _, _, _, cache = flash_qla.chunk_gated_delta_rule_fwd(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.scale, inputs.initial_state, inputs.cu_seqlens
    )
    for cp_cache in (cache, None):
        grads = flash_qla.chunk_gated_delta_rule_bwd(
            inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.do, inputs.dht, inputs.scale,
            inputs.initial_state, inputs.cu_seqlens, cp_cache=cp_cache,
        )  # fmt: skip
        names = ("dq", "dk", "dv", "dbeta", "dg", "dh0")
        assert_same_bits(dict(zip(names, grads, strict=True)), {name: expected[name] for name in names})


def test_nan_stays_in_its_sequence():
    """Guards both walks and the gradients stage: neighbours of a sequence full of NaN keep their bits."""
    clean = make([70, 30, 70, 0, 5], profile="mild")
    names = (*INPUT_NAMES, "do", "dht")
    dirty = {name: getattr(clean, name).clone() for name in names}
    for name, x in dirty.items():
        (x[1] if name in ("initial_state", "dht") else x[:, 70:100]).fill_(float("nan"))
    actual, expected = run_public(replace(clean, **dirty)), run_public(clean)
    rows = [*range(70), *range(100, 175)]
    for name, x in actual.items():
        keep = (slice(None), rows) if name not in ("ht", "dh0") else ([0, 2, 3, 4],)
        assert torch.equal(x[keep], expected[name][keep]), name


def test_strided_inputs_and_cotangents():
    """Guards reads through strides, whose gaps hold NaN; expanded cotangents as sum() sends them."""
    inputs = make([300, 41], (4, 8), profile="mild")
    names = ("q", "k", "v", "g", "beta")
    views = replace(inputs, **{name: strided_copy(getattr(inputs, name)) for name in names}, do=strided_copy(inputs.do))
    leaves = {name: getattr(views, name).requires_grad_() for name in names}
    kwargs = {**inputs.kwargs, **leaves}
    o, ht = flash_qla.chunk_gated_delta_rule(**kwargs, output_final_state=True)
    grads = torch.autograd.grad([o, ht], list(leaves.values()), [views.do, inputs.dht], retain_graph=True)
    expected = run_public(inputs)
    for name, grad in zip(names, grads, strict=True):
        assert torch.equal(grad, expected[gradient_name(name)]), name
    summed = torch.autograd.grad(o.sum(), [leaves["q"]])[0]
    ones = run_public(replace(inputs, do=torch.ones_like(inputs.do)), use_dht=False)
    assert torch.equal(summed, ones["dq"])


def test_first_gate_without_state_has_no_gradient():
    """All but zero: what is left are row and column sums of β dM ∘ K Kᵀ, which come from different roundings."""
    inputs = make([70, 5, 64], with_state=False)
    results = run_public(inputs), kernel_roundings.backward(inputs)
    actual, emulated = (x["dg"][0, [0, 70, 75]].abs().max() for x in results)
    assert actual <= kernel_roundings.REDRAWN * emulated


def test_activation_checkpointing_is_bit_equal():
    """Guards plans that depend on the grad mode: a recomputed forward must be the first one."""
    from torch.utils.checkpoint import checkpoint

    inputs = make([1000, 24], (4, 8))
    leaves = inputs.differentiable()

    def layer(*tensors):
        kwargs = {**inputs.kwargs, **dict(zip(INPUT_NAMES, tensors, strict=True))}
        return flash_qla.chunk_gated_delta_rule(**kwargs, output_final_state=True, use_qk_l2norm_in_kernel=True)

    o, ht = checkpoint(layer, *(getattr(leaves, name) for name in INPUT_NAMES), use_reentrant=False)
    torch.autograd.backward([o, ht], [inputs.do, inputs.dht])
    expected = run_public(inputs, use_qk_l2norm_in_kernel=True)
    for name in INPUT_NAMES:
        assert torch.equal(getattr(leaves, name).grad, expected[gradient_name(name)]), name

"""The forward kernels against float64, per head: gates, head ratios, lengths, dtypes, head sizes, layouts."""

from dataclasses import replace

import pytest
import torch

import flash_qla
from flash_qla.testing.compare import assert_close_per_head, block_errors
from flash_qla.testing.workloads import GATE_PROFILES, make_inputs
from tests import kernel_roundings
from tests.case_inputs import assert_same_bits, check, run_public, strided_copy, truth

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# One packed call with every boundary: shorter than, equal to and longer than a chunk, empty, at unaligned starts.
RAGGED = [1, 63, 64, 65, 0, 130, 7, 0, 200]
RATIOS = {1: (4, 4), 2: (2, 4), 3: (2, 6), 4: (2, 8), 8: (1, 8)}
HEAD_SIZES = [(16, 16), (32, 64), (64, 64), (64, 128), (80, 32), (96, 96), (127, 65), (128, 64), (128, 1), (8, 128)]


def make(lengths=RAGGED, heads=(2, 4), dims=(128, 128), profile="strong", dtype=BF16, **kwargs):
    return make_inputs(lengths, *heads, *dims, profile, dtype, device="cuda", **kwargs)


@pytest.mark.parametrize("profile", GATE_PROFILES)
@pytest.mark.parametrize("ratio", RATIOS, ids="ratio{}".format)
def test_gates_and_head_ratios(profile, ratio):
    """Guards group sizes (static in the kernels) and the gate arithmetic, rows after the last sequence included."""
    inputs = make(heads=RATIOS[ratio], profile=profile, tail_tokens=77)
    actual = check(inputs, gradients=False)
    assert actual["o"][:, sum(RAGGED) :].abs().max() == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 257, 511], ids="T{}".format)
@pytest.mark.parametrize("batch", [1, 3], ids="B{}".format)
def test_dense_lengths(length, batch):
    """Guards the ragged last chunk of dense inputs, whose next row belongs to the next sequence."""
    check(make((batch, length), profile="mild"), gradients=False)


@pytest.mark.parametrize("heads", [(16, 64), (16, 16)], ids=str)
@pytest.mark.parametrize("lengths", [[512] * 8, [2048], [1000, 24, 0, 777]], ids=["batch", "long", "mixed"])
def test_many_heads(heads, lengths):
    """Guards the variants for many CTAs (two value warpgroups) beside those for few (V split)."""
    inputs = make(lengths, heads, profile="mild")
    actual = check(inputs, gradients=False)
    assert block_errors(actual["o"], truth(inputs, gradients=False)["o"]).max() < 0.03


@pytest.mark.parametrize("profile", GATE_PROFILES)
def test_float16(profile):
    """Guards the float16 variant; its exponent is small, its mantissa long."""
    check(make(profile=profile, dtype=FP16), gradients=False)


@pytest.mark.parametrize("dims", HEAD_SIZES, ids="{0[0]}x{0[1]}".format)
def test_head_sizes(dims):
    """Guards native sizes and zero padding to them.

    Few columns of k: unit keys are more alike, and rounding the products' operands weighs more.
    """
    names = kernel_roundings.OUTPUTS if dims[0] <= 16 else []
    kernel_roundings.check(make(dims=dims, profile="mild"), names, gradients=False)


@pytest.mark.parametrize("head_dim_k", [1, 2])
def test_tiny_key_heads(head_dim_k):
    """Guards K = 1 and 2, where all normalised keys of a chunk (nearly) agree and the chunk's terms cancel."""
    inputs = make(dims=(head_dim_k, 128), profile="mild")
    kernel_roundings.check(inputs, kernel_roundings.OUTPUTS, gradients=False)


@pytest.mark.parametrize("gate", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("beta", [FP32, BF16, FP16], ids=str)
def test_gate_and_beta_dtypes(gate, beta):
    """Guards the loads of g and beta, each in a dtype of its own."""
    check(make([130, 70], profile="mild", gate_dtype=gate, beta_dtype=beta), gradients=False)


@pytest.mark.parametrize("state", [FP32, BF16, FP16, None], ids=str)
@pytest.mark.parametrize("final", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
def test_states(state, final, v_first):
    """Guards the state's loads and stores: any dtype in, any out, either layout, or none; float32 between."""
    inputs = make([130, 0, 70], dims=(128, 64), profile="mild", with_state=state is not None, state_dtype=state or FP32)
    actual = run_public(inputs, gradients=False, v_first=v_first, state_dtype=final)
    assert actual["ht"].dtype == final
    wide = run_public(inputs, gradients=False)
    assert torch.equal(actual["o"], wide["o"]) and torch.equal(actual["ht"], wide["ht"].to(final))
    assert_close_per_head(wide, truth(inputs, gradients=False), BF16)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_v_first_is_bit_equal(dtype):
    inputs = make(heads=(4, 16), dtype=dtype)
    assert_same_bits(run_public(inputs, gradients=False, v_first=True), run_public(inputs, gradients=False))


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
@pytest.mark.parametrize("host_copy", [False, True], ids=["read_back", "host_copy"])
def test_states_entering_the_chunks(v_first, host_copy):
    """Guards output_h: chunk by chunk of the original sequences, in order."""
    inputs = make([130, 0, 64, 1], dims=(64, 128), profile="mild")
    h0 = inputs.initial_state.mT.contiguous() if v_first else inputs.initial_state
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    cu_cpu = inputs.cu_seqlens.cpu() if host_copy else None
    *_, h, ht, _ = flash_qla.chunk_gated_delta_rule_fwd(
        *tensors, initial_state=h0, cu_seqlens=inputs.cu_seqlens, output_h=True, state_v_first=v_first,
        cu_seqlens_cpu=cu_cpu,
    )  # fmt: skip
    assert h.dtype == BF16 and h.shape[:2] == (1, 5)
    for i, (n, start, length) in enumerate([(0, 0, 0), (0, 0, 64), (0, 0, 128), (2, 130, 0), (3, 194, 0)]):
        names = ("q", "k", "v", "g", "beta", "do")
        piece = {name: getattr(inputs, name)[:, start : start + length] for name in names}
        state = inputs.initial_state[n : n + 1]
        piece = replace(inputs, **piece, initial_state=state, cu_seqlens=None, lengths=[length], dht=state)
        got = h[:, i].mT if v_first else h[:, i]
        assert_close_per_head({"ht": got}, truth(piece, gradients=False), BF16)


@pytest.mark.parametrize("steps", [(-0.2, -0.6), (-0.257, -0.259), (0.0, -3.0)], ids=["mild", "bound", "mixed"])
def test_inference_mode(steps):
    """Guards the form of T that only inference uses; both kernels must take the same chunks for mild."""
    inputs = make([1, 63, 64, 65, 0, 200, 333], profile="none")
    inputs.g[:] = torch.tensor(steps, device=inputs.g.device).repeat(inputs.g.shape[2] // 2)
    with torch.inference_mode():
        results = run_public(inputs, gradients=False, auto_cp=False)
        again = run_public(inputs, gradients=False, auto_cp=False)
    assert_same_bits(results, again)
    assert_close_per_head(results, {name: truth(inputs, gradients=False)[name] for name in results}, BF16)


def test_low_level_forward():
    """Guards g_cumsum and A as users of the halves see them, the rows after the last sequence included."""
    inputs = make([130, 7, 64], profile="strong", tail_tokens=70)
    g_cumsum, A, o, h, ht, _ = flash_qla.chunk_gated_delta_rule_fwd(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.scale, inputs.initial_state, inputs.cu_seqlens
    )
    assert h is None
    assert_same_bits({"o": o, "ht": ht}, run_public(inputs, gradients=False))
    from flash_qla.ops.gated_delta_rule.chunk import reference

    wide, wide_A = reference.solve(inputs.k.double(), inputs.g.double(), inputs.beta.double(), inputs.seqs)
    torch.testing.assert_close(g_cumsum[:, :201].double(), wide[:, :201], rtol=1e-5, atol=1e-4)
    assert A.dtype == BF16
    assert_close_per_head({"A": A[:, :201]}, {"A": wide_A[:, :201]}, BF16)


def test_nan_stays_in_its_sequence():
    """Guards reads past a ragged chunk: the neighbours of a sequence full of NaN keep their bits."""
    clean = make([70, 30, 70, 0, 5], profile="mild")
    names = ("q", "k", "v", "g", "beta", "initial_state")
    dirty = {name: getattr(clean, name).clone() for name in names}
    for name, x in dirty.items():
        (x[1] if name == "initial_state" else x[:, 70:100]).fill_(float("nan"))
    actual = run_public(replace(clean, **dirty), gradients=False)
    expected = run_public(clean, gradients=False)
    rows = [*range(70), *range(100, 175)]
    assert torch.equal(actual["o"][:, rows], expected["o"][:, rows])
    assert torch.equal(actual["ht"][[0, 2, 3, 4]], expected["ht"][[0, 2, 3, 4]])
    assert actual["ht"][1].isnan().any()


@pytest.mark.parametrize("which", ["q", "k", "v", "g", "beta"])
def test_nan_in_the_tail_is_never_read(which):
    """Guards the rows after the last sequence: zeros in o, and no trace in the last ragged chunk."""
    inputs = make([70, 5], profile="mild", tail_tokens=200)
    expected = run_public(inputs, gradients=False)
    dirty = getattr(inputs, which).clone()
    dirty[:, 75:] = float("nan")
    assert_same_bits(run_public(replace(inputs, **{which: dirty}), gradients=False), expected)


def test_keys_not_normalised_with_a_strong_gate():
    """Guards gating before the inversion: the ungated inverse of these keys overflows float32."""
    inputs = make([128, 70], profile="strong", normalize=False)
    inputs = replace(inputs, g=torch.full_like(inputs.g, -12.0))
    check(inputs, gradients=False)


def test_strided_inputs_and_output():
    """Guards reads through strides, whose gaps hold NaN, and a strided `out`."""
    inputs = make([300, 41], (4, 8), profile="mild")
    views = replace(inputs, **{name: strided_copy(getattr(inputs, name)) for name in ("q", "k", "v")})
    views = replace(views, g=strided_copy(inputs.g), beta=strided_copy(inputs.beta))
    expected = run_public(inputs, gradients=False)
    assert_same_bits(run_public(views, gradients=False), expected)
    out = strided_copy(inputs.v)
    run_public(inputs, gradients=False, out=out)
    assert torch.equal(out, expected["o"])


@pytest.mark.parametrize("change", ["float32", "head_dim"])
def test_what_the_kernels_do_not_cover(change, monkeypatch):
    """Guards the fallback: NotImplementedError when kernels are demanded, one warning and PyTorch otherwise."""
    inputs = make(
        [70], dims=(16, 144) if change == "head_dim" else (16, 16), dtype=FP32 if change == "float32" else BF16
    )
    before = flash_qla.compile_count()
    with pytest.raises(NotImplementedError, match="float32" if change == "float32" else "V = 144"):
        run_public(inputs)
    assert flash_qla.compile_count() == before
    supported, reason = flash_qla.supports(inputs.q, inputs.k, inputs.v)
    assert not supported and ("float32" in reason or "144" in reason)
    monkeypatch.setenv("FLASH_QLA_BACKEND", "auto")
    from flash_qla.ops.gated_delta_rule.chunk import backend

    backend._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="PyTorch"):
        check(inputs)
    backend._warn_once.cache_clear()


def test_supports_agrees():
    inputs = make([70])
    assert flash_qla.supports(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)[0]


@pytest.mark.parametrize("backend", ["reference"])
def test_reference_on_the_gpu(backend, monkeypatch):
    """Guards the PyTorch stages on a GPU, which every other comparison rests on."""
    monkeypatch.setenv("FLASH_QLA_BACKEND", backend)
    check(make(profile="extreme"))
    check(make(dims=(160, 200), profile="strong"))


WALKS = {
    "equal": [512] * 9,
    "ragged": [3000, 100, 0, 700, 64, 1, 900, 2500, 300, 0, 1200, 777],
    "many": [(37 * n * n + 11 * n) % 400 for n in range(90)],
    "short": [0, 1, 63, 0, 64] * 60,
}


@pytest.mark.parametrize("lengths", WALKS.values(), ids=WALKS.keys())
@pytest.mark.parametrize("heads", [(2, 4), (4, 16), (16, 64)], ids=str)
def test_persistent_walks(lengths, heads):
    """Guards CTAs that take several walks: their schedule misses none, and their bits are those of one walk a CTA."""
    from flash_qla.ops.gated_delta_rule.chunk.kernels import fused_fwd, stages

    inputs = make(lengths, heads, profile="mild", tail_tokens=70)
    g_cumsum, T_inv = stages.solve(inputs.k, inputs.g, inputs.beta, inputs.seqs)
    found = []
    for persistent in (False, True, True):
        o = torch.full_like(inputs.v, float("nan"))
        ht = torch.full_like(inputs.initial_state, float("nan"))
        fused_fwd.launch_spec(
            fused_fwd.Spec("bfloat16", value_warpgroups=2, persistent=persistent), o, ht, None, inputs.q, inputs.k,
            inputs.v, T_inv, g_cumsum, inputs.beta, inputs.scale, inputs.initial_state, inputs.seqs,
        )  # fmt: skip
        found.append({"o": o, "ht": ht})
    assert not found[0]["o"].isnan().any()
    for again in found[1:]:
        assert_same_bits(again, found[0])

"""The compiled kernels give the right results: their PTX, interpreted on tiny problems (tests/ptx), against float64.

Host wrappers, launch rules and TileLang's host code run as they would on a GPU. Races and missing fences do not show
here (tests/ptx/__init__.py says what does); tests/gpu is for those and for sizes.
"""

import os
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from flash_qla.ops.gated_delta_rule.chunk import reference  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.kernels import solve  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.split import Split  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.stages import fused_gdr_h  # noqa: E402
from flash_qla.testing import compiled  # noqa: E402
from flash_qla.testing.compare import block_errors, head_errors  # noqa: E402
from flash_qla.testing.workloads import make_inputs  # noqa: E402
from tests import kernel_roundings  # noqa: E402
from tests.case_inputs import as_float64, assert_same_bits, run_public  # noqa: E402
from tests.ptx import kernels  # noqa: E402
from tests.ptx.host import CompiledKernel, HostError  # noqa: E402
from tests.ptx.machine import Deadlock, Machine  # noqa: E402
from tests.ptx.program import parse  # noqa: E402

USUAL = "bf16-k128-v128-fp32-fp32-fp32"
# What the tests below launch, as names of `variants.py`: compiled ahead, two at a time.
VARIANTS = f"""
    (ends|ends_reverse|states)-{USUAL}-value_warpgroups=[12]-.*
    fused_fwd-bf16-fp32-fp32-fp32-k128-v128-.*
    solve-bf16-fp32-fp32-k128-products=[12]
    gradients-bf16-fp32-k128-v128
    segments_scan-fp32-k128-v128
    ends-fp16-k128-v128-fp32-fp32-fp32-value_warpgroups=1-.*ready=True
    fused_fwd-fp16-fp32-fp32-fp32-k128-v128-value_warpgroups=1-store_h=False-.*
    solve-fp16-fp32-fp32-k128-products=1
    l2norm-bf16-head_dim128-.*
    states-bf16-k64-v64-.*
    fused_fwd-bf16-fp32-fp32-fp32-k64-v64-.*
    solve-bf16-fp32-fp32-k64-products=1
    gradients-bf16-fp32-k64-v64
""".split()
CALLS = {
    "ragged": dict(lengths=[0, 70, 1, 33], heads=(1, 2), gates="mild", v_first=True,
                   launches=["solve", "fused_fwd w1", "states w1", "gradients"]),
    "strong-wide-persistent": dict(lengths=[66, 1, 33], heads=(2, 2), gates="strong", num_sms=2,
                                   launches=["solve", "fused_fwd w2 persistent", "states w2", "gradients"]),
    # Gates of a step: mild for two chunks, then the state is multiplied out; strong in a chunk's second half alone.
    "steady": dict(lengths=[190], heads=(1, 2), gates="none", steps=(-0.2, -0.6), gradients=False,
                   launches=["solve", "fused_fwd w1"]),
    "steady-wide": dict(lengths=[190], heads=(1, 2), gates="none", steps=(-0.2, -0.6), num_sms=2, gradients=False,
                        launches=["solve", "fused_fwd w2"]),
    "padded-dense-no-state": dict(lengths=(2, 65), heads=(1, 1), sizes=(40, 64), gates="mild", with_state=False,
                                  launches=["solve", "fused_fwd w1", "states w1", "gradients"]),
}  # fmt: skip
SPLITS = {
    "narrow": dict(num_sms=132, launches=["ends w1", "ends_reverse w1"]),
    "wide": dict(num_sms=1, launches=["ends w2", "ends_reverse w2"]),
}

# Gates of a token by value head and chunk: no decay, mild chunks, strong ones among mild ones and the other way round.
READY_GATES = [
    lambda chunk: 0.0,
    lambda chunk: -0.02,
    lambda chunk: -0.4 * (chunk % 3 == 1),
    lambda chunk: -0.4 * (chunk % 4 != 2),
]
READY = {
    "narrow": dict(num_sms=132, launches=["solve", "ends w1 ready", "segments_scan", "fused_fwd w1"]),
    "wide-no-state": dict(num_sms=1, with_state=False,
                          launches=["solve", "ends w2 ready", "segments_scan", "fused_fwd w2"]),
    # Strong by float16's limit, and weak enough for the state that enters to show in the one that leaves.
    "float16": dict(num_sms=132, dtype=torch.float16, gate_scale=0.075,
                    launches=["solve", "ends w1 ready", "segments_scan", "fused_fwd w1"]),
}  # fmt: skip


def is_listed(name: str) -> bool:
    return any(re.fullmatch(f"sm90-{pattern}", name) for pattern in VARIANTS)


@pytest.fixture(scope="module", autouse=True)
def sources(nvcc, request):
    """The kernels' sources: all are made ahead where more than a few of these tests run, on demand elsewhere."""
    selected = sum(item.path == request.path for item in request.session.items)
    if selected > 4 and "PYTEST_XDIST_WORKER" not in os.environ:
        kernels.prepare([(v.make, v.spec) for v in compiled.all_variants() if is_listed(v.name)])


def behind_the_last(inputs, value):
    """The inputs with every row of no sequence set to a value."""
    end, names = sum(inputs.lengths), ("q", "k", "v", "g", "beta", "do")
    if inputs.cu_seqlens is None:
        return inputs
    tensors = {name: getattr(inputs, name).clone() for name in names}
    for x in tensors.values():
        x[:, end:] = value
    return replace(inputs, **tensors)


@pytest.mark.slow
@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_call(case, monkeypatch):
    """The public function and its gradients; NaN behind the last sequence; V-first gives the bits of K-first."""
    with_state, gradients = case.get("with_state", True), case.get("gradients", True)
    tail = 0 if isinstance(case["lengths"], tuple) else 3
    inputs = make_inputs(case["lengths"], *case["heads"], *case.get("sizes", (128, 128)), case["gates"],
                         with_state=with_state, tail_tokens=tail)  # fmt: skip
    if "steps" in case:
        inputs.g[:] = torch.tensor(case["steps"])
    launched = kernels.interpret(monkeypatch, case.get("num_sms", 132))
    given, options = behind_the_last(inputs, float("nan")), dict(gradients=gradients, auto_cp=False)
    with torch.inference_mode(not gradients):
        actual = run_public(given, **options)
    assert launched == case["launches"]
    kernel_roundings.judge(inputs, actual, ("dg", "dbeta", "dk"), gradients=gradients)
    if case.get("v_first"):
        assert_same_bits(run_public(given, v_first=True, **options), actual)


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLITS.values(), ids=SPLITS.keys())
def test_split(case, monkeypatch):
    """Every sequence in segments of a chunk, forward and backward; a head that never decays, one that does."""
    from flash_qla.ops.gated_delta_rule.chunk.kernels import stages

    inputs = make_inputs([130, 0, 70], 1, 2, gate_profile="none", tail_tokens=3)
    inputs.g[..., 1] = -2.0
    x, seqs = behind_the_last(inputs, float("nan")), inputs.seqs
    launched = kernels.interpret(monkeypatch, case["num_sms"])
    split = Split(1, -12.0, sum(seqs.num_chunks()))
    g_cumsum, T_inv = stages.solve(x.k, x.g, x.beta, seqs)
    solved = (T_inv, g_cumsum, x.beta)
    entering = stages.entering_states(x.k, x.v, *solved, x.initial_state, seqs, split, for_backward=True)
    leaving = stages.leaving_cotangents(x.q, x.k, *solved, x.do, x.dht, x.scale, seqs, split, entering)
    forward, reverse = case["launches"]
    assert launched == ["solve", forward, "segments_scan", reverse, "segments_scan"]
    actual = {"o": torch.empty_like(x.v), "ht": torch.empty_like(x.dht), "dh0": torch.empty_like(x.dht)}
    stages.fused_forward(actual["o"], actual["ht"], None, x.q, x.k, x.v, *solved, x.scale, x.initial_state, seqs,
                         entering)  # fmt: skip
    S, dS = stages.backward_states(x.q, x.k, x.v, *solved, x.do, x.scale, x.initial_state, x.dht, actual["dh0"], seqs,
                                   entering, leaving)  # fmt: skip
    of = {"dq": x.q, "dk": x.k, "dv": x.v, "dbeta": g_cumsum, "dg": g_cumsum}
    actual |= {name: torch.empty_like(like) for name, like in of.items()}
    stages.gradients(*(actual[name] for name in of), x.q, x.k, x.v, *solved, x.do, x.scale, S, dS, seqs)
    kernel_roundings.judge(inputs, actual, ("dg", "dbeta", "dk"))


@pytest.mark.slow
@pytest.mark.parametrize("case", READY.values(), ids=READY.keys())
def test_split_at_inference(case, monkeypatch):
    """T ready, in mild and strong chunks: every sequence in segments of five, all of which hand their states on."""
    monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", "-1e9")
    inputs = make_inputs([390, 0, 130], 1, len(READY_GATES), gate_profile="none", tail_tokens=3,
                         dtype=case.get("dtype", torch.bfloat16), with_state=case.get("with_state", True))  # fmt: skip
    for start, end in inputs.seqs.bounds():
        for token in range(start, end):
            inputs.g[:, token] = torch.tensor([gate((token - start) // 64) for gate in READY_GATES])
    inputs.g.mul_(case.get("gate_scale", 1.0))
    launched = kernels.interpret(monkeypatch, case["num_sms"])
    given = behind_the_last(inputs, float("nan"))
    with torch.inference_mode():
        actual = run_public(given, gradients=False, cp_context=FlashQLACPContext(segment_chunks=5))
        assert launched == case["launches"]
        whole = run_public(given, gradients=False, auto_cp=False)
    kernel_roundings.judge(inputs, actual, gradients=False)
    assert block_errors(actual["o"], whole["o"]).max() < 1e-2
    assert head_errors("ht", actual["ht"], whole["ht"]).max() < 1e-2


@pytest.mark.parametrize("num_sms", [132, 1], ids=["w1", "w2"])
def test_states_of_chunks(num_sms, monkeypatch):
    """h, the state at the start of each chunk."""
    inputs = make_inputs([70, 33], 1, 1, gate_profile="mild")
    launched = kernels.interpret(monkeypatch, num_sms)
    wide = as_float64(inputs)
    g_cumsum, T_inv = reference.solve(wide.k, wide.g, wide.beta, wide.seqs)
    rest = dict(initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens)
    T_inv, g_cumsum = T_inv.to(inputs.k.dtype), g_cumsum.float()
    h, ht, _ = fused_gdr_h(inputs.k, inputs.v, T_inv, g_cumsum, inputs.beta, **rest)
    assert launched == [f"fused_fwd w{1 if num_sms > 1 else 2} store_h"]
    monkeypatch.setenv("FLASH_QLA_BACKEND", "reference")
    rest["initial_state"] = wide.initial_state
    expected, expected_ht, _ = fused_gdr_h(wide.k, wide.v, T_inv.double(), g_cumsum.double(), wide.beta, **rest)
    assert head_errors("ht", h[0], expected[0]).max() < 5e-3
    assert head_errors("ht", ht, expected_ht).max() < 5e-3


def test_l2norm(monkeypatch):
    """q and k in one launch, through strides; the backward from the saved results."""
    from flash_qla.ops.gated_delta_rule.chunk.kernels import stages

    launched = kernels.interpret(monkeypatch)
    q, k, dq, dk = torch.randn(4, 2, 37, 2, 128).bfloat16()
    q = torch.cat([q, q], -1)[..., 128:]
    q[0, 5] = 0
    eps = 1e-6
    yq, yk, rstd_q, rstd_k = stages.normalize(q, k, eps)
    found = stages.normalize_backward(dq, dk, yq, yk, rstd_q, rstd_k)
    assert launched == ["l2norm", "l2norm is_backward"]
    for x, y, rstd, dy, dx in ((q, yq, rstd_q, dq, found[0]), (k, yk, rstd_k, dk, found[1])):
        wide = x.double().requires_grad_()
        expected_rstd = (wide.square().sum(-1) + eps).rsqrt()
        expected = wide * expected_rstd.unsqueeze(-1)
        torch.testing.assert_close(rstd.double(), expected_rstd.detach(), rtol=1e-5, atol=0)
        torch.testing.assert_close(y.double(), expected.detach(), rtol=2**-8, atol=1e-6)
        (gradient,) = torch.autograd.grad(expected, wide, dy.double())
        assert (dx.double() - gradient).norm(dim=-1).div(gradient.norm(dim=-1)).max() < 6e-3


def test_every_kernel_is_run():
    """Every kernel of the usual dtypes and sizes, in every width and form, is launched by a test above."""
    run = {name for case in CALLS.values() for name in case["launches"]}
    run |= {name for cases in (SPLITS, READY) for case in cases.values() for name in case["launches"]}
    run |= {"segments_scan", "fused_fwd w1 store_h", "fused_fwd w2 store_h", "l2norm", "l2norm is_backward"}
    there = {kernels.label(v.make, v.spec) for v in compiled.all_variants()}
    assert run == there


def run_solve(change=lambda text: text, k=None):
    """Runs solve on two chunks and three heads with its PTX changed. Returns T's relative error below the diagonal."""
    x = make_inputs((1, 70), 1, 3, gate_profile="mild")
    host_source, text = kernels.sources((solve.make, solve.Spec()))
    changed = change(text)
    g_cumsum, T_inv = torch.empty(1, 70, 3), torch.full((1, 70, 3, 32), float("nan"))
    no_cu = torch.zeros(0, dtype=torch.int32)
    kernel = CompiledKernel(Machine(parse(changed)), host_source)
    kernel(x.k if k is None else k, x.g, x.beta, no_cu, g_cumsum, T_inv, 0, 70, 1, 2, 1, 2, 0, 2, 1, 0)
    _, expected = reference.solve(x.k.double(), x.g.double(), x.beta.double(), x.seqs)
    error = T_inv.view(x.k.dtype).view(expected.shape).double() - expected
    return (error.norm() / expected.masked_fill(expected == 1, 0).norm()).item()


def test_a_wrong_kernel_is_noticed():
    """The tests above would pass on an interpreter that runs nothing, or on too loose bounds."""
    assert run_solve() < 3e-3

    def changed(pattern, replacement, count=1):
        def change(text):
            found, times = re.subn(pattern, replacement, text, count=count)
            assert times > 0, f"{pattern} is not in the PTX"
            return found

        return change

    assert not run_solve(changed("0f3FB8AA3B", "0f3FB00000", 0)) < 3e-3, "log2(e) as 1.375"
    flipped = changed(r"(mma\.sync[^;]*?\}[^;]*?)\{(%r\d+), *(%r\d+)\}", r"\1{\3, \2}", 0)
    assert not run_solve(flipped) < 3e-3, "registers of the small products' right operands exchanged"
    with pytest.raises(Deadlock, match="mbarrier.try_wait"):
        run_solve(changed(r"(mbarrier\.init\S+ \[%r\d+\]), (%r\d+);", r"\1, 77;"))
    with pytest.raises(NotImplementedError, match="bar.red"):
        run_solve(changed(r"bar\.sync\s", "bar.red.popc.u32 "))


def test_host_code_checks_its_arguments():
    """TileLang's own checks run, and those of tensor maps that the driver would make."""
    k = make_inputs((1, 70), 1, 3).k
    with pytest.raises(HostError, match="dtype mismatch"):
        run_solve(k=k.float())
    with pytest.raises(ValueError, match="multiples of 16"):
        run_solve(k=torch.cat([k, k[..., :1]], -1)[..., :128])

"""Every kernel's host wrapper hands over what the traced kernel asks for: seen without a GPU, by tracing and comparing.

The compiled entry point would notice on the GPU only, and there only for the paths that a test happens to take.
"""

import pytest
import torch

pytest.importorskip("tilelang")

from flash_qla.ops.gated_delta_rule.chunk.kernels import solve, stages  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.split import Split  # noqa: E402
from tests.launches import replace_launches  # noqa: E402

KERNELS = {
    "solve", "fused_forward", "fused_forward persistent", "backward_states", "gradients", "segment_ends",
    "segment_ends_reverse", "segment_scan", "l2norm_forward", "l2norm_backward",
}  # fmt: skip


def check_arguments(function, arguments):
    """Raises AssertionError where arguments do not fit a prim_func: number, kind, dtype, rank, fixed sizes."""
    assert len(arguments) == len(function.params), f"{len(arguments)} arguments for {len(function.params)} parameters"
    for parameter, given in zip(function.params, arguments):
        if parameter not in function.buffer_map:
            kind = float if str(parameter.dtype).startswith("float") else int
            assert type(given) is kind, f"{parameter}: {given!r} is no {kind.__name__}"
            continue
        buffer = function.buffer_map[parameter]
        assert isinstance(given, torch.Tensor), f"{parameter}: {given!r} is no tensor"
        assert str(given.dtype) == f"torch.{buffer.dtype}", f"{parameter}: {given.dtype} for {buffer.dtype}"
        assert given.dim() == len(buffer.shape), f"{parameter}: {tuple(given.shape)} for {buffer.shape}"
        for size, wanted in zip(given.shape, buffer.shape):
            fixed = getattr(wanted, "value", None)
            assert fixed in (None, size), f"{parameter}: {tuple(given.shape)} for {buffer.shape}"


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels whose arguments were checked, in place of launches; a device with 132 multiprocessors."""
    names = []

    def build(make, spec, _arch):
        function = make(spec)

        def launch(*arguments):
            check_arguments(function, arguments)
            name = function.attrs["global_symbol"].replace("solve_sm90", "solve")
            names.append(name + " persistent" * getattr(spec, "persistent", False))

        return launch

    replace_launches(monkeypatch, build, num_sms=132)
    return names


def call_all_stages(num_seqs, heads, sizes, *, varlen=True, split=None, store_h=False, states=True, gate=torch.float32):
    """Every stage once, forward and backward, on tensors whose values nobody reads."""
    (Hq, Hv), (K, V), num_tokens = heads, sizes, 300
    cu = torch.linspace(0, num_tokens, num_seqs + 1).to(torch.int32) if varlen else None
    batch = 1 if varlen else num_seqs
    seqs = Sequences.build(batch, num_tokens, 64, cu)
    q, k = (torch.zeros(batch, num_tokens, Hq, K, dtype=torch.bfloat16) for _ in range(2))
    v, do = (torch.zeros(batch, num_tokens, Hv, V, dtype=torch.bfloat16) for _ in range(2))
    g, beta = (torch.zeros(batch, num_tokens, Hv, dtype=gate) for _ in range(2))
    h0, ht, dht, dh0 = (torch.zeros(num_seqs, Hv, K, V) if states else None for _ in range(4))
    h = torch.zeros(num_tokens, Hv, K, V, dtype=torch.bfloat16) if store_h else None
    o, scale, entering, leaving = torch.empty_like(v), 0.5, None, None
    yq, yk, rstd_q, rstd_k = stages.normalize(q, k, 1e-6)
    g_cumsum, T_inv = stages.solve_and_walk(o, ht, h, q, k, v, g, beta, scale, h0, seqs)
    solved = (T_inv, g_cumsum, beta)
    if split is not None:
        entering = stages.entering_states(k, v, *solved, h0, seqs, split, for_backward=True)
        leaving = stages.leaving_cotangents(q, k, *solved, do, dht, scale, seqs, split, entering)
        stages.fused_forward(o, ht, h, q, k, v, *solved, scale, h0, seqs, entering)
    S, dS = stages.backward_states(q, k, v, *solved, do, scale, h0, dht, dh0, seqs, entering, leaving)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dbeta, dg = (torch.empty(batch, num_tokens, Hv) for _ in range(2))
    stages.gradients(dq, dk, dv, dbeta, dg, q, k, v, *solved, do, scale, S, dS, seqs)
    stages.normalize_backward(q, k, yq, yk, rstd_q, rstd_k)


SPLIT = Split(segment_chunks=2, tolerance=-20.0, num_segments=5)
UNSPLIT = KERNELS - {"segment_ends", "segment_ends_reverse", "segment_scan"}
PERSISTENT = {"fused_forward persistent"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(dict(num_seqs=3, heads=(2, 4), sizes=(128, 128), store_h=True), UNSPLIT - PERSISTENT, id="h"),
        pytest.param(dict(num_seqs=150, heads=(2, 4), sizes=(128, 128)), UNSPLIT - {"fused_forward"}, id="persistent"),
        pytest.param(dict(num_seqs=1, heads=(1, 2), sizes=(128, 128), split=SPLIT), KERNELS - PERSISTENT, id="split"),
        pytest.param(
            dict(num_seqs=2, heads=(2, 4), sizes=(80, 40), varlen=False, states=False, gate=torch.bfloat16),
            UNSPLIT - PERSISTENT,
            id="padded-dense-bf16-gates-no-states",
        ),
    ],
)
def test_wrappers_pass_what_kernels_take(launched, case, expected):
    """Guards: the order and the kinds of a kernel's arguments, stated in its signature and again in its wrapper."""
    call_all_stages(**case)
    assert set(launched) == expected


def test_a_wrong_argument_is_noticed():
    """The test above would pass on a check that looks at nothing."""
    function = solve.make(solve.Spec())
    k, g = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 8, 4)
    right = [k, g, g, torch.zeros(0, dtype=torch.int32), g, torch.zeros(1, 8, 4, 32), 0, 8, *([1] * 8)]
    check_arguments(function, right)
    wrong = [(0, k.float()), (0, k[..., :64]), (1, g[0]), (3, 0), (6, 0.0), (6, g), (12, True)]
    for place, value in wrong:
        with pytest.raises(AssertionError):
            check_arguments(function, [*right[:place], value, *right[place + 1 :]])
    with pytest.raises(AssertionError):
        check_arguments(function, right[:-1])

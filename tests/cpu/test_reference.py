"""The chunked PyTorch stages against autograd through the float64 token recurrence."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flash_qla.ops.gated_delta_rule.chunk import reference as stages
from flash_qla.ops.gated_delta_rule.chunk.constants import GATE_FLOOR
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
from flash_qla.ops.utils import chunk_local_cumsum
from flash_qla.testing.compare import assert_close_per_head, chunked_reference, ground_truth
from flash_qla.testing.workloads import GATE_PROFILES, LENGTH_CASES, make_inputs
from tests.case_inputs import GRADIENTS, run_public

ABSOLUTE = 1e-9


def assert_equal_float64(inputs, label=""):
    """Every output and gradient within 1e-9, absolutely: near-zero gradients have no other meaningful measure."""
    actual, expected = chunked_reference(inputs), ground_truth(inputs)
    for name, x in expected.items():
        if x is None:
            assert actual[name] is None
            continue
        error = (actual[name] - x).abs().max().item() if x.numel() else 0.0
        assert error <= ABSOLUTE * max(1.0, x.abs().max().item() if x.numel() else 0.0), f"{label} {name}: {error:.2e}"


@pytest.mark.parametrize("profile", GATE_PROFILES)
@pytest.mark.parametrize("lengths", LENGTH_CASES.values(), ids=LENGTH_CASES)
def test_float64_equals_recurrence(lengths, profile):
    inputs = make_inputs(lengths, 2, 4, 16, 24, profile, torch.float64, tail_tokens=3)
    assert_equal_float64(inputs)


@pytest.mark.parametrize("shape", [(3, 130), (2, 64), (1, 1), (2, 0), (0, 130)], ids=str)
def test_float64_equals_recurrence_dense(shape):
    assert_equal_float64(make_inputs(shape, 1, 3, 8, 5, "strong", torch.float64))


@pytest.mark.parametrize("dims", [(1, 1), (1, 256), (256, 1), (96, 160), (128, 128)], ids=str)
def test_float64_head_sizes(dims):
    assert_equal_float64(make_inputs([70, 3], 1, 2, *dims, "mixed", torch.float64))


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 150), max_size=5),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    profile=st.sampled_from(list(GATE_PROFILES)),
    with_state=st.booleans(),
    normalize=st.booleans(),
    tail=st.integers(0, 70),
    seed=st.integers(0, 1000),
)
def test_float64_any_problem(lengths, heads, profile, with_state, normalize, tail, seed):
    kwargs = {"with_state": with_state, "seed": seed, "tail_tokens": tail, "normalize": normalize}
    inputs = make_inputs(lengths, *heads, 4, 3, profile, torch.float64, **kwargs)
    if not normalize:
        # |k|^2 up to about 2.5: beta |k|^2 stays near the rule's stable range, gates or not.
        inputs = replace(inputs, k=inputs.k / 2)
    assert_equal_float64(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("profile", GATE_PROFILES)
def test_low_precision_within_tolerance(dtype, profile):
    inputs = make_inputs([130, 0, 70], 1, 4, 32, 64, profile, dtype)
    assert_close_per_head(chunked_reference(inputs), ground_truth(inputs), dtype)


def test_keys_not_normalised_with_strong_gate():
    """Guards gating before the inversion: the ungated inverse of these keys is beyond float32."""
    inputs = make_inputs([128], 1, 2, 16, 16, "strong", torch.float64, normalize=False)
    inputs = replace(inputs, k=8 * inputs.k, g=torch.full_like(inputs.g, -12.0))
    assert_equal_float64(inputs)
    single = replace(inputs, **{n: getattr(inputs, n).float() for n in ("q", "k", "v", "g", "beta")})
    assert_close_per_head({"o": chunked_reference(single)["o"]}, ground_truth(single), torch.float32)


def test_gate_floor_is_a_reset_and_takes_no_gradient():
    inputs = make_inputs([100], 1, 2, 8, 8, "none", torch.float64)
    g = inputs.g.clone()
    g[:, 40] = -torch.inf
    g[:, 70] = -1e6
    expected = ground_truth(replace(inputs, g=g))
    assert expected["dg"][:, [40, 70]].abs().max() == 0
    clamped = ground_truth(replace(inputs, g=g.clamp(min=GATE_FLOOR)))
    torch.testing.assert_close(expected["o"], clamped["o"], rtol=0, atol=0)
    assert_equal_float64(replace(inputs, g=g))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_resets_cost_no_precision(share, split, monkeypatch):
    """Each reset adds -100 to its chunk's sum: tokens that decay little after 56 of them lost three digits."""
    monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", "-1e9")
    inputs = make_inputs([130, 0, 200], 1, 4, 32, 64, "mild", torch.float32)
    resets = torch.rand(inputs.g.shape, generator=torch.Generator().manual_seed(1)) < share
    resets &= (torch.arange(330) % 64 < 56).view(-1, 1)
    inputs = replace(inputs, g=inputs.g.masked_fill(resets, -1e4))
    caps = {name: 2e-6 for name in ("o", "ht", *GRADIENTS)}
    assert_close_per_head(run_public(inputs, force_intra_cp=split), ground_truth(inputs), torch.float32, caps=caps)


def test_positive_gate_is_not_clamped():
    inputs = make_inputs([100], 1, 2, 8, 8, "none", torch.float64)
    assert_equal_float64(replace(inputs, g=torch.full_like(inputs.g, 0.05)))


def test_first_token_gate_gradient_without_state_is_zero():
    inputs = make_inputs([70, 5, 64], 2, 4, 16, 16, "strong", torch.float32, with_state=False)
    dg = chunked_reference(inputs)["dg"]
    starts = inputs.cu_seqlens[:-1].long()
    assert dg[0, starts].abs().max() <= 1e-6 * dg.abs().max()


def test_states_of_chunks_and_slots():
    """h is the state entering each chunk: the final state of the sequence cut there; slots hold the same."""
    inputs = make_inputs([130, 0, 65], 1, 2, 8, 6, "mild", torch.float64)
    k, v, seqs, h0 = inputs.k, inputs.v, inputs.seqs, inputs.initial_state
    g_cumsum, T_inv = stages.solve(k, inputs.g, inputs.beta, seqs)
    h = torch.full((seqs.total_chunks(), 2, 8, 6), torch.nan, dtype=torch.float64)
    args = (k, v, T_inv, g_cumsum, inputs.beta)
    stages.fused_forward(None, None, h, None, *args, 1.0, h0, seqs)
    S = stages.forward_states(*args, h0, seqs)
    for i, (n, chunk) in enumerate(seqs.chunk_seq()):
        start, length = seqs.bounds()[n][0], 64 * chunk
        rows = slice(start, start + length)
        piece = [x[:, rows] for x in (inputs.q, k, v, inputs.g, inputs.beta)]
        _, state = stages.recurrence(*piece, 1.0, h0[n : n + 1], Sequences.build(1, length, 64))
        torch.testing.assert_close(h[i], state[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(S[seqs.first_slots()[n] + chunk], state[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_cumsum_restarts_in_each_chunk(reverse):
    seqs = Sequences.build(1, 140, 64, torch.tensor([0, 70, 70, 137]))
    g = torch.randn(1, 140, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(g)
    for start, end in ((0, 64), (64, 70), (70, 134), (134, 137)):
        piece = g[:, start:end].flip(1) if reverse else g[:, start:end]
        piece = piece.cumsum(1)
        expected[:, start:end] = piece.flip(1) if reverse else piece
    actual = stages.cumsum(g, seqs, reverse)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert stages.cumsum(g.bfloat16(), seqs).dtype == torch.float32
    assert stages.cumsum(g.double(), seqs).dtype == torch.float64


def test_cumsum_takes_no_memory_for_chunks_beyond_the_tokens():
    g = torch.randn(1, 70, 2)
    with _Work() as work:
        assert torch.equal(chunk_local_cumsum(g, chunk_size=10**15), chunk_local_cumsum(g, chunk_size=70))
    assert work.elements < 100 * g.numel()


def test_solve_inverts_and_pads_with_zeros():
    inputs = make_inputs([70, 9], 1, 2, 8, 8, "mild", torch.float64, tail_tokens=5)
    g_cumsum, T_inv = stages.solve(inputs.k, inputs.g, inputs.beta, inputs.seqs)
    assert T_inv.shape == (1, 84, 2, 64)
    assert T_inv[:, 79:].abs().max() == 0
    assert g_cumsum[:, 79:].abs().max() == 0
    for start, end in ((0, 64), (64, 70), (70, 79)):
        n = end - start
        k, b, g = inputs.k[0, start:end, 0], inputs.beta[0, start:end], g_cumsum[0, start:end]
        for head in range(2):
            decay = (g[:, None, head] - g[None, :, head]).exp()
            matrix = torch.eye(n, dtype=k.dtype) + (b[:, head, None] * decay * (k @ k.T)).tril(-1)
            rows = T_inv[0, start:end, head]
            torch.testing.assert_close(rows[:, :n] @ matrix, torch.eye(n, dtype=k.dtype), rtol=0, atol=1e-12)
            assert rows[:, n:].abs().sum() == 0


@pytest.mark.parametrize("chunk_size", [16, 32, 128])
def test_any_chunk_size(chunk_size):
    inputs = make_inputs([150, 0, 33], 1, 2, 8, 6, "mixed", torch.float64)
    seqs = replace(inputs.seqs, chunk_size=chunk_size, _cache={})
    g_cumsum, T_inv = stages.solve(inputs.k, inputs.g, inputs.beta, seqs)
    o, ht = torch.empty_like(inputs.v), torch.empty_like(inputs.dht)
    args = (inputs.q, inputs.k, inputs.v, T_inv, g_cumsum, inputs.beta, inputs.scale, inputs.initial_state, seqs)
    stages.fused_forward(o, ht, None, *args)
    expected = ground_truth(inputs, gradients=False)
    torch.testing.assert_close(o, expected["o"], rtol=0, atol=1e-12)
    torch.testing.assert_close(ht, expected["ht"], rtol=0, atol=1e-12)


def test_nan_stays_in_its_sequence():
    """Guards every gather past a ragged chunk's end."""
    clean = make_inputs([70, 30, 70], 1, 2, 8, 8, "mild", torch.float32)
    tensors = {n: getattr(clean, n).clone() for n in ("q", "k", "v", "g", "beta", "initial_state", "do", "dht")}
    for name, x in tensors.items():
        (x[1] if name in ("initial_state", "dht") else x[:, 70:100]).fill_(torch.nan)
    actual, expected = chunked_reference(replace(clean, **tensors)), chunked_reference(clean)
    for name, x in actual.items():
        keep = [0, 2] if name in ("ht", "dh0") else [*range(70), *range(100, 170)]
        x, y = (x[keep], expected[name][keep]) if name in ("ht", "dh0") else (x[:, keep], expected[name][:, keep])
        assert torch.equal(x, y), name


def test_none_state_equals_zero_state():
    inputs = make_inputs([130, 65], 2, 4, 16, 16, "strong", torch.float32)
    zeros = replace(inputs, initial_state=torch.zeros_like(inputs.initial_state))
    actual, expected = chunked_reference(replace(inputs, initial_state=None)), chunked_reference(zeros)
    assert actual.pop("dh0") is None
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())


def test_v_first_states_and_strided_tensors_give_the_same_bits():
    inputs = make_inputs((2, 100), 2, 4, 16, 8, "mild", torch.float32)

    def restrided(x):
        wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    views = {n: restrided(getattr(inputs, n)) for n in ("q", "k", "v")}
    state = inputs.initial_state.mT.contiguous().mT
    strided = replace(inputs, **views, initial_state=state, dht=inputs.dht.mT.contiguous().mT)
    actual, expected = chunked_reference(strided), chunked_reference(inputs)
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())


@pytest.mark.parametrize("missing", ["dq", "dk", "dv", "dbeta", "dg"])
def test_gradients_nobody_needs_are_skipped(missing):
    inputs = make_inputs([100], 1, 2, 8, 8, "mild", torch.float32)
    q, k, v, beta, g, do = inputs.q, inputs.k, inputs.v, inputs.beta, inputs.g, inputs.do
    g_cumsum, T_inv = stages.solve(k, g, beta, inputs.seqs)
    S = stages.forward_states(k, v, T_inv, g_cumsum, beta, None, inputs.seqs)
    dS = stages.reverse_states(q, k, T_inv, g_cumsum, beta, do, None, 1.0, None, inputs.seqs)

    def run(**dest):
        rest = (q, k, v, T_inv, g_cumsum, beta, do, 1.0, S, dS, inputs.seqs)
        stages.gradients(*(dest.get(n) for n in ("dq", "dk", "dv", "dbeta", "dg")), *rest)
        return dest

    shapes = {"dq": q, "dk": k, "dv": v, "dbeta": beta, "dg": g}
    everything = run(**{n: torch.empty_like(x) for n, x in shapes.items()})
    for names in ([missing], [n for n in shapes if n != missing]):
        some = run(**{n: torch.empty_like(shapes[n]) for n in names})
        assert all(torch.equal(some[n], everything[n]) for n in names)


def test_blocks_and_groups_do_not_change_results(monkeypatch):
    """Guards the bounded memory: blocks of one chunk and groups of one sequence against all at once."""
    inputs = make_inputs([130, 0, 64, 200], 2, 4, 8, 8, "mild", torch.float64)
    expected = chunked_reference(inputs)
    monkeypatch.setattr(stages, "BLOCK_ELEMENTS", 1)
    actual = chunked_reference(inputs)
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=1e-13)


def test_autocast_and_grad_mode_do_not_reach_the_stages():
    inputs = make_inputs([100], 1, 2, 16, 16, "mild", torch.float32)
    expected = chunked_reference(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual = chunked_reference(inputs.differentiable())
    for name, x in actual.items():
        assert not x.requires_grad
        assert torch.equal(x, expected[name]), name


def test_recurrence_returns_a_copy_of_the_state():
    inputs = make_inputs([0], 1, 1, 4, 4, "mild", torch.float64)
    _, state = stages.recurrence(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, 1.0, inputs.initial_state, inputs.seqs
    )
    assert torch.equal(state, inputs.initial_state)
    assert state.data_ptr() != inputs.initial_state.data_ptr()


class _Work(TorchDispatchMode):
    """Counts PyTorch calls and the elements that they write."""

    def __init__(self):
        super().__init__()
        self.calls, self.elements = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        written = result if isinstance(result, (tuple, list)) else [result]
        self.calls += 1
        if function is torch.ops.aten.index_put_.default:
            self.elements += args[2].numel()
        elif not function.is_view:
            self.elements += sum(x.numel() for x in written if isinstance(x, torch.Tensor))
        return result


def _work(inputs, gradients=True) -> tuple[int, int, int]:
    """Returns calls, elements written and floating-point operations of products."""
    with FlopCounterMode(display=False) as flops, _Work() as work:
        chunked_reference(inputs, gradients=gradients)
    return work.calls, work.elements, flops.get_total_flops()


# Now 151 and 401 calls, 6,322 and 26,031 elements, 147,456 and 679,936 operations; another PyTorch may call more.
WORK_LIMITS = {"forward": (190, 7_500, 150_000), "both": (500, 31_000, 700_000)}


@pytest.mark.parametrize("passes", WORK_LIMITS)
def test_work(passes):
    """Guards the PyTorch implementation's speed by what does not depend on the machine: calls for a chunk, elements
    and operations for a token and head. A pass too many, a walk token by token or heads repeated too early show.
    """
    calls, elements, products = _work(make_inputs((1, 1024), 2, 4, dtype=torch.float32), passes == "both")
    limits = WORK_LIMITS[passes]
    assert calls / 16 < limits[0]
    assert elements / (1024 * 4) < limits[1]
    assert products / (1024 * 4) < limits[2]


def test_work_grows_with_the_tokens():
    """Guards against anything quadratic: twice the tokens, at most twice the work."""
    once, twice = (_work(make_inputs((1, num_tokens), 1, 2, 16, 16, dtype=torch.float32)) for num_tokens in (512, 1024))
    assert all(b <= 2 * a for a, b in zip(once, twice, strict=True)), (once, twice)

"""Splitting a sequence into segments equals not splitting it, or differs by no more than the stated bound."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qla.ops.gated_delta_rule.chunk import reference
from flash_qla.ops.gated_delta_rule.chunk.cp import segments as cp
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
from flash_qla.ops.gated_delta_rule.chunk.split import Split
from flash_qla.testing.compare import block_errors, chunked_reference
from flash_qla.testing.workloads import GATE_PROFILES, make_inputs

C = 64


def run_split(inputs, segment_chunks, tolerance=-math.inf, reuse=True):
    """`chunked_reference` with every sequence split; the same names."""
    q, k, v, g, beta, h0 = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state
    seqs, do, dht, scale, split = inputs.seqs, inputs.do, inputs.dht, inputs.scale, as_split(segment_chunks, tolerance)
    g_cumsum, T_inv = cp.solve(k, g, beta, seqs)
    o, ht = torch.empty_like(v), torch.empty_like(dht)
    args = (k, v, T_inv, g_cumsum, beta, h0, seqs, split)
    entering = cp.entering_states(*args, for_backward=reuse)
    cp.fused_forward(o, ht, None, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs, entering)
    if not reuse:
        entering = cp.entering_states(*args, for_backward=True)
    names = {"dq": q, "dk": k, "dv": v, "dbeta": beta, "dg": g, "dh0": h0}
    dest = {name: None if x is None else torch.empty_like(x) for name, x in names.items()}
    leaving = cp.leaving_cotangents(q, k, T_inv, g_cumsum, beta, do, dht, scale, seqs, split, entering)
    args = (q, k, v, T_inv, g_cumsum, beta, do, scale)
    S, dS = cp.backward_states(*args, h0, dht, dest["dh0"], seqs, entering, leaving)
    cp.gradients(*list(dest.values())[:-1], *args, S, dS, seqs)
    return {"o": o, "ht": ht, **dest}


def as_split(segment_chunks, tolerance):
    return Split(segment_chunks, tolerance, num_segments=1)


def assert_same(actual, expected, limit=1e-10):
    for name, x in expected.items():
        if x is None:
            assert actual[name] is None
        elif x.numel():
            error = (actual[name] - x).abs().max().item()
            assert error <= limit * max(1.0, x.abs().max().item()), f"{name}: {error:.2e}"


def exact_states(inputs):
    """The state entering each chunk, unsplit, `[chunks, Hv, K, V]`."""
    k, v, seqs = inputs.k, inputs.v, inputs.seqs
    g_cumsum, T_inv = reference.solve(k, inputs.g, inputs.beta, seqs)
    h = v.new_empty(seqs.total_chunks(), v.shape[2], k.shape[-1], v.shape[-1])
    reference.fused_forward(None, None, h, None, k, v, T_inv, g_cumsum, inputs.beta, 1.0, inputs.initial_state, seqs)
    return h, g_cumsum, T_inv


@st.composite
def splits(draw):
    """Lengths and, for each sequence, any cut into segments of whole chunks."""
    lengths = draw(st.lists(st.integers(0, 5 * C), min_size=1, max_size=2))
    parts = []
    for length in lengths:
        count = -(-length // C)
        cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
        edges = [0, *cuts, count] if count else []
        parts.append([b - a for a, b in zip(edges[:-1], edges[1:], strict=True)])
    return lengths, parts


@settings(max_examples=15)
@given(
    problem=splits(),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    profile=st.sampled_from(list(GATE_PROFILES)),
    key_scale=st.sampled_from([0.5, 1.0, 1.6]),
    with_state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_split_equals_no_split(problem, heads, profile, key_scale, with_state, seed):
    lengths, parts = problem
    inputs = make_inputs(lengths, *heads, 5, 4, profile, torch.float64, with_state=with_state, seed=seed, tail_tokens=3)
    inputs = replace(inputs, k=key_scale * inputs.k)
    assert_same(run_split(inputs, parts), chunked_reference(inputs))


@pytest.mark.parametrize("reuse", [True, False], ids=["cached", "recomputed"])
def test_dense_batch_splits(reuse):
    inputs = make_inputs((2, 300), 1, 2, 8, 6, "mixed", torch.float64)
    assert_same(run_split(inputs, 2, reuse=reuse), chunked_reference(inputs))


def test_empty_inputs():
    for lengths in ([0, 0], (2, 0), (0, 130)):
        inputs = make_inputs(lengths, 1, 2, 4, 4, "mild", torch.float64)
        assert_same(run_split(inputs, 2), chunked_reference(inputs))


def test_states_of_chunks_are_the_unsplit_ones():
    """h is numbered by the original sequences' chunks, split or not."""
    inputs = make_inputs([200, 0, 130], 1, 2, 8, 6, "mild", torch.float64)
    expected, g_cumsum, T_inv = exact_states(inputs)
    h = torch.empty_like(expected)
    k, v, beta, h0, seqs = inputs.k, inputs.v, inputs.beta, inputs.initial_state, inputs.seqs
    entering = cp.entering_states(k, v, T_inv, g_cumsum, beta, h0, seqs, as_split(1, -math.inf))
    cp.fused_forward(None, None, h, None, k, v, T_inv, g_cumsum, beta, 1.0, h0, seqs, entering)
    torch.testing.assert_close(h, expected, rtol=0, atol=1e-12)


def test_split_tables():
    seqs = Sequences.build(1, 450, C, torch.tensor([0, 300, 300, 430]))
    segments = cp.cut(seqs, 2)
    assert segments.inner.bounds() == [(0, 128), (128, 256), (256, 300), (300, 300), (300, 428), (428, 430)]
    assert segments.owner == [0, 0, 0, 1, 2, 2]
    assert (segments.first, segments.last) == ([0, 3, 4], [2, 3, 5])
    assert segments.chunk_ranges() == [(0, 2), (2, 4), (4, 5), (5, 5), (5, 7), (7, 8)]
    assert segments.inner.total_chunks() == seqs.total_chunks()
    same = cp.cut(seqs, [[2, 2, 1], [], [2, 1]])
    assert same.inner.bounds() == segments.inner.bounds()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (0, "segment_chunks=0"),
        ([[5]], "1 lists for 2 sequences"),
        ([[4], [1]], r"segment_chunks\[0\].*5 chunks"),
        ([[5, 0], [1]], r"segment_chunks\[0\]"),
        ([[5], [2, -1]], r"segment_chunks\[1\]"),
    ],
    ids=["zero", "count", "sum", "zero-part", "negative-part"],
)
def test_split_refuses(parts, words):
    seqs = Sequences.build(1, 310, C, torch.tensor([0, 300, 310]))
    with pytest.raises(ValueError, match=words):
        cp.cut(seqs, parts)


@pytest.mark.parametrize("key_scale", [1.0, 1.5, 3.0], ids=lambda x: f"key{x}")
@pytest.mark.parametrize("profile", ["none", "mild", "mixed", "extreme"])
def test_bound_holds_for_every_transition(profile, key_scale):
    inputs = make_inputs([130, 64, 7], 2, 4, 6, 4, profile, torch.float64)
    inputs = replace(inputs, k=key_scale * inputs.k)
    seqs = inputs.seqs
    g_cumsum, T_inv = reference.solve(inputs.k, inputs.g, inputs.beta, seqs)
    bound = cp.decay_bound(inputs.k, g_cumsum, inputs.beta, seqs)
    segments = cp.cut(seqs, 2)
    everywhere = torch.ones(segments.num_segments, 4, dtype=torch.bool)
    M = cp.transition(inputs.k, T_inv, g_cumsum, inputs.beta, segments, everywhere)
    for j, (start, end) in enumerate(segments.chunk_ranges()):
        log_norm = torch.linalg.matrix_norm(M[j], 2).log()
        assert (log_norm <= bound[start:end].sum(0) + 1e-9).all()


def test_bound_is_attained():
    """One token, key along one axis: exp(g) |1 - beta |k|^2| exactly, or exp(g) where the key shrinks the state."""
    k = torch.tensor([[2.0, 0.0], [1.0, 0.0]], dtype=torch.float64).view(1, 2, 1, 2)
    beta = torch.ones(1, 2, 1, dtype=torch.float64)
    g = torch.tensor([-0.5, -0.25], dtype=torch.float64).view(1, 2, 1)
    seqs = Sequences.build(1, 2, C, torch.tensor([0, 1, 2]))
    bound = cp.decay_bound(k, g, beta, seqs)
    torch.testing.assert_close(bound.flatten(), torch.tensor([math.log(3) - 0.5, -0.25], dtype=torch.float64))


def test_normalised_keys_add_no_growth():
    """beta up to 2 with normalised keys: the bound is the gate alone."""
    inputs = make_inputs([130], 2, 4, 16, 4, "mild", torch.float64)
    beta = 2 * torch.rand(inputs.beta.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g_cumsum = reference.cumsum(inputs.g, inputs.seqs)
    bound = cp.decay_bound(inputs.k, g_cumsum, beta, inputs.seqs)
    torch.testing.assert_close(bound, g_cumsum[0, [63, 127, 129]], rtol=0, atol=1e-12)


def test_warmup_is_the_shortest_run_that_reaches_the_bound():
    seqs = Sequences.build(1, 4 * C, C, torch.tensor([0, 4 * C]))
    bound = torch.tensor([[-1.0, -5.0, 0.0], [-1.0, 3.0, 0.0], [-1.0, -4.0, 0.0], [-1.0, -1.0, -2.0]])
    segments = cp.cut(seqs, 4)
    warmup, needs = cp.warmup_chunks(bound, segments, -3.0)
    assert (warmup.tolist(), needs.tolist()) == ([[3, 2, 4]], [[False, False, True]])
    warmup, needs = cp.warmup_chunks(bound, segments, -3.0, reverse=True)
    assert (warmup.tolist(), needs.tolist()) == ([[3, 1, 4]], [[False, False, True]])
    warmup, needs = cp.warmup_chunks(bound, segments, -math.inf)
    assert warmup.tolist() == [[4, 4, 4]]
    assert needs.all()
    assert cp.warmup_chunks(bound * torch.nan, segments, -3.0)[1].all()


def carried_bound(inputs, segments, tolerance, states, bound):
    """The bound on each entering state's error: exp(tolerance) |S| where cut off, else carried by the transition."""
    warmup, needs = cp.warmup_chunks(bound, segments, tolerance)
    limits = torch.zeros(segments.num_segments, bound.shape[1], dtype=torch.float64)
    for n in range(inputs.seqs.num_seqs):
        for j in range(segments.first[n], segments.last[n]):
            start, end = segments.chunk_ranges()[j]
            for head in range(bound.shape[1]):
                if needs[j, head]:
                    limits[j + 1, head] = limits[j, head] * bound[start:end, head].sum().exp()
                else:
                    norm = torch.linalg.matrix_norm(states[end - warmup[j, head], head], 2)
                    limits[j + 1, head] = math.exp(tolerance) * norm
    return limits


@settings(max_examples=10)
@given(
    problem=splits(),
    profile=st.sampled_from(["mild", "mixed", "strong"]),
    tolerance=st.floats(-12, -1),
    key_scale=st.sampled_from([1.0, 1.6]),
    seed=st.integers(0, 1000),
)
def test_cut_off_error_is_within_the_bound(problem, profile, tolerance, key_scale, seed):
    lengths, parts = problem
    inputs = make_inputs(lengths, 1, 4, 5, 4, profile, torch.float64, seed=seed)
    inputs = replace(inputs, k=key_scale * inputs.k, g=inputs.g - 0.02)
    segments = cp.cut(inputs.seqs, parts)
    states, g_cumsum, T_inv = exact_states(inputs)
    bound = cp.decay_bound(inputs.k, g_cumsum, inputs.beta, inputs.seqs)
    args = (inputs.k, inputs.v, T_inv, g_cumsum, inputs.beta, inputs.initial_state, inputs.seqs)
    entering = cp.entering_states(*args, as_split(parts, tolerance)).states
    limits = carried_bound(inputs, segments, tolerance, states, bound)
    for j, (start, end) in enumerate(segments.chunk_ranges()):
        if start == end:
            continue
        error = torch.linalg.matrix_norm(entering[j] - states[start], 2)
        rounding = 1e-11 * (1 + states.abs().max())
        assert (error <= limits[j] + rounding).all()


def reflecting(rate=0.03, num_chunks=12):
    """beta = 2 with normalised keys reflects: only the gate changes norms, so the bound is attained."""
    inputs = make_inputs([num_chunks * C], 1, 1, 8, 8, "none", torch.float64)
    return replace(inputs, g=torch.full_like(inputs.g, -rate), beta=torch.full_like(inputs.beta, 2.0))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
def test_cut_off_loosened_tenfold_breaks_the_bound(reverse):
    """Guards the cut-off being the bound, and tight: 1.92 a chunk and -9.6 need five chunks, no fewer."""
    tolerance = -5 * C * 0.03 + 1e-9
    inputs = reflecting()
    q, k, v, beta, do, dht, scale, seqs = (
        getattr(inputs, n) for n in ("q", "k", "v", "beta", "do", "dht", "scale", "seqs")
    )
    g_cumsum, T_inv = reference.solve(k, inputs.g, beta, seqs)
    if reverse:
        states = reference.reverse_states(q, k, T_inv, g_cumsum, beta, do, dht, scale, None, seqs)[:12]
    else:
        states = reference.forward_states(k, v, T_inv, g_cumsum, beta, inputs.initial_state, seqs)[:12]

    def error(limit):
        """Of what segment 0 hands to segment 1, or of the cotangent that segment 1 hands to segment 0."""
        split = as_split(6, limit)
        args = (k, v, T_inv, g_cumsum, beta, inputs.initial_state, seqs, split)
        entering = cp.entering_states(*args, for_backward=reverse)
        if reverse:
            args = (q, k, T_inv, g_cumsum, beta, do, dht, scale, seqs, split, entering)
            return torch.linalg.matrix_norm(cp.leaving_cotangents(*args).states[0] - states[5], 2).item()
        return torch.linalg.matrix_norm(entering.states[1] - states[6], 2).item()

    allowed = math.exp(tolerance) * torch.linalg.matrix_norm(states, 2).max().item()
    assert error(-math.inf) < 1e-12
    assert error(tolerance - 2e-9) < 0.5 * allowed
    assert 0.5 * allowed < error(tolerance) <= allowed * (1 + 1e-6)
    assert error(tolerance + math.log(10)) > 2 * allowed


def test_mixed_heads_walk_only_what_they_need(monkeypatch):
    """A head without decay needs its transition; the others a warm-up, and no more chunks are walked than that."""
    inputs = make_inputs([16 * C], 1, 4, 8, 8, "mixed", torch.float64)
    segments = cp.cut(inputs.seqs, 8)
    g_cumsum, T_inv = reference.solve(inputs.k, inputs.g, inputs.beta, inputs.seqs)
    bound = cp.decay_bound(inputs.k, g_cumsum, inputs.beta, inputs.seqs)
    warmup, needs = cp.warmup_chunks(bound, segments, -9.0)
    assert needs.tolist() == [[True, False, False, False]] * 2
    assert warmup[0, 0] == 8
    assert 2 <= warmup[0, 1] < 8
    assert warmup[0, 2:].tolist() == [1, 1]

    walked = []
    run = reference.fused_forward

    def counting(*args, **kwargs):
        walked.append(sum(args[-1].num_chunks()) * args[5].shape[2])
        return run(*args, **kwargs)

    monkeypatch.setattr(reference, "fused_forward", counting)
    args = (inputs.k, inputs.v, T_inv, g_cumsum, inputs.beta, inputs.initial_state, inputs.seqs)
    cp.entering_states(*args, as_split(8, -9.0))
    # The last segment's end state is nobody's business; the first head is walked for b and for M.
    assert sum(walked) == warmup[0].sum() + 8


def outlier(position, factor=1000.0):
    """A value `factor` times the others, written where no later key overwrites it; its mirror image in do.

    Head 0 fades by 2 a chunk, head 1 not at all, head 2 at once. Only the gate takes the outlier away.
    """
    inputs = make_inputs([16 * C], 1, 3, 16, 16, "none", torch.float64, with_state=False)
    mirror = 16 * C - 1 - position
    q, k, v, g, do = (getattr(inputs, name).clone() for name in ("q", "k", "v", "g", "do"))
    k[..., -1] = 0
    k = torch.nn.functional.normalize(k, dim=-1)
    axis = torch.eye(16, dtype=torch.float64)[-1]
    k[:, position], q[:, mirror] = axis, axis
    v[:, position] *= factor
    do[:, mirror] *= factor
    g[..., 0], g[..., 2] = -2.0 / C - 1e-9, -10.0
    return replace(inputs, q=q, k=k, v=v, g=g, do=do)


def worst_block(inputs, segment_chunks, tolerance):
    expected, actual = chunked_reference(inputs), run_split(inputs, segment_chunks, tolerance)
    return {name: block_errors(actual[name], expected[name]).max().item() for name in ("o", "dq", "dk", "dv", "dg")}


# With segments of eight chunks and a cut-off at -14, head 0's warm-up is chunks 1 to 7 of segment 0.
EDGES = {"before_warmup": C - 1, "in_warmup": 2 * C - 1, "last_before": 8 * C - 1, "first_after": 8 * C}


@pytest.mark.parametrize("position", EDGES.values(), ids=EDGES)
def test_huge_value_near_an_edge(position):
    """Every 64-row block agrees to a quarter of bf16's rounding, wherever a value 1000 times the others is."""
    inputs = outlier(position)
    assert max(worst_block(inputs, 8, -14.0).values()) < 1e-3
    assert_same(run_split(inputs, 8), chunked_reference(inputs))


def test_huge_value_shows_a_cut_off_loosened_tenfold():
    """The same measure fails at -14 + log 10, with the outlier just before the shorter warm-up."""
    errors = worst_block(outlier(2 * C - 1), 8, -14.0 + math.log(10))
    assert max(errors.values()) > 1e-3, errors


def test_nan_stays_in_its_sequence():
    clean = make_inputs([130, 70, 200], 1, 2, 8, 8, "mild", torch.float64)
    v = clean.v.clone()
    v[:, 130:200] = torch.nan
    actual, expected = run_split(replace(clean, v=v), 1, -9.0), run_split(clean, 1, -9.0)
    for name in ("o", "dq", "dk", "dv", "dbeta", "dg"):
        for rows in (slice(0, 130), slice(200, 400)):
            assert torch.equal(actual[name][:, rows], expected[name][:, rows]), name


def test_single_precision_stays_close():
    inputs = make_inputs([8 * C], 2, 4, 32, 32, "mixed", torch.float32)
    actual, expected = run_split(inputs, 2, -16.0), chunked_reference(inputs)
    for name in ("o", "dq", "dk", "dv", "dbeta", "dg"):
        assert block_errors(actual[name], expected[name]).max() < 1e-4, name

"""The planner: its cost model is the one it documents, and a plan is a function of plain values, quickly found."""

import itertools
import sys
import warnings
from heapq import heapreplace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qla import arch
from flash_qla.ops.gated_delta_rule.chunk.cp import build_cp_context, coefs, context, cost, planner
from flash_qla.ops.gated_delta_rule.chunk.problem import Problem
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
from flash_qla.ops.gated_delta_rule.chunk.split import Split

H200 = (arch.SM90, 132)
TABLE = coefs.load(arch.SM90)
C = 64


def offsets(lengths, dtype=torch.int64):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def key(lengths):
    return offsets(lengths).numpy().tobytes(), 8


def plan(passes, lengths, heads, *, tolerance=-12.0, dims=(128, 128), **options):
    of_lengths = lengths if isinstance(lengths, tuple) else key(lengths)
    return planner.plan_lengths(passes, of_lengths, heads, dims, *H200, tolerance, **options)


def shape_of(lengths, heads, decays=None, tolerance=-12.0):
    warmups = planner.head_warmups(heads, tolerance, decays)
    return planner.Shape.of(planner.key_runs(key(lengths)), heads, (128, 128), 132, warmups)


# --- the cost model


runs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=6)


@given(runs=runs, num_sms=st.integers(1, 17))
def test_depth_is_that_of_the_list_schedule(runs, num_sms):
    """Against the definition: each CTA in turn to the multiprocessor with the least to do."""
    loads = [0] * num_sms
    for chunks, count in runs:
        for _ in range(count):
            heapreplace(loads, loads[0] + chunks)
    assert cost.schedule_depth(tuple(runs), num_sms) == max(loads)


def test_time_is_linear_in_depth_and_ctas():
    table = coefs.Table("sm90", 132, {"walk": coefs.Coefficients(0.5, 0.001, 0.25)})
    ms = cost.launch_ms(cost.Launch("walk", ((3, 133),), 140), table, 132)
    assert ms == pytest.approx(0.5 * 6 + 0.001 * 140 + 0.25)


lengths = st.lists(st.integers(0, 20000), min_size=1, max_size=5)
heads = st.sampled_from([1, 2, 4, 6, 8, 12, 16, 32, 48, 64])
passes = st.sampled_from(["fwd", "bwd"])


def assert_cheapest(passes, lengths, heads, decays=None, **options):
    """The plan is the cheapest of all that are priced; no split wins where a split promises little."""
    automatic = planner.Request(True, decays=decays)
    chosen = plan(passes, lengths, heads, request=automatic, **options)
    totals = {}
    for segment_chunks in planner.candidates(shape_of(lengths, heads, decays)):
        request = automatic._replace(segment_chunks=segment_chunks)
        totals[segment_chunks] = plan(passes, lengths, heads, request=request, **options).total_ms
    whole = plan(passes, lengths, heads, request=planner.NO_SPLIT._replace(decays=decays), **options)
    assert whole.segment_chunks is None
    least_gain = (1 - planner.MIN_GAIN) * whole.total_ms
    if chosen.segment_chunks is None:
        assert chosen.total_ms == whole.total_ms
        assert min(totals.values(), default=1e9) >= least_gain
    else:
        assert chosen.total_ms == min(totals.values()) == totals[chosen.segment_chunks] < least_gain
    assert chosen.reason and "\n" not in str(chosen)
    return chosen


@settings(max_examples=60)
@given(passes=passes, lengths=lengths, heads=heads, tolerance=st.sampled_from([-4.0, -12.0, -40.0]))
def test_plan_is_the_cheapest_candidate(passes, lengths, heads, tolerance):
    chosen = assert_cheapest(passes, lengths, heads, tolerance=tolerance)
    assert chosen == plan(passes, lengths, heads, tolerance=tolerance)


@pytest.mark.parametrize("decays", [None, 0.0, 52.0], ids=["assumed", "never", "fast"])
def test_a_card_that_is_said_to_be_full_is_full(decays):
    """Guards the short cut: candidates that are not priced would not have won."""
    full = 0
    for count, longest, heads in itertools.product((3, 8, 17, 40), (200, 3000, 20000), (16, 48, 64)):
        for lengths in ([longest] * count, [longest] * (count // 2) + [longest // 3] * (count // 2)):
            told = None if decays is None else (decays,) * heads
            full += "fill" in assert_cheapest("fwd", lengths, heads, told).reason
    assert full >= 10


@settings(max_examples=40)
@given(lengths=lengths, segment_chunks=st.integers(1, 40))
def test_segments_of_a_shape_are_those_of_the_sequences(lengths, segment_chunks):
    counts = [-(-length // C) for length in lengths]
    expected = sorted(
        (min(segment_chunks, count - start) for count in counts for start in range(0, count, segment_chunks)),
        reverse=True,
    )
    found, count = shape_of(lengths, 4).segments(segment_chunks)
    assert count == len(expected)
    assert [chunks for chunks, count in found for _ in range(count)] == expected
    forced = plan("fwd", lengths, 4, request=planner.Request(segment_chunks=segment_chunks))
    assert (forced.segment_chunks, forced.num_segments) == (segment_chunks, len(expected))


@given(lengths=lengths, wanted=st.integers(1, 200))
def test_balanced_segments_are_the_shortest_that_fit(lengths, wanted):
    shape = shape_of(lengths, 1)

    def count(segment_chunks):
        return shape.segments(segment_chunks)[1]

    if shape.num_seqs <= wanted:
        found = planner.shortest_for(shape, wanted)
        assert count(found) <= wanted
        assert found == 1 or count(found - 1) > wanted


def test_many_lengths_are_grouped():
    """By size, so that the longest stay long; sequences and chunks are kept, the chunks up to rounding."""
    chunks = [each % 97 * (each % 7 > 0) for each in range(1, 60)]
    runs = planner.length_runs(chunks)
    assert len(runs) <= planner.MAX_RUNS
    kept = sorted((each for each in chunks if each), reverse=True)
    assert sum(count for _, count in runs) == len(kept)
    assert 0 <= sum(each * count for each, count in runs) - sum(kept) < len(kept)
    start = 0
    for each, count in runs:
        assert kept[start] >= each >= kept[start + count - 1]
        start += count


def test_every_kernel_that_is_priced_has_coefficients():
    names = set()
    for count, length, heads in itertools.product((1, 4, 8), (256, 8192, 131072), (2, 8, 64)):
        shape = shape_of([length] * count, heads)
        for segment_chunks in (None, 4, 64):
            names |= {planner.common_launch(each, shape).kernel for each in ("fwd", "bwd")}
            names |= {each.kernel for each in planner.forward_launches(shape, segment_chunks)}
            names |= {each.kernel for each in planner.backward_launches(shape, segment_chunks, None)}
    assert names <= set(TABLE.kernels)
    assert len(names) >= 8


def test_few_heads_and_long_sequences_split_and_a_full_card_does_not():
    """The reason for all of it: 2/8 heads at 32768 give 16 CTAs for 132 multiprocessors."""
    for each in ("fwd", "bwd"):
        assert plan(each, [32768], 8).segment_chunks
        assert plan(each, [8192] * 8, 64).segment_chunks is None
        assert plan(each, [100], 8).segment_chunks is None
        assert plan(each, [0, 0], 8).segment_chunks is None


def test_passes_are_priced_by_their_own_kernels():
    forward, backward = ({kernel for kernel, _ in plan(each, [32768], 8).predicted_ms} for each in ("fwd", "bwd"))
    assert {name.split("_w")[0] for name in forward} == {"solve", "fused_fwd", "segment_ends", "segment_scan"}
    assert {name.split("_w")[0] for name in backward} == {
        *("gradients", "states", "segment_ends", "segment_ends_reverse", "segment_scan")
    }


def test_width_of_the_ends_depends_on_the_direction():
    """128 pairs in segments of 32 chunks: the forward walk has transitions, so its narrow CTAs would not all fit."""
    for segment_chunks, widths in ((32, (2, 1)), (256, (1, 1)), (8, (2, 2))):
        shape = shape_of([32768], 8)
        forward = list(planner.forward_launches(shape, segment_chunks))[1].kernel
        reverse = list(planner.backward_launches(shape, segment_chunks, segment_chunks))[1].kernel
        assert (forward, reverse) == (f"segment_ends_w{widths[0]}", f"segment_ends_reverse_w{widths[1]}")


def test_forward_results_at_hand_make_the_backward_cheaper():
    alone = plan("bwd", [32768], 8)
    cached = plan("bwd", [32768], 8, cached=alone.segment_chunks)
    assert cached.total_ms < alone.total_ms
    assert "segment_ends_w2" not in {kernel for kernel, _ in cached.predicted_ms}


# --- what is known about the gates


def test_heads_that_decay_cost_less():
    """All fast, as assumed, none decaying: the price of the same split rises."""
    request = planner.Request(True, segment_chunks=32)
    fast, slow = (100.0,) * 8, (0.0,) * 8
    prices = [plan("fwd", [32768], 8, request=request._replace(decays=d)).total_ms for d in (fast, None, slow)]
    assert prices[0] < prices[1] < prices[2]
    for heads in (8, 6):  # as the published comparison's gates: rounded down
        quarter = (0.0,) * (heads // 4) + (planner.ASSUMED_DECAY_PER_CHUNK,) * (heads - heads // 4)
        told, untold = (plan("fwd", [32768], heads, request=request._replace(decays=d)) for d in (quarter, None))
        assert told.total_ms == untold.total_ms


def test_long_walks_of_the_ends_start_first():
    """In the order of the launch: those that carry, then the longest warm-ups."""
    shape = shape_of([32768], 8, (1.0, 100.0, 0.0, 3.2, 1.0, 0.2, 0.0, 6.0))
    forward, reverse = list(planner.forward_launches(shape, 32))[1], list(planner.backward_launches(shape, 32, None))[1]
    assert (forward.kernel, reverse.kernel) == ("segment_ends_w2", "segment_ends_reverse_w1")
    for ends, carrying, short in ((forward, 2, 1), (reverse, 2, 2)):  # tiles: V and K, V; of half the width V, V
        # 15 segments hand something on. Three heads carry (a warm-up of 60 chunks is longer than the segment), one
        # of each other decay, but two of the second.
        expected = ((32, 3 * carrying), (12, 2 * short), (4, short), (2, short), (1, short))
        assert ends.runs == tuple((planner.ENDS_START_CHUNKS + chunks, 15 * n) for chunks, n in expected)


@pytest.mark.parametrize(
    ("decay", "tolerance", "warmup"),
    [(3.2, -12.0, 4), (12.0, -12.0, 1), (11.9, -12.0, 2), (100.0, -12.0, 1), (0.0, -12.0, None)],
)
def test_warmup_from_a_decay(decay, tolerance, warmup):
    assert planner.head_warmups(1, tolerance, (decay,)) == ((warmup, 1),)


def test_a_stricter_tolerance_is_dearer():
    request = planner.Request(True, segment_chunks=32)
    prices = [plan("fwd", [32768], 8, tolerance=t, request=request).total_ms for t in (-3.0, -12.0, -60.0, -1e9)]
    assert prices == sorted(prices)
    assert prices[0] < prices[-1]


def test_context_measures_decays():
    g = torch.zeros(1, 3 * C + 5, 4)
    g[..., 1], g[..., 2], g[..., 3] = -0.05, -torch.inf, -1e4
    g[:, 3 * C :] = torch.nan  # rows of no sequence
    built = build_cp_context(offsets([2 * C, C]), g=g, num_v_heads=4)
    assert built.decays == (0.0, 3.2, 6400.0, 6400.0)
    assert context.split_request(True, False, built).decays == built.decays
    assert build_cp_context(g=torch.zeros(2, 7, 3)).decays == (0.0,) * 3
    assert build_cp_context(g=torch.zeros(1, 0, 3)).decays == (0.0,) * 3
    for bad in (g[0], [1.0]):
        with pytest.raises(ValueError, match=r"g must .*\[B, T, Hv\]"):
            build_cp_context(g=bad)
    with pytest.raises(ValueError, match="Hv = 8"):
        build_cp_context(g=g, num_v_heads=8)


# --- from a call to its plan


def problem_of(seqs, heads=8, device="cpu"):
    """A call's Problem, said to be on another device."""
    meta = {"device": "meta"}
    rows = (seqs.batch, seqs.num_tokens)
    q, v = torch.empty(*rows, 2, 128, **meta).bfloat16(), torch.empty(*rows, heads, 128, **meta).bfloat16()
    g = torch.empty(*rows, heads, **meta)
    found, _ = Problem.check(q, q, v, g, g)
    object.__setattr__(found, "device", torch.device(device))
    return found


@pytest.fixture
def on_h200(monkeypatch):
    """A CUDA device that nobody has: everything that plans must be host code."""
    monkeypatch.setattr(arch, "of_device", lambda device: arch.SM90)
    monkeypatch.setattr(arch, "num_sms", lambda device: 132)
    planner._split_on_device.cache_clear()
    planner._printed.clear()

    def decide(seqs, request=planner.AUTO, *, passes="fwd", heads=8, cached=None):
        return planner.split_of_call(passes, problem_of(seqs, heads, "cuda:0"), seqs, request, on_kernels=True)

    yield decide
    planner._split_on_device.cache_clear()


def packed(lengths, *, on_host, dtype=torch.int64):
    cu = offsets(lengths, dtype)
    return Sequences.build(1, sum(lengths), C, torch.empty_like(cu, device="meta"), cu if on_host else None)


def test_lengths_on_the_host_are_planned_exactly(on_h200):
    for dtype in (torch.int32, torch.int64):
        split = on_h200(packed([28672, 0, 4096], on_host=True, dtype=dtype))
        exact = plan("fwd", [28672, 0, 4096], 8)
        assert split == Split(exact.segment_chunks, -12.0, exact.num_segments)
    dense = on_h200(Sequences.build(2, 16384, C))
    assert dense == plan("fwd", [16384] * 2, 8).split(-12.0)


def test_lengths_on_the_device_are_taken_as_equal(on_h200):
    """Nobody reads the device: meta tensors cannot be read at all."""
    split = on_h200(packed([28672, 4096], on_host=False))
    assert split == plan("fwd", (2, 16384), 8).split(-12.0)


def test_offsets_changed_in_place_change_the_plan(on_h200):
    seqs = packed([32768, 0], on_host=True)
    before = on_h200(seqs)
    seqs.cu_seqlens_cpu.copy_(offsets([16384, 16384]))
    assert before == plan("fwd", [32768], 8).split(-12.0)
    assert on_h200(seqs) == plan("fwd", [16384, 16384], 8).split(-12.0)


def test_environment_is_part_of_the_plan(on_h200, monkeypatch):
    seqs = Sequences.build(1, 32768, C)
    assert on_h200(seqs).tolerance == -12.0
    monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", "-20")
    assert on_h200(seqs).tolerance == -20.0
    monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", "1")
    with pytest.raises(ValueError, match="FLASH_QLA_CP_TOLERANCE"):
        on_h200(seqs)


def test_requests(on_h200):
    seqs, short = Sequences.build(1, 32768, C), Sequences.build(8, 8192, C)
    request = context.split_request
    assert on_h200(seqs, request(False, False, None)) is None
    assert on_h200(short, request(True, False, None), heads=64) is None
    assert on_h200(short, request(False, True, None), heads=64).segment_chunks < 128
    assert on_h200(seqs, request(False, False, build_cp_context(enable_intra=True))) is not None
    assert on_h200(seqs, request(False, False, build_cp_context(force_intra_cp=True))) is not None
    chosen = context.FlashQLACPContext(segment_chunks=7)
    assert on_h200(seqs, request(False, False, chosen)).segment_chunks == 7

    class Fla:  # Megatron hands in FLA's context, which has none of our fields
        group, cu_seqlens = None, None

    assert on_h200(seqs, request(True, False, Fla())) == on_h200(seqs)
    # T / N may hide one long sequence: forced means split all the same.
    many = packed([1] * 99 + [6400], on_host=False)
    assert on_h200(many, request(True, True, None)) is not None


def test_new_plans_are_printed_once(on_h200, monkeypatch, capsys):
    seqs = Sequences.build(1, 32768, C)
    on_h200(seqs)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FLASH_QLA_PRINT_PLAN", "1")
    for _ in range(3):
        on_h200(seqs)
        on_h200(seqs, passes="bwd")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for line, words in zip(lines, (("fwd", "fused_fwd"), ("bwd", "states"))):
        assert all(word in line for word in (*words, "1 x 32768 tokens", "8 value heads", "sm90", "132", "predicted"))


@pytest.fixture
def plans(on_h200):
    """Functions that plan one call."""

    def make(passes="fwd", on_host=True, new=True):
        seqs = packed([32768, 8192, 100], on_host=on_host)
        problem = problem_of(seqs, 8, "cuda:0")

        def plan_it():
            if new:
                planner._split_on_device.cache_clear()
                planner.plan_lengths.cache_clear()
            return planner.split_of_call(passes, problem, seqs, planner.AUTO, on_kernels=True)

        assert plan_it() is not None
        return plan_it

    return make


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 600), ({"on_host": False}, 500), ({"passes": "bwd"}, 800), ({"new": False}, 20)],
    ids=["new", "lengths unknown", "new backward", "repeated"],
)
def test_work_of_a_plan(plans, options, most):
    """The work that keeps a plan's time under 300 us, 20 us repeated: calls, of functions in Python and in C.

    Twice the launches priced fail. On a core at 3 GHz the limits are 170, 140, 230 and 6 us.
    """
    plan_it, calls, before = plans(**options), [], sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls.append(event) if event in ("call", "c_call") else None)
    try:
        plan_it()
    finally:
        sys.setprofile(before)
    assert most / 2 < len(calls) < most, "so few calls that twice as many would not fail: lower the limit"


# --- files of coefficients


def test_files_are_checked(tmp_path):
    good = "# a comment\nkernel,a,b,c,P,chunk,arch\nsolve,0.1,0,0.2,132,64,sm90\n"
    path = tmp_path / "sm90.csv"
    path.write_text(good)
    assert coefs.read(path).kernels["solve"] == (0.1, 0.0, 0.2)
    for text, words in (
        ("kernel,a\nsolve,1\n", "columns"),
        ("kernel,a,b,c,P,chunk,arch\n", "there must be a row"),
        (good + "scan,0.1,0,0.2,148,64,sm100\n", "one arch"),
        (good.replace("0.2", "-0.2"), "negative"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            coefs.read(path)


def test_an_unmeasured_arch_borrows_and_says_so_once():
    coefs.load.cache_clear()
    unmeasured = arch.ARCHS[10, 0]
    assert coefs.find(unmeasured.name) is None
    with pytest.warns(RuntimeWarning, match="no coefs/sm100.csv.*borrows sm90"):
        table = coefs.load(unmeasured)
    assert table.arch == "sm90"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert coefs.load(unmeasured) is table


def test_siblings(tmp_path):
    for name in ("sm80", "sm90"):
        (tmp_path / f"{name}.csv").write_text("")
    found = {name: coefs.sibling(arch.ARCHS[capability], [tmp_path]).name for name, capability in
             {"ada": (8, 9), "rtx": (12, 0), "blackwell": (10, 0)}.items()}  # fmt: skip
    assert found == {"ada": "sm80", "rtx": "sm80", "blackwell": "sm90"}
    assert coefs.sibling(arch.SM90, [tmp_path / "none"]) is None


def test_without_any_file_nothing_is_split(monkeypatch):
    monkeypatch.setattr(coefs, "load", lambda _: None)
    planner.plan_lengths.cache_clear()
    found = plan("fwd", [32768], 8)
    planner.plan_lengths.cache_clear()
    assert (found.segment_chunks, found.predicted_ms) == (None, ())
    assert "no coefficients" in found.reason


def test_predicted_ms(monkeypatch):
    assert planner.predicted_ms("fwd", [32768], 8, "cpu") is None
    monkeypatch.setattr(arch, "of_device", lambda device: arch.SM90)
    monkeypatch.setattr(arch, "num_sms", lambda device: 132)
    times = {each: planner.predicted_ms(each, [32768], 8, torch.device("cuda")) for each in ("fwd", "bwd", "fwdbwd")}
    assert times["fwd"] == plan("fwd", [32768], 8).total_ms
    cached = plan("fwd", [32768], 8).segment_chunks
    assert times["bwd"] == plan("bwd", [32768], 8, cached=cached).total_ms < plan("bwd", [32768], 8).total_ms
    assert times["fwdbwd"] == times["fwd"] + times["bwd"]
    assert planner.predicted_ms("fwd", (1, 32768), 8, "cuda") == times["fwd"]
    monkeypatch.setattr(arch, "of_device", lambda device: arch.ARCHS[8, 9])
    assert planner.predicted_ms("fwd", [32768], 8, "cuda") is None

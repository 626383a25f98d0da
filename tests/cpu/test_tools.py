"""The planner's tools as far as they go without a GPU: rows, the recording of launches, fit, tables."""

import csv
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_qla
from flash_qla import arch
from flash_qla.ops.gated_delta_rule.chunk.cp import coefs, cost, planner
from flash_qla.ops.gated_delta_rule.chunk.kernels import build
from flash_qla.testing.workloads import Workload

ROOT = Path(__file__).resolve().parents[2]


def _load(name):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = spec_from_file_location(name, ROOT / f"tools/{name}.py")
        module = module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def measure():
    return _load("measure_kernels")


@pytest.fixture(scope="module")
def fit():
    return _load("fit_coefs")


@pytest.fixture(scope="module")
def validate(measure):
    return _load("validate_planner")


# --- measuring


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_rows_measure_every_kernel_of_the_planner(measure, quick):
    """Both variants of every walk must turn up, or the fit lacks a row."""
    names = set()
    for row in measure.rows(quick):
        counts = [-(-length // 64) for length in row.workload.lengths]
        warmups = planner.head_warmups(row.workload.num_v_heads, -12.0, None)
        shape = planner.Shape.of(planner.length_runs(counts), row.workload.num_v_heads, (128, 128), 132, warmups)
        for passes in ("fwd", "bwd"):
            expected = measure.planned(passes, shape, row.segment_chunks)
            names |= {launch.kernel for launch in expected.values()}
            assert set(expected) == {kernel for kernel in expected if kernel in _KINDS[passes]}
    assert names == set(coefs.read(ROOT / "coefs/sm90.csv").kernels)
    assert len({row.id for row in measure.rows(quick)}) == len(measure.rows(quick))


_KINDS = {
    "fwd": {"solve", "fused_fwd", "segment_ends", "segment_scan"},
    "bwd": {"gradients", "states", "segment_ends", "segment_scan"},
}


def test_recorder_sees_launches_and_leaves_no_trace(measure, monkeypatch):
    @dataclass(frozen=True)
    class Spec:
        value_warpgroups: int = 2

    calls = []

    def make(spec): ...

    make.__module__ = "somewhere.kernels.fused_fwd"
    key = (make, Spec(), "sm90")
    monkeypatch.setattr(build, "_kernels", {key: lambda *args: calls.append(args)})

    def call():
        for arguments in ((1, 2), (3,)):
            build.build(make, Spec(), arch.SM90)(*arguments)

    launches = measure.record(call)
    assert [(each[0], each[2]) for each in launches] == [(key, (1, 2)), (key, (3,))]
    assert calls == [(1, 2), (3,)] * 2
    assert measure.kind(key) == "fused_fwd"
    call()
    assert len(launches) == 2, "it went on recording"


def test_kinds_are_the_kernels_modules(measure):
    for module, name, kind in (
        *((name, "make", name) for name in ("solve", "states", "gradients")),
        ("ends", "make", "segment_ends"),
        ("ends", "make_reverse", "segment_ends"),
        ("segments", "make_scan", "segment_scan"),
    ):
        key = (SimpleNamespace(__module__=f"a.{module}", __name__=name), None, "sm90")
        assert measure.kind(key) == kind


# --- fitting


@settings(max_examples=50)
@given(
    true=st.tuples(*(st.sampled_from([0.0, 0.1, 1.0, 5.0]) for _ in range(3))).filter(any),
    seed=st.integers(0, 100),
)
def test_exact_data_give_their_coefficients(true, seed):
    fit = _load("fit_coefs")
    generator = np.random.default_rng(seed)
    depth, ctas = generator.integers(1, 500, 20).astype(float), generator.integers(1, 3000, 20).astype(float)
    ms = true[0] * depth + true[1] * ctas + true[2]
    found = fit.fit("walk", depth, ctas, ms)
    np.testing.assert_allclose((found.a_ms, found.b_ms, found.c_ms), true, rtol=1e-6, atol=1e-7)
    assert np.abs(found.errors).max() < 1e-6


def test_coefficients_are_never_negative(fit):
    """Times that fall with the number of CTAs: its coefficient is 0, and the others fit what is left."""
    depth, ctas = np.array([1.0, 2, 3, 4, 5]), np.array([50.0, 40, 30, 20, 10])
    found = fit.fit("walk", depth, ctas, 2 * depth - 0.01 * ctas + 1)
    assert min(found.a_ms, found.b_ms, found.c_ms) >= 0
    assert np.abs(found.errors).max() < 0.2
    with pytest.raises(ValueError, match="3 launches"):
        fit.fit("walk", depth[:3], ctas[:3], depth[:3])


def launches(path, arch="sm90", kernels=("solve", "fused_fwd_w2")):
    lines = [f"# arch: {arch}", "# P: 132", "# chunk: 64", "# gpu: a card", "kernel,depth,ctas,ms"]
    for kernel in kernels:
        lines += [f"{kernel},{n},{3 * n + n % 2},{0.002 * n + 0.004}" for n in range(1, 9)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_fit_writes_what_the_planner_reads(fit, tmp_path, capsys):
    measured, out, picture = launches(tmp_path / "m.csv"), tmp_path / "sm90.csv", tmp_path / "fit.png"
    out.write_text("kernel,a,b,c,P,chunk,arch\nsolve,9,9,9,132,64,sm90\ngradients,1,0,2,132,64,sm90\n")
    assert fit.main([str(measured), "--out", str(out), "--plot", str(picture), "--dry-run"]) == 0
    assert "gradients,1,0,2" in out.read_text()
    assert "# gpu" not in out.read_text()
    assert fit.main([str(measured), "--out", str(out), "--plot", str(picture)]) == 0
    table = coefs.read(out)
    assert table.kernels["fused_fwd_w2"] == pytest.approx((0.002, 0, 0.004), abs=1e-7)
    assert table.kernels["gradients"] == (1, 0, 2)
    text = out.read_text()
    assert all(words in text for words in ("# gpu: a card", "# relative errors", "kept: gradients"))
    assert picture.stat().st_size > 1000
    assert "fused_fwd_w2" in capsys.readouterr().out


def test_files_of_two_cards_are_refused(fit, tmp_path):
    files = [launches(tmp_path / "a.csv"), launches(tmp_path / "b.csv", arch="sm100")]
    with pytest.raises(SystemExit, match="another card"):
        fit.main([*map(str, files), "--dry-run"])


# --- comparing


def test_problems_are_new_to_the_fit(measure, validate):
    seen = {row.workload.id for row in measure.rows(False)} | {row.workload.id for row in measure.rows(True)}
    problems = validate.problems(quick=False)
    assert len(problems) >= 60
    assert not seen & {each.id for each in problems}
    assert all(validate.lengths_of(each.lengths_id) == each.lengths for each in problems)


def test_tables(validate, tmp_path):
    line = dict.fromkeys(validate.COLUMNS, "0.01") | {"passes": "fwd", "gates": "mild", "lengths": "3000x1"}
    lines = [line | {"regret": "0.02"}, line | {"regret": "0.09"}, line | {"gates": "none", "regret": "0.5"}]
    validate.write_markdown(tmp_path / "a.md", {"gpu": "a card"}, lines)
    text = (tmp_path / "a.md").read_text()
    assert "| fwd | mild | 2 | 5.5% | 9.0% | 1 | 1.0% | 1.0% | 0 |" in text
    assert "| fwd | none | 1 | 50.0% | 50.0% | 1 |" in text
    assert "gpu a card" in text


def test_a_forward_that_is_timed_reads_no_offsets_back(validate, monkeypatch):
    """A capture may not: the time would be one of events, with the host's share in it."""
    x = Workload([70, 58], 1, 2, 16, 16).make(dtype=torch.float32)
    call = validate.make_call("fwd", x, None, None)

    def read(self):
        raise AssertionError("cu_seqlens was read in the timed call")

    monkeypatch.setattr(type(x), "seqs", property(read))
    o, state = call()
    assert o.shape == x.v.shape and state.shape == (2, 2, 16, 16)


def test_the_committed_planner_is_near_the_best_measured_candidate(validate):
    """Today's planner and coefficients on the H200's recorded times; a change that chooses worse shows here."""
    meta, lines = validate.replan(ROOT / "benchmark/results/planner_H200.csv")
    assert "H200" in meta["gpu"]
    for passes in ("fwd", "bwd"):
        regrets = [float(x["regret"]) for x in lines if (x["passes"], x["gates"]) == (passes, "mild")]
        assert len(regrets) >= 60
        assert max(regrets) <= validate.LIMIT
    assert {x["gates"] for x in lines} == {"mild", "fast", "none"}
    assert max(float(x["informed_regret"]) for x in lines) <= validate.LIMIT


def test_launches_are_priced_as_wide_as_they_were_measured(validate):
    """A recorded time is of the launches of its day; today's rules are back afterwards."""
    workload, card = validate.problems(quick=True)[0], (arch.SM90, 132)

    def priced(widths, forward=None):
        """By segment length what the planner priced, two backwards."""
        found, shape = {}, validate.shape_of(workload, card)
        with validate.as_measured(widths, forward):
            for n in (None, 4, 8):
                launches = [*planner.forward_launches(shape, n), *planner.backward_launches(shape, n, 4)]
                found[n] = [each.kernel for each in launches]
        return found

    today = priced({})
    other = priced({None: (2,), 8: (2, 1)})
    assert other[None] == ["fused_fwd_w2", "states_w2"] != today[None]
    assert other[4] == today[4]
    assert {kernel for kernel in other[8] if "ends" in kernel} == {"segment_ends_w1", "segment_ends_reverse_w1"}
    assert priced({}) == today
    # A backward that was handed the results of a forward split alike did not compute them again.
    assert [len(each) for each in today.values()] == [2, 6, 8]
    assert [len(each) for each in priced({}, "alike").values()] == [2, 6, 6]
    # As a tuple of the walk's and the ends', a backward's reverse ones first.
    mixed, shape = {8: (1, 2, 1)}, validate.shape_of(workload, card)
    with validate.as_measured(mixed, None):
        kernels = [each.kernel for each in planner.backward_launches(shape, 8, None)]
        assert kernels[:2] == ["states_w1", "segment_ends_reverse_w2"] and kernels[3] == "segment_ends_w1"
        assert validate.widths_planned("bwd", shape, 8, None) == mixed[8]
        assert validate.widths_planned("bwd", shape, 8, 8) == mixed[8][:2]


def test_widths_that_ran(validate, monkeypatch):
    """Read off the launches of one call, in the planner's order."""

    def key(module, name, width):
        return SimpleNamespace(__module__=f"a.{module}", __name__=name), SimpleNamespace(value_warpgroups=width), "sm90"

    keys = [key("ends", "make", 2), key("segments", "make_scan", 0), key("ends", "make_reverse", 1)]
    keys += [key("states", "make", 2), key("gradients", "make", 0)]
    monkeypatch.setattr(build, "record_launches", lambda: nullcontext([(each, None, ()) for each in keys]))
    assert validate.widths_that_ran(lambda: None) == (2, 1, 2)


def test_measured_calls_know_what_the_planner_knows(measure, monkeypatch):
    """Lengths on the host, and a backward gets the results of the forward that was asked for."""
    seen = []
    x = Workload([200, 130], 1, 2).make()
    real = {name: getattr(flash_qla, f"chunk_gated_delta_rule_{name}") for name in ("fwd", "bwd")}
    for name in real:
        monkeypatch.setattr(
            flash_qla, f"chunk_gated_delta_rule_{name}",
            lambda *args, name=name, **options: seen.append((name, options)) or real[name](*args, **options),
        )  # fmt: skip
    for forward, handed in (("alike", 2), (None, None), (3, 3), (2, 2)):
        seen.clear()
        measure.calls(x, 2, forward)["bwd"]()
        assert [name for name, _ in seen] == ["fwd", "bwd"]
        assert all(options["cu_seqlens_cpu"].tolist() == [0, 200, 330] for _, options in seen)
        cache = seen[1][1]["cp_cache"]
        assert (cache and cache.split.segment_chunks) == handed


def test_coefficients_were_fitted_to_todays_launches(validate, measure):
    """Guards what a coefficient multiplies: each launch of the sweep has the depth and CTAs that it was fitted with."""
    meta, rows = validate.fit_coefs.read([ROOT / "profile/kernels_sm90.csv"])
    card = arch.SM90, int(meta["P"])
    assert len(rows) > 500
    for row in rows:
        workload = Workload(validate.lengths_of(row["lengths"]), int(row["num_k_heads"]), int(row["num_v_heads"]))
        segment_chunks, kind = int(row["segment_chunks"]) or None, re.sub(r"(_reverse)?(_w\d)?$", "", row["kernel"])
        width = int(row["kernel"][-1]) if row["kernel"][-2] == "w" else 2
        with validate.as_measured({segment_chunks: (width, width)}, measure.ALIKE):
            shape = validate.shape_of(workload, card, validate.decays_of(row["gate_profile"], workload.num_v_heads))
            launch = measure.planned(row["passes"], shape, segment_chunks)[kind]
        found = launch.kernel, cost.schedule_depth(launch.runs, card[1]), launch.ctas
        assert found == (row["kernel"], int(row["depth"]), int(row["ctas"])), row


def test_committed_coefficients_say_where_they_come_from():
    text = (ROOT / "coefs/sm90.csv").read_text()
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    assert text.startswith("#")
    assert {row["arch"] for row in rows} == {"sm90"}
    assert "H200" in text.split("kernel,", 1)[0]


# --- sanitizer


@pytest.fixture(scope="module")
def sanitizer():
    return _load("sanitize")


def test_every_lane_arrives(sanitizer):
    """Guards the counts: 32 a warp whoever arrives, or the rewritten kernels would hang."""
    source = """
        v_1[0].init(3); v_2[1].init(1);
        if ((((int)threadIdx.x) % 32) == 0) {
          v_1[(i % 3)].arrive();
        }
        if (((((int)threadIdx.x) % 32) == 0) && condition_1) {
          v_1[(i & 1)].arrive();
        }
        if (tl::tl_shuffle_elect<32>()) { v_2[0].expect_transaction(5); v_2[(i & 1)].arrive(); }
        v_2[0].arrive_and_expect_tx(77);
        if (tl::tl_shuffle_elect<32>()) {
          v_1[2].arrive();
          if (h == 0) {
            v_1[(h + 1)].arrive();
          }
        }
        extern "C" kernel
    """
    found = sanitizer.every_lane_arrives(source)
    for wanted in (
        "v_1[0].init(96); v_2[1].init(32);",
        "{ v_1[(i % 3)].arrive(); }",
        "{ if (condition_1) v_1[(i & 1)].arrive(); }",
        "expect_transaction(5); arrive_for<32>(reinterpret_cast<uint64_t*>(&v_2[(i & 1)])); }",
        "arrive_for<31>(reinterpret_cast<uint64_t*>(&v_2[0])); v_2[0].arrive_and_expect_tx(77);",
    ):
        assert wanted in found
    assert found.count(".arrive();") == 4 and "threadIdx.x) % 32" not in found
    assert found.count("shuffle_elect") == 1, "an elected lane that only arrives: all lanes do"
    assert found.index("void arrive_for(") < found.index('extern "C"')


def test_reports_of_a_sanitizer_log(sanitizer):
    """Guards the digest: equal reports counted, addresses and threads left out."""
    race = """========= Error: Race reported between Write access at kernel+0x{0} in tvm_kernels.cu:10
=========     and Read access at load(void *)+0x{1} in tvm_kernels.cu:5 [64 hazards]
=========
"""
    found = sanitizer.reports_of(race.format("a0", "b0") + "a case\n" + race.format("c0", "d0"))
    assert len(found) == 1 and found[0].startswith("2x Error: Race") and "0x" not in found[0]
    assert "tvm_kernels.cu:10; and Read access at load(void *) in tvm_kernels.cu:5" in found[0]

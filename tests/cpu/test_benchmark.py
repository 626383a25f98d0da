"""The benchmark, its report, the profile and the timers, on the CPU with stand-ins for the other libraries.

More than 600 lines: all of them share one expensive run of the benchmark.
"""

import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from flash_qla import arch
from flash_qla.testing import timing, workloads
from flash_qla.testing.floors import floors, num_chunks
from flash_qla.testing.workloads import Workload
from tests.case_inputs import HANG_S

ROOT = Path(__file__).resolve().parents[2]

# The rule token by token: what both stand-ins run. They must not use flash_qla: theirs is another package.
STAND_IN = """
import torch

def rule(q, k, v, g, beta, scale, initial_state, cu_seqlens):
    group, bounds = v.shape[2] // q.shape[2], cu_seqlens.tolist()
    q, k = (x[0].float().repeat_interleave(group, 1) for x in (q, k))
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
        S = initial_state[n].float()
        for t in range(start, end):
            S = S * g[0, t].exp()[:, None, None]
            W = beta[0, t][:, None] * (v[0, t].float() - torch.einsum("hk,hkv->hv", k[t], S))
            S = S + k[t][:, :, None] * W[:, None]
            outputs.append(scale * torch.einsum("hk,hkv->hv", q[t], S))
        states.append(S)
    return torch.stack(outputs)[None].to(v.dtype), torch.stack(states)
"""
FLA = """
from .rule import rule

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    return rule(q, k, v, g, beta, scale, initial_state, cu_seqlens)
"""
ORIGINAL = """
import torch
from .rule import rule

__version__ = "0.1.3"

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    return rule(q, k, v, g, beta, scale, initial_state, cu_seqlens)

def chunk_gated_delta_rule_fwd(q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None,
                               output_final_state=True, enable_fwd_cp_cache=False):
    o, ht = rule(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    return g, torch.zeros(1), o, None, ht, {"cache": enable_fwd_cp_cache}

def chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, do, dht=None, scale=None, initial_state=None, cu_seqlens=None,
                               cp_cache=None):
    assert cp_cache == {"cache": True}
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, beta, g, initial_state)]
    with torch.enable_grad():
        outputs = rule(leaves[0], leaves[1], leaves[2], leaves[4], leaves[3], scale, leaves[5], cu_seqlens)
    return torch.autograd.grad(outputs, leaves, [do, dht])
"""


def _package(folder, name, code, version=None):
    parts = name.split(".")
    for depth in range(1, len(parts)):
        path = folder.joinpath(*parts[:depth])
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").touch()
    path = folder.joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    (path / "rule.py").write_text(STAND_IN)
    (path / "__init__.py").write_text(code)


def _load(path):
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report():
    return _load(ROOT / "benchmark/make_report.py")


@pytest.fixture(scope="module")
def bench(report):
    return _load(ROOT / "benchmark/bench_gated_delta_rule.py")


def _run(*command, status=0, **environment):
    values = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PEER_FLA": "",
        "PEER_QLA": "",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=values, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == status, f"{command}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run of the whole benchmark on tiny rows, FLA and the original as stand-ins, FlashInfer absent."""
    folder = tmp_path_factory.mktemp("bench")
    _package(folder / "fla", "fla.ops.gated_delta_rule", FLA)
    _package(folder / "original", "flash_qla", ORIGINAL)
    out = folder / "out"
    text = _run(
        ROOT / "benchmark/bench_gated_delta_rule.py", "--set", "tiny", "--device", "cpu", "--repeats", "1",
        "--out", out, "--original", folder / "original", "--fla", folder / "fla", "--suffix", "test", "--commit", "abc",
        "--row-timeout", HANG_S,
    )  # fmt: skip
    return out, text


@pytest.mark.slow
def test_benchmark_runs_every_library_in_its_own_process(results, report):
    out, text = results
    meta, records = report.read_csv(out / "bench_test.csv")
    assert meta["commit"] == "abc" and meta["original 0.1.3 version"] == "0.1.3"
    assert meta["FlashInfer version"].startswith("absent: import flashinfer")
    by = {(r.passes, r.library): r for r in records}
    assert len(by) == 12
    parts = ("inputs", "first call", "reference", "comparison", "timing", "clearing")
    assert all(part in meta[f"seconds of {report.LABELS[name]}"] for part in parts for name in ("ours", "fla"))
    assert "seconds of FlashInfer" not in meta
    for passes in ("fwd", "bwd", "fwdbwd"):
        for library in ("ours", "original", "fla"):
            record = by[passes, library]
            assert (record.source, record.check) == ("measured", "ok"), record
            assert record.gpu_ms > 0 and record.eager_ms > 0 and record.checked_heads == "2/2"
        assert by[passes, "flashinfer"].source == "absent"
    rows = report.group_rows(records)
    assert all(row.speedup("fla") and row.speedup("original") and row.speedup_best for row in rows)
    text = " ".join(text.split())  # as one line: where it wraps depends on the versions' lengths
    for sentence in ("The run took", "FlashInfer: absent: import flashinfer", "FLA: measured on 3 rows"):
        assert sentence in text
    assert "Rows that lose" in text and (out / "bench_test.md").exists() and (out / "bench_test.txt").exists()


@pytest.mark.slow
def test_resume_measures_nothing_again(results, report):
    out, _ = results
    before = (out / "bench_test.csv").read_text()
    command = (
        ROOT / "benchmark/bench_gated_delta_rule.py", "--set", "tiny", "--device", "cpu", "--out", out, "--resume",
        "--baselines", "", "--suffix", "test", "--row-timeout", HANG_S, "--commit",
    )  # fmt: skip
    assert "start afresh" in _run(*command, "other", status=1)
    _run(*command, "abc")
    meta, records = report.read_csv(out / "bench_test.csv")
    assert meta["resumed"].startswith("3 rows")
    assert all(f"{record.row},{record.passes}" in before for record in records)


def test_resume_takes_complete_rows_only(bench, report, tmp_path):
    """A row that lacks a library which is there now is measured again as a whole."""
    records = _records(report)
    records[1].gpu_ms, records[1].source = None, "failed"
    meta = {"commit": "abc", "gpu": "NVIDIA H200", "date": "then"}
    report.write_csv(tmp_path / "x.csv", meta, bench.add_recorded(records, bench.RECORDED))

    class Present:
        absent = None

    class Missing:
        absent = "not here"

    workers = {"ours": Present, "original": Present, "flashinfer": Missing}
    now, options = dict(meta), bench.parse([])
    kept = bench.take_up(tmp_path / "x.csv", bench.published_rows(), workers, now, options)
    assert {r.row for r in kept} == {"fwd-2h8-32768x1-mild"} and {r.library for r in kept} == {"ours", "original"}
    assert now["resumed"] == "1 rows from the run of then"
    kept = bench.take_up(tmp_path / "x.csv", bench.published_rows(), {"ours": Present}, dict(meta), options)
    assert len({r.row for r in kept}) == 2
    with_fla = {"ours": Present, "fla": Present}
    for passes, complete in (("fwd", 0), ("bwd", 2)):
        options = bench.parse(["--fla-passes", passes])
        kept = bench.take_up(tmp_path / "x.csv", bench.published_rows(), with_fla, dict(meta), options)
        assert len({r.row for r in kept}) == complete, "these are forward rows without FLA"
    some = [row for row in bench.published_rows() if row.num_k_heads == 2]
    kept = bench.take_up(tmp_path / "x.csv", some, workers, dict(meta), bench.parse([]))
    assert {r.row for r in kept} == {r.row for r in records}, "rows that --rows leaves out must not be lost"
    assert not any(r.source in ("scaled", "recorded") for r in kept), "they are worked out anew"
    with pytest.raises(SystemExit, match="--commit"):
        unknown = {**meta, "commit": bench.UNKNOWN_COMMIT}
        bench.take_up(tmp_path / "x.csv", bench.published_rows(), workers, unknown, options)


def test_resume_joins_what_the_runs_say(bench, report, tmp_path):
    """A second run with other rows and libraries: versions, times and rows left out of the first stay."""
    first = {"commit": "abc", "gpu": "g", "date": "then", "rows": "set quick", "left out": "fwd-1 bwd-1"}
    first |= {"FLA version": "0.6", bench.SECONDS: "90", "FlashInfer version": "absent: import"}
    report.write_csv(tmp_path / "x.csv", first, _records(report))
    now = {"commit": "abc", "gpu": "g", "rows": "set full", "FLA version": "absent: not asked for", "driver": "1"}
    now["FlashInfer version"] = "0.7"
    workers = {"ours": type("Present", (), {"absent": None})}
    bench.take_up(tmp_path / "x.csv", bench.published_rows(), workers, now, bench.parse([]))
    assert now["FLA version"] == "0.6" and now["FlashInfer version"] == "0.7" and now["driver"] == "1"
    assert now["rows"] == "set quick; then set full" and now["left out"] == "fwd-1 bwd-1" and now[bench.SECONDS] == "90"
    text = report.what_ran({**now, bench.SECONDS: "90 + 20"}, _records(report))
    assert "The run took 90 + 20 s. Left out by a time limit: 2 rows: fwd-1 bwd-1." in text


def test_running_order_loses_what_matters_least(bench):
    """Guards what a time limit cuts off: not the backward of some heads, and never one pass of a group of three."""
    rows = bench.select_rows(bench.parse(["--quick"]))
    assert tuple(rows[:33]) == workloads.PEER_ROWS and {row.passes for row in rows[33:]} == {"fwdbwd"}
    groups = bench.in_running_order(rows)
    assert sorted(row.id for group in groups for row in group) == sorted(row.id for row in rows)
    passes = [[row.passes for row in group] for group in groups]
    assert passes == [["fwd", "bwd", "fwdbwd"]] * 12 + [["fwd"]] * 9
    assert all(len({(row.num_k_heads, row.num_v_heads, row.lengths_id) for row in group}) == 1 for group in groups)
    for start in range(0, 21, 3):
        heads = [(group[0].num_k_heads, group[0].num_v_heads) for group in groups[start : start + 3]]
        assert heads == [(16, 64), (16, 32), (2, 8)]
    published = {row.id for row in rows}
    order = [row.id in published for group in bench.in_running_order(workloads.benchmark_rows()) for row in group]
    assert order == sorted(order, reverse=True) and sum(order) == len(rows)


def test_time_limit_names_what_it_left_out(bench, report, tmp_path, monkeypatch):
    """The rows that are done stay; the rows of a group ask for one reference, and it goes with the group."""
    asked, clock = [], [0.0]

    class Worker:
        absent, seconds = None, {}

        def run(self, row, mode, reference, gradients):
            asked.append((row.id, reference.name, gradients))
            reference.write_text("{}")
            clock[0] += 1.0
            return {"error": "none here", "seconds": {"timing": 1.0}}

    monkeypatch.setattr(bench.time, "monotonic", lambda: bench.STARTED + clock[0])
    options, records = bench.parse(["--quick", "--time-limit", "3.5"]), []
    rows = bench.select_rows(options)
    worker = Worker()
    left = bench.measure(rows, {"ours": worker}, options, records, lambda: None, lambda rows: rows, tmp_path)
    first = ["fwd-16h64-32768x1-mild", "bwd-16h64-32768x1-mild", "fwdbwd-16h64-32768x1-mild", "fwd-16h32-32768x1-mild"]
    assert [row for row, _, _ in asked] == [record.row for record in records] == first
    assert len(left) == 41 and left[0] == "bwd-16h32-32768x1-mild" and not set(left) & set(first)
    assert {name for _, name, _ in asked} == {first[0], first[3]} and all(gradients for _, _, gradients in asked)
    assert [path.name for path in tmp_path.iterdir()] == [first[3]], "a group's reference must go with its group"
    assert worker.seconds == {"timing": 4.0}


def test_waking_leaves_fla_alone(bench):
    """FLA's first call tunes by timing, so nothing may run beside it."""
    called = []

    class Worker:
        absent = None

        def __init__(self, library):
            self.library = library

        def run(self, row, mode):
            assert mode == "warm"
            called.append((self.library, row.id))

    class Missing:
        absent = "not here"

    rows = bench.select_rows(bench.parse(["--quick", "--passes", "fwd"]))
    workers = {"ours": Worker("ours"), "original": Worker("original"), "fla": Worker("fla"), "flashinfer": Missing()}
    bench.wake(rows, workers)
    smallest = [f"fwd-{heads}-2048x1-mild" for heads in ("16h64", "16h32", "2h8")]
    assert sorted(called) == sorted((name, row) for name in ("ours", "original") for row in smallest)


def test_references_are_computed_once(tmp_path):
    """Two processes' stand-ins share one file; a backward that a forward's reference lacks is computed and kept."""
    worker = _load(ROOT / "benchmark/worker.py")
    first, second = (worker.References(torch.device("cpu")) for _ in range(2))
    computed = []

    def compute(gradients):
        computed.append(gradients)
        found = {"o": torch.arange(6, dtype=torch.float64).view(1, 3, 2) / 7, "ht": torch.zeros(0, 2)}
        return found | ({"dq": torch.full((2, 2), -1.5, dtype=torch.float64), "dh0": None} if gradients else {})

    path = tmp_path / "fwd-1h1-3x1.5-mild"
    assert first.get(str(path), compute, False).keys() == {"o", "ht"}
    mine, theirs = first.get(str(path), compute, True), second.get(str(path), compute, True)
    assert computed == [False, True] and theirs["dh0"] is None and theirs["ht"].shape == (0, 2)
    torch.testing.assert_close(theirs["o"].double(), mine["o"], rtol=1e-7, atol=0)
    assert torch.equal(theirs["dq"].double(), mine["dq"])
    second.get(str(tmp_path / "other"), compute, False)
    assert computed == [False, True, False]
    assert second.get(None, compute, True) is not None and computed[-1] is True


def test_original_has_a_cache_of_its_own(bench, tmp_path, monkeypatch):
    """Guards the original's kernels against being packed with ours, and a library that hangs against eating the run."""
    seen = {}

    class Process:
        stdout, stdin = iter(()), None

        def __init__(self, command, env, **kwargs):
            seen[command[command.index("--library") + 1]] = env.get("TILELANG_CACHE_DIR")

        def wait(self, timeout=None):
            pass

    monkeypatch.setattr(bench.subprocess, "Popen", Process)
    monkeypatch.setattr(bench.Worker, "stop", lambda self, kill=False: None)
    monkeypatch.setattr(bench, "START_TIMEOUT_S", 0.01)
    monkeypatch.setenv("TILELANG_CACHE_DIR", "shared")
    options = bench.parse(["--quick", "--original-cache", str(tmp_path), "--row-timeout", "0.01"])
    for library in ("ours", "original"):
        bench.Worker(library, options, tmp_path / "log")
    assert seen == {"ours": "shared", "original": str(tmp_path)}
    worker = bench.Worker("ours", options, tmp_path / "log")
    worker.timeouts = bench.MAX_TIMEOUTS
    assert worker.run(workloads.PEER_ROWS[0], "measure")["error"].startswith("not run")


@pytest.mark.slow
def test_wrong_peer_gets_no_speedup(tmp_path, report):
    """A library whose results are wrong is shown and marked, and nothing is claimed against it."""
    _package(tmp_path / "fla", "fla.ops.gated_delta_rule", FLA.replace("return rule(q", "return rule(1.2 * q"))
    _run(
        ROOT / "benchmark/bench_gated_delta_rule.py", "--set", "tiny", "--device", "cpu", "--repeats", "1",
        "--out", tmp_path, "--fla", tmp_path / "fla", "--baselines", "fla", "--passes", "fwd", "--suffix", "x",
        "--row-timeout", HANG_S,
    )  # fmt: skip
    (row,) = report.group_rows(report.read_csv(tmp_path / "bench_x.csv")[1])
    assert row.records["fla"].check == "failed" and row.records["fla"].gpu_ms > 0
    assert row.speedup("fla") is None and row.speedup_best is None
    assert "!" in report.plain(report.row_table([row]))


def test_worker_survives_a_row_that_fails():
    request = {"row": {"lengths": [3], "num_k_heads": 2, "num_v_heads": 3}, "seed": 0, "mode": "measure", "repeats": 1}
    good = {**request, "row": {"lengths": [3], "num_k_heads": 1, "num_v_heads": 1}}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmark/worker.py", "--library", "ours", "--device", "cpu"], text=True,
        input="\n".join(map(json.dumps, (request, good))) + "\n", capture_output=True, timeout=HANG_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ready, failed, measured = map(json.loads, done.stdout.splitlines())
    assert ready["ready"]["library"] == "ours"
    assert "error" in failed and "gpu" not in failed
    assert measured["check"]["passed"] and measured["gpu"]["method"] == "wall"


def test_missing_libraries_are_absent_with_a_reason(tmp_path):
    for library, reason in (
        ("original", "no folder given"),
        ("fla", "import fla"),
        ("flashinfer", "import flashinfer"),
    ):
        out = _run(ROOT / "benchmark/worker.py", "--library", library, "--device", "cpu")
        assert reason in json.loads(out)["absent"]
    out = _run(ROOT / "benchmark/worker.py", "--library", "original", "--path", tmp_path, "--device", "cpu")
    assert "no folder flash_qla" in json.loads(out)["absent"]


def _records(report):
    """Two published rows: one won, one lost; FlashInfer absent; the original measured."""
    won = report.Record("fwd-16h64-8192x4-mild", "fwd", 16, 64, "8192x4", 1, "ours", "measured", 0.5, 0.49, 0.52,
                        "graph", 0.6, 0.1, 100.0, 1, "ok", "o=1.0e-03", "64/64")  # fmt: skip
    lost = replace(won, row="fwd-2h8-32768x1-mild", h_qk=2, h_v=8, lengths="32768x1", gpu_ms=0.5)
    records = []
    for ours, original_ms in ((won, 1.2315 * 1.1), (lost, 0.3986 * 1.1)):
        records += [ours, replace(ours, library="original", gpu_ms=original_ms)]
        records.append(report.Record(ours.row, "fwd", ours.h_qk, ours.h_v, ours.lengths, 1, "flashinfer", "absent"))
    return records


def test_recorded_times_are_scaled_by_the_original(bench, report):
    records = bench.add_recorded(_records(report), bench.RECORDED)
    flashinfer = [record for record in records if record.library == "flashinfer"]
    assert [record.source for record in flashinfer] == ["scaled", "scaled"]
    assert flashinfer[0].gpu_ms == pytest.approx(0.7379 * 1.1) and flashinfer[1].gpu_ms == pytest.approx(0.2402 * 1.1)
    alone = bench.add_recorded([r for r in _records(report) if r.library != "original"], bench.RECORDED)
    recorded = [record for record in alone if record.library == "flashinfer"]
    assert [record.source for record in recorded] == ["recorded", "recorded"]
    assert recorded[0].gpu_ms == 0.7379
    # --baselines original: nobody asked for FlashInfer, and its times are there all the same, marked.
    unasked = bench.add_recorded([r for r in _records(report) if r.library != "flashinfer"], bench.RECORDED)
    assert [r for r in unasked if r.library == "flashinfer"] == flashinfer
    measured = [replace(r, source="measured", gpu_ms=9.0) if r.library == "flashinfer" else r for r in _records(report)]
    assert {r.gpu_ms for r in bench.add_recorded(measured, bench.RECORDED) if r.library == "flashinfer"} == {9.0}


def test_report_from_csv(bench, report, tmp_path):
    records = bench.add_recorded(_records(report), bench.RECORDED)
    meta = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "commit": "abc", "date": "today"}
    report.write_csv(tmp_path / "bench_H200.csv", meta, records)
    again_meta, again = report.read_csv(tmp_path / "bench_H200.csv")
    assert again_meta == meta and [r.row for r in again] == [r.row for r in records]
    rows = report.group_rows(again)
    assert rows[0].best_peer.library == "flashinfer" and rows[0].speedup_best == pytest.approx(
        0.7379 * 1.1 / 0.5, rel=1e-3
    )
    assert len(report.losing_rows(rows)) == 1 and "fwd-2h8-32768x1" in report.losing_rows(rows)[0]
    marked = [f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->" for name in ("speed", "accuracy")]
    (tmp_path / "README.md").write_text("\n".join(["before", *marked, "after", ""]))
    report.main(
        [str(tmp_path / "bench_H200.csv"), "--readme", str(tmp_path / "README.md"), "--text", str(tmp_path / "t.txt")]
    )
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n") and "old" not in readme
    assert "flash_qla: measured on 2 rows" in readme and "FLA: absent: not asked for" in readme
    assert "FlashInfer: recorded times on 2 rows" in readme and "[`bench_H200.md`](bench_H200.md)" in readme
    assert readme.count("<details>") == readme.count("</details>") == 2
    detail = report.detail_table(rows)
    assert len(detail) == 3 and all(len(line) == len(detail[0]) for line in detail)
    assert detail[1][detail[0].index("spread")] == "6.0% / 2.2%" and "/ FlashInfer" not in report.detail_legend(rows)
    assert report.detail_legend(rows).startswith("flash_qla / original 0.1.3. ")
    assert "![forward](fwd_H200.png)" in readme and "Rows that lose: fwd-2h8-32768x1-mild" in readme
    assert "| o | 2 | 5e-03 | 1.0e-03 | 1.0e-03 | fwd-16h64-8192x4-mild |" in readme
    assert (tmp_path / "fwd_H200.png").stat().st_size > 1000
    assert "1.62×" in (tmp_path / "t.txt").read_text()
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(SystemExit, match="markers"):
        report.write_readme(tmp_path / "README.md", speed="x")


def test_groups_and_means(report):
    rows = report.group_rows(_records(report))
    names = report.groups(rows)
    reachable = "forward, but for 2/8 on one or two long sequences"
    assert len(names["forward, published rows"]) == 2 and len(names[reachable]) == 1
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0) and report.geometric_mean([]) is None


def test_published_rows_are_those_of_the_recorded_file(bench):
    lines = [line for line in bench.RECORDED.read_text().splitlines() if not line.startswith("#")][1:]
    recorded = {tuple(line.split(",")[:4]) for line in lines}
    rows = [row for row in bench.published_rows() if row.passes != "fwdbwd"]
    assert {(row.passes, str(row.num_k_heads), str(row.num_v_heads), row.lengths_id) for row in rows} == recorded
    assert len(rows) == len(lines)


def test_full_set_has_all_heads_and_mixes():
    rows = workloads.benchmark_rows()
    assert len({row.id for row in rows}) == len(rows)
    heads = {(row.num_k_heads, row.num_v_heads) for row in rows}
    assert {(16 // s, v // s) for v in (16, 32, 48, 64) for s in (1, 2, 4, 8)} <= heads
    assert {"28672+4096", "128x64", "131072x1", "24mix32768"} <= {row.lengths_id for row in rows}


def test_checked_heads_hold_whole_groups_and_one_without_decay(monkeypatch):
    worker = _load(ROOT / "benchmark/worker.py")
    monkeypatch.setattr(worker, "CHECKED_HEAD_TOKENS", 2 * 2 * 10)
    monkeypatch.setattr(sys, "path", [*sys.path])
    one = worker.Bench("ours", None, "cpu")
    inputs = workloads.make_inputs([10], 4, 8, gate_profile="mild")
    v_heads, k_heads = one._checked_heads(inputs)
    assert 2 <= len(k_heads) <= 3 and v_heads.tolist() == [h for k in k_heads.tolist() for h in (2 * k, 2 * k + 1)]
    assert bool((inputs.g.index_select(2, v_heads) == 0).all(dim=1).any())


def test_floors_match_the_counts_of_the_design():
    row = Workload([32768], 16, 64)
    forward, backward = floors(row, "fwd"), floors(row, "bwd")
    assert num_chunks(row) == 512 and num_chunks(Workload([65, 0, 1], 1, 1)) == 3
    assert forward.flops == pytest.approx(0.30e12, rel=0.05) and backward.flops == pytest.approx(1.13e12, rel=0.05)
    assert forward.min_bytes == pytest.approx(1.37e9, rel=0.02)
    assert floors(row, "fwdbwd").flops == forward.flops + backward.flops
    with pytest.raises(ValueError, match="passes"):
        floors(row, "sideways")


def test_timers_on_the_cpu():
    calls = []
    result = timing.gpu_time([lambda: calls.append(0), lambda: calls.append(1)], "cpu", replays=4)
    assert result.method == "wall" and result.repeats == 4 and calls == [0, 0, 1, 0, 1]
    assert result.min_ms <= result.median_ms <= result.max_ms
    assert timing.host_time(lambda: None, "cpu", repeats=3).repeats == 3
    assert timing.peak_memory(lambda: None, "cpu") is None and timing.measure_ceilings("cpu") == {}
    assert timing.num_input_sets(1) == timing.MAX_SETS and timing.num_input_sets(2**40) == timing.MIN_SETS == 2
    made = timing.Timing.of([1.0, 3.0, 2.0], "graph")
    assert (made.median_ms, made.spread) == (2.0, 1.0)


def test_graph_timer_by_a_fake_gpu(monkeypatch):
    """The graph path, call for call, with the CUDA objects replaced; and the fall back when a capture fails."""
    clock, replays = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock[0]

        def elapsed_time(self, end):
            return end.at - self.at

    class Graph:
        def replay(self):
            clock[0] += 6.0
            replays.append(1)

        def reset(self):
            pass

    class Capture:
        def __init__(self, graph, stream):
            assert stream == "side"

        def __enter__(self):
            if broken:
                raise RuntimeError("operation not permitted when stream is capturing")

        def __exit__(self, *exception):
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for name, value in (("Event", Event), ("CUDAGraph", Graph), ("graph", Capture)):
        monkeypatch.setattr(torch.cuda, name, value)

    def call():
        clock[0] += 1.0

    broken = False
    result = timing.gpu_time([call] * 3, "cuda", replays=5)
    assert (result.median_ms, result.method, result.repeats) == (2.0, "graph", 5)
    assert len(replays) == 2 + 1 + 5
    broken = True
    result = timing.gpu_time([call] * 3, "cuda", replays=5)
    assert (result.median_ms, result.method) == (1.0, "events")
    with pytest.raises(RuntimeError, match="capturing"):
        timing.gpu_time([call] * 3, "cuda", must_capture=True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "default")
    with pytest.raises(ValueError, match="stream"):
        timing.gpu_time([call], "cuda")


@pytest.mark.slow
def test_profile_on_the_cpu(tmp_path):
    settings = tmp_path / "tiny.csv"
    settings.write_text("# a comment\nh_qk,h_v,lengths,gate_profile\n1,2,70+3,mild\n")
    command = (ROOT / "profile/profile_gdr.py", "--settings", settings, "--device", "cpu", "--repeats", "1")
    text = _run(*command, "--out", tmp_path / "out.csv")
    assert "aten::" in text and "70+3" in text
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[1].startswith("fwd,1/2,70+3,") and lines[2].startswith("bwd,")
    _run(*command, "--skip-bwd", "--out", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def profile():
    return _load(ROOT / "profile/profile_gdr.py")


def test_profile_settings_are_read(profile):
    for name in profile.SETS:
        settings = profile.read_settings(profile.SETTINGS / f"{name}.csv")
        assert settings and all(w.gate_profile in workloads.GATE_PROFILES for w in settings)
        assert len({w.id for w in settings}) == len(settings)
    assert profile.parse_lengths("random") == workloads.RANDOM_LENGTHS and profile.parse_lengths("8x2") == [8, 8]
    with pytest.raises(ValueError, match="lengths"):
        profile.parse_lengths("8x")


def test_profile_of_every_setting_with_a_fake_gpu(profile, monkeypatch, tmp_path, capsys):
    """Every line of every set, as on an H200, with the call and the clocks replaced: floors, plans, shares, the CSV."""
    monkeypatch.setattr(arch, "of_device", lambda device: arch.SM90)
    monkeypatch.setattr(arch, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a fake H200")
    for name in ("stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(Workload, "make", lambda self, device, seed: self)
    monkeypatch.setattr(profile, "make_call", lambda passes, x: lambda: None)
    monkeypatch.setattr(timing, "measure_ceilings", lambda device: {"tflops": 800.0, "bytes_per_s": 4e12})
    monkeypatch.setattr(timing, "gpu_time", lambda calls, device, replays: timing.Timing.of([1.0, 1.1], "graph"))
    monkeypatch.setattr(timing, "host_time", lambda call, device, repeats: timing.Timing.of([0.1], "wall"))
    kernels = [profile.KernelTime("walk", 1.0, 0.75), profile.KernelTime("solve", 2.0, 0.25)]
    monkeypatch.setattr(profile, "kernel_times", lambda call, device: kernels)
    out = tmp_path / "folder" / "out.csv"
    assert profile.main(["--set", *profile.SETS, "--out", str(out)]) == 0
    lines = list(csv.DictReader(out.read_text().splitlines()))
    settings = {w.id: w for name in profile.SETS for w in profile.read_settings(profile.SETTINGS / f"{name}.csv")}
    assert [line["pass"] for line in lines] == ["fwd", "bwd"] * len(settings)
    for line in lines:
        assert float(line["planned ms"]) > 0 and float(line["operations ms"]) > 0 and float(line["TB/s"]) > 0
        assert (line["launches"], line["host µs"], line["spread"]) == ("3", "100", "±4.8%")
        assert float(line["with T, S, dS ms"]) > float(line["bytes ms"])
    text = capsys.readouterr().out
    assert "a fake H200: 800 TFLOP/s, 4.00 TB/s" in text and "75%" in text
    assert profile.main(["--set", "varlen", "--rows", "2h8", "--skip-bwd", "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 1 + 3
    with pytest.raises(SystemExit, match="fwd-16h64-128x64-mild"):
        profile.main(["--set", "varlen", "--rows", "nothing"])


def test_profile_reads_device_times(profile, monkeypatch):
    """The device's own time per call, slowest first; what only ran on the host is left out."""

    class Event:
        def __init__(self, key, count, device_us):
            self.key, self.count, self.self_device_time_total = key, count, device_us

    class Profiler:
        def __init__(self, activities, acc_events):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def key_averages(self):
            return [Event("solve_kernel", 10, 500.0), Event("walk_kernel", 5, 4000.0), Event("launch", 15, 0.0)]

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    calls = []
    found = profile.kernel_times(lambda: calls.append(0), torch.device("cuda"))
    assert found == [profile.KernelTime("walk", 1.0, 0.8), profile.KernelTime("solve", 2.0, 0.1)]
    assert len(calls) == 1 + profile.PROFILED_CALLS


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_profile_tables(profile, rich, monkeypatch, capsys):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    profile.print_table("a [title] that is longer than the table", profile.KERNELS, [["walk", "1.0", "0.5", "100%"]])
    text = capsys.readouterr().out
    assert text.startswith("a [title] that is longer than the table\n") and "walk" in text and "100%" in text


def test_options_are_checked():
    text = _run(ROOT / "benchmark/bench_gated_delta_rule.py", "--quick", "--list", "--rows", "2h8", "--passes", "fwd")
    assert len(text.split()) == 7 and all(re.match(r"fwd-2h8-\d+x\d-mild$", name) for name in text.split())
    for wrong in (("--passes", "up"), ("--baselines", "nobody")):
        _run(ROOT / "benchmark/bench_gated_delta_rule.py", *wrong, status=2)
    _run(ROOT / "benchmark/bench_gated_delta_rule.py", "--rows", "nothing", status=1)


def test_tools_have_help():
    for tool in ("kernel_report.py", "diff_source.py"):
        assert textwrap.shorten(_run(ROOT / "tools" / tool, "--help"), 100)


def test_warm_up_calls_every_row_but_fla_once_per_pass(bench, monkeypatch, tmp_path):
    called = []

    class Silent:
        absent = None

        def __init__(self, library, options, log):
            self.library = library

        def run(self, row, mode):
            assert mode == "warm"
            called.append((self.library, row.id))
            return {}

        def stop(self):
            pass

    monkeypatch.setattr(bench, "Worker", Silent)
    options = bench.parse(["--quick", "--jobs", "2"])
    bench.warm(bench.select_rows(options), options, tmp_path, print)
    rows = len(bench.published_rows())
    by_library = {name: [row for library, row in called if library == name] for name in ("ours", "original", "fla")}
    assert len(by_library["ours"]) == len(by_library["original"]) == rows
    assert sorted(by_library["fla"])[:3] == [
        "bwd-16h32-8192x1-mild", "bwd-16h64-8192x1-mild", "bwd-2h8-8192x1-mild"
    ]  # fmt: skip
    assert len(by_library["fla"]) == 9
    called.clear()
    options = bench.parse(["--quick", "--jobs", "2", "--fla-passes", "fwd"])
    bench.warm(bench.select_rows(options), options, tmp_path, print)
    assert {row.split("-")[0] for library, row in called if library == "fla"} == {"fwd"}

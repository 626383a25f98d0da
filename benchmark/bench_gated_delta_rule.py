"""Benchmarks the chunked gated delta rule, forward and backward, against the published libraries on one GPU.

    python benchmark/bench_gated_delta_rule.py --quick                the published rows: ten minutes of GPU at most
    python benchmark/bench_gated_delta_rule.py --rows 'fwd-2h8'       rows whose id matches the expression
    python benchmark/bench_gated_delta_rule.py --list                 the ids

Each library runs in a process of its own (worker.py); a row is measured by all of them in turn before the next row, so
both sides of a speed-up share the minute and the machine. The check against float64 comes before the time. The CSV is
rewritten after every row, so a run that is cut short keeps what it has, and --resume goes on with it; the rows that
matter most come first. Results: CSV, Markdown and a plot per pass in --out; make_report.py makes the README's tables
from the CSV. See README.md here. A little over 600 lines: one command, its rows in order and their records.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]

import make_report  # noqa: E402

from flash_qla.testing import workloads  # noqa: E402
from flash_qla.testing.workloads import Workload  # noqa: E402

LIBRARIES = ("ours", "original", "fla", "flashinfer")
PASSES = ("fwd", "bwd", "fwdbwd")
RECORDED = ROOT / "benchmark/results/recorded_peers_H200.csv"
STARTED = time.monotonic()
# A library that twice gives no answer in time is left out of the rows that follow.
MAX_TIMEOUTS = 2
# Importing torch and a library takes ten seconds and more on a cold machine.
START_TIMEOUT_S = 90.0
UNKNOWN_COMMIT = "unknown"
SECONDS = "seconds in all"
# Rows above it are not run for warming up: several at once would not fit the GPU.
WARM_MAX_TOKENS = 32768
# Room that a shared reference may need: 2**19 head-tokens of o, dv and, per key head, dq and dk in float32, twice.
REFERENCE_BYTES = 4 * 2**30
TINY_ROWS = tuple(Workload([70, 3, 1], 1, 2, passes=passes) for passes in PASSES)


def published_rows() -> list[Workload]:
    """The published comparison's rows, and forward + backward on its backward rows."""
    both = [replace(row, passes="fwdbwd") for row in workloads.PEER_ROWS if row.passes == "bwd"]
    return [*workloads.PEER_ROWS, *both]


ROW_SETS = {"tiny": lambda: TINY_ROWS, "quick": published_rows, "full": workloads.benchmark_rows}


class Worker:
    """One library's process: sends rows, waits for answers, starts anew after a crash."""

    def __init__(self, library: str, options: argparse.Namespace, log: Path):
        self.library, self.options, self.log = library, options, log
        self.process, self.answers, self.timeouts = None, queue.Queue(), 0
        self.seconds: dict[str, float] = {}
        self.info = self._start()

    @property
    def absent(self) -> str | None:
        """Why the library cannot be measured, None when it can."""
        return self.info.get("absent")

    def _start(self) -> dict:
        command = [sys.executable, str(ROOT / "benchmark/worker.py"), "--library", self.library]
        command += ["--device", self.options.device]
        path = {"original": self.options.original, "fla": self.options.fla}.get(self.library)
        command += ["--path", path] if path else []
        environment = {**os.environ, "TILELANG_PRINT_ON_COMPILATION": "0"}
        if self.library == "original" and self.options.original_cache:
            environment["TILELANG_CACHE_DIR"] = self.options.original_cache
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        answer = self._next(max(START_TIMEOUT_S, self.options.row_timeout))
        return answer.get("ready", answer)

    def _read(self, process):
        for line in process.stdout:
            self.answers.put((process, json.loads(line)))
        self.answers.put((process, None))

    def _next(self, timeout_s: float) -> dict:
        """Returns the running process's next answer; a crash or a hang is an answer, and ends the process."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                process, answer = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.stop(kill=True)
                self.timeouts += 1
                return {"error": f"no answer within {timeout_s:.0f} s", "absent": "it did not start in time"}
            if process is not self.process:
                continue  # the end of one that was stopped before
            if answer is None:
                self.stop(kill=True)
                reason = f"its process ended: {self._last_words()}"
                return {"error": reason, "absent": reason}
            return answer

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:200] if lines else "no output"

    def run(self, row: Workload, mode: str, reference: Path | None = None, gradients: bool = False) -> dict:
        """Returns the worker's answer for a row; the arguments are those of its requests (see worker.py)."""
        if self.timeouts >= MAX_TIMEOUTS:
            return {"error": f"not run: {self.timeouts} rows before had no answer in time"}
        if self.process is None:
            started = self._start()
            if "absent" in started:
                return {"error": started["absent"]}
        request = {"row": _sizes(row), "seed": self.options.seed, "mode": mode, "repeats": self.options.repeats}
        request |= {"reference": None if reference is None else str(reference), "gradients": gradients}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            self.stop(kill=True)
            return {"error": f"its process ended: {self._last_words()}"}
        answer = self._next(self.options.row_timeout)
        if "error" in answer:
            answer.pop("absent", None)
            if "CUDA" in answer["error"] or "cuda" in answer["error"] or "Accelerator" in answer["error"]:
                self.stop(kill=True)  # a broken context answers nothing more
        return answer

    def stop(self, kill: bool = False):
        """Ends the process."""
        if self.process is None:
            return
        process, self.process = self.process, None
        try:
            process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(timeout=0 if kill else 20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _sizes(row: Workload) -> dict:
    """The row as worker.py takes it. A dense row's tuple would turn into a list, so there is none among the rows."""
    if isinstance(row.lengths, tuple):
        raise ValueError(f"{row.id}: dense rows cannot be sent; give packed lengths")
    return asdict(row)


def select_rows(options) -> list[Workload]:
    """Returns the rows of the chosen set that match --rows and --passes.

    Raises:
        SystemExit: none does.
    """
    wanted = options.passes.split(",")
    rows = [row for row in ROW_SETS[options.set]() if row.passes in wanted and re.search(options.rows, row.id)]
    if not rows:
        sys.exit(f"no row of the set {options.set!r} matches --rows {options.rows!r} and --passes {options.passes}")
    return rows


def warm(rows, options, folder: Path, progress) -> None:
    """Compiles what the libraries need, several processes at once, before anything is timed.

    Ours and the original choose kernels by size, so every row is called once. FLA's choice is made by timing, later and
    alone on the GPU; here the smallest row of each pass fills its compiler's disk cache with the candidates.
    """
    jobs: dict[tuple, list[Workload]] = {}
    for row in sorted(rows, key=lambda row: row.num_tokens):
        for library in (name for name in ("ours", "original", "fla") if name in options.libraries):
            if _not_asked(library, row, options):
                continue
            members = jobs.setdefault((library, row.passes, row.num_k_heads, row.num_v_heads), [])
            if row.num_tokens <= WARM_MAX_TOKENS and not (library == "fla" and members):
                members.append(row)

    def run(job):
        (library, *what), members = job
        worker = Worker(library, options, folder / "_".join(["warm", library, *map(str, what)]))
        if worker.absent is None:
            for row in members:
                answer = worker.run(row, "warm")
                if "error" in answer:
                    progress(f"warming up {library}, {row.id}: {answer['error']}")
        worker.stop()

    start = time.monotonic()
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        list(pool.map(run, jobs.items()))
    progress(f"warmed up in {time.monotonic() - start:.0f} s")


def in_running_order(rows) -> list[list[Workload]]:
    """Groups rows with the same inputs, which share a reference; what a run that is cut short may lose comes last.

    Published before others, groups with a backward before forwards alone, and the heads in turn within each, so that
    what is there of a cut run is of all heads.
    """
    published = {row.id for row in published_rows()}
    groups: dict[tuple, list[Workload]] = {}
    for row in rows:
        groups.setdefault(_inputs(row), []).append(row)
    turns: dict[tuple, int] = {}
    ranked = []
    for group in groups.values():
        kind = (group[0].id not in published, all(row.passes == "fwd" for row in group))
        turn = (kind, group[0].num_k_heads, group[0].num_v_heads)
        turns[turn] = turns.get(turn, 0) + 1
        ranked.append(((*kind, turns[turn]), group))
    return [group for _, group in sorted(ranked, key=lambda pair: pair[0])]


def _inputs(row: Workload) -> tuple:
    """What a row's inputs depend on: all but the pass."""
    return tuple({**asdict(row), "lengths": tuple(row.lengths), "passes": None}.values())


def reference_folder(folder: Path) -> Path | None:
    """Where one row's reference is kept for the other libraries: in memory where there is room; None: nowhere."""
    for place in (Path("/dev/shm"), folder):
        if place.is_dir() and os.access(place, os.W_OK) and shutil.disk_usage(place).free > 2 * REFERENCE_BYTES:
            return Path(tempfile.mkdtemp(prefix="flash_qla_reference_", dir=place))
    return None


def measure(rows, workers, options, records, save, progress_bar, references: Path | None) -> list[str]:
    """Measures each row with every worker; appends records as they come. Returns the rows that a limit left out.

    references: a folder for the shared references (see worker.py), or None.
    """
    groups = in_running_order(rows)
    with_backward = {row.id: any(each.passes != "fwd" for each in group) for group in groups for row in group}
    left_out = {row.id: row for group in groups for row in group}
    before = None
    try:
        for row in progress_bar([row for group in groups for row in group]):
            if options.time_limit and time.monotonic() - STARTED > options.time_limit:
                break
            if references is not None and _inputs(row) != before:
                for path in references.iterdir():
                    path.unlink()
                before, reference = _inputs(row), references / row.id
            new = []
            for library, worker in workers.items():
                absent = worker.absent or _not_asked(library, row, options)
                shared = {} if references is None else {"reference": reference, "gradients": with_backward[row.id]}
                answer = {"absent": absent} if absent else worker.run(row, "measure", **shared)
                new.append(to_record(row, library, answer))
                for part, seconds in answer.get("seconds", {}).items():
                    worker.seconds[part] = worker.seconds.get(part, 0.0) + seconds
            records += new
            del left_out[row.id]
            say(progress_bar, one_line(row, new))
            save()
    except KeyboardInterrupt:
        say(progress_bar, "interrupted: the report is of the rows that are done")
    return list(left_out)


def wake(rows, workers) -> None:
    """Calls the smallest row of each pass and pair of heads, all libraries at once, so that each loads what it needs.

    Not FLA: its first call tunes by timing, which wants the GPU for itself.
    """
    smallest: dict[tuple, Workload] = {}
    for row in sorted(rows, key=lambda row: row.num_tokens):
        smallest.setdefault((row.passes, row.num_k_heads, row.num_v_heads), row)

    def run(worker):
        for row in smallest.values():
            worker.run(row, "warm")

    awake = [worker for library, worker in workers.items() if worker.absent is None and library != "fla"]
    with ThreadPoolExecutor(len(awake)) as pool:
        list(pool.map(run, awake))


def _not_asked(library: str, row: Workload, options) -> str | None:
    """Why a library that is there is not measured on a row, None when it is."""
    if library == "fla" and row.passes not in options.fla_passes:
        return "not asked for (--fla-passes)"
    return None


def take_up(path: Path, rows, workers, meta, options) -> list[make_report.Record]:
    """Returns the records of an earlier run's CSV that need no new measurement: of rows complete, or not asked for.

    Complete: every library that is there now, and asked, has a measured time. A row is measured again as a whole,
    because both sides of a speed-up belong in one minute. Another commit or GPU is another result set.

    Raises:
        SystemExit: the earlier run's commit or GPU differs.
    """
    earlier, records = make_report.read_csv(path)
    if meta["commit"] == UNKNOWN_COMMIT:
        sys.exit("--resume needs to know the commit: give --commit")
    for key in ("commit", "gpu"):
        if earlier.get(key) != meta[key]:
            sys.exit(f"--resume {path}: its {key} is {earlier.get(key)!r}, this run's is {meta[key]!r}; start afresh")
    present = {library for library, worker in workers.items() if worker.absent is None}
    wanted = {row.id: {name for name in present if not _not_asked(name, row, options)} for row in rows}
    measured = [r for r in records if r.source == "measured" and r.row in wanted]
    libraries = {id: {r.library for r in measured if r.row == id} for id in wanted}
    complete = [r for r in measured if wanted[r.row] <= libraries[r.row]]
    others = [r for r in records if r.row not in wanted and r.source not in ("recorded", "scaled")]
    kept = complete + others
    meta["resumed"] = f"{len({r.row for r in kept})} rows from the run of {earlier.get('date', 'an unknown date')}"
    if "resumed" in earlier:
        meta["resumed"] += f" ({earlier['resumed']})"
    for key, value in earlier.items():
        if key.endswith(" version") and meta.get(key, "absent").startswith("absent"):
            meta[key] = value  # who was measured then and is not now
        elif key in ("left out", SECONDS):
            meta[key] = value
        elif key == "rows" and value != meta["rows"]:
            meta[key] = f"{value}; then {meta[key]}"
    return kept


def to_record(row: Workload, library: str, answer: dict) -> make_report.Record:
    """Makes the CSV's line of a worker's answer."""
    published = any(row.id == other.id for other in published_rows())
    record = make_report.Record(
        row.id, row.passes, row.num_k_heads, row.num_v_heads, row.lengths_id, int(published), library, "measured"
    )
    if "absent" in answer or "error" in answer:
        kind = "absent" if "absent" in answer else "failed"
        return replace(record, source=kind, note=answer.get("absent") or answer["error"])
    gpu, check = answer["gpu"], answer["check"]
    return replace(
        record,
        gpu_ms=gpu["median_ms"],
        gpu_min_ms=gpu["min_ms"],
        gpu_max_ms=gpu["max_ms"],
        gpu_method=gpu["method"],
        eager_ms=answer["eager"]["median_ms"],
        host_ms=answer["host"]["median_ms"],
        peak_mib=None if answer["peak_bytes"] is None else answer["peak_bytes"] / 2**20,
        input_sets=answer["input_sets"],
        check="ok" if check["passed"] else "failed",
        errors=" ".join(f"{name}={error:.1e}" for name, error in check["errors"].items()),
        checked_heads=f"{check['v_heads']}/{check['of_v_heads']}",
        note="; ".join(check["failed"])[:300] if check["finite"] else "NaN or infinity in the results",
    )


def read_recorded(path: Path) -> dict[tuple, dict[str, str]]:
    """Returns the lines of a file of recorded times, by pass, q/k heads, value heads, lengths."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    names, *table = [line.split(",") for line in lines]
    found = (dict(zip(names, cells, strict=True)) for cells in table)
    return {(line["pass"], int(line["h_qk"]), int(line["h_v"]), line["lengths"]): line for line in found}


def add_recorded(records: list[make_report.Record], path: Path) -> list[make_report.Record]:
    """Returns the records with FlashInfer's recorded times for rows where it was not measured.

    They are scaled by the original's time now over its recorded time where it ran, and marked either way.
    """
    recorded, result = read_recorded(path), []
    for row in make_report.group_rows(records):
        flashinfer = row.records.get("flashinfer")
        line = recorded.get((row.first.passes, row.first.h_qk, row.first.h_v, row.first.lengths), {})
        if line.get("flashinfer_0.7.4_ms") and (flashinfer is None or flashinfer.source in ("absent", "failed")):
            row.records["flashinfer"] = _recorded(row, line)
        result += row.records.values()
    return result


def _recorded(row: make_report.Row, line: dict[str, str]) -> make_report.Record:
    """FlashInfer's record of a row, from the line of the recorded file."""
    time_ms, original = line["flashinfer_0.7.4_ms"], row.records.get("original")
    scaled = original is not None and original.counts
    factor = original.gpu_ms / float(line["flash_qla_0.1.3_ms"]) if scaled else 1.0
    r = row.first
    return make_report.Record(
        r.row, r.passes, r.h_qk, r.h_v, r.lengths, r.published, "flashinfer", "scaled" if scaled else "recorded",
        gpu_ms=float(time_ms) * factor, eager_ms=float(line["flashinfer_0.7.4_eager_ms"]),
        note=f"recorded {time_ms} ms × {factor:.4f}",
    )  # fmt: skip


def one_line(row: Workload, records) -> str:
    """A row's times as they come in, for the terminal."""
    by_library = {record.library: record for record in records}
    whole = make_report.Row(by_library)
    times = []
    for library, record in by_library.items():
        if record.gpu_ms is not None:
            mark = "" if record.check == "ok" else " (CHECK FAILED)"
            times.append(f"{make_report.LABELS[library]} {record.gpu_ms:.4f}{mark}")
        elif record.source == "failed":
            times.append(f"{make_report.LABELS[library]} failed: {record.note}")
    speedup = "" if whole.speedup_best is None else f"  {whole.speedup_best:.2f}×"
    return f"{row.id:<28} {', '.join(times)}{speedup}"


def describe_run(workers, options) -> dict[str, str]:
    """What the results need to be read: GPU, versions, commit, settings."""
    infos = {library: worker.info for library, worker in workers.items() if worker.absent is None}
    one = next(iter(infos.values()), {})
    meta = {"gpu": one.get("gpu", "none (CPU)"), "driver": one.get("driver", "none")}
    meta |= {name: one[name] for name in ("torch", "tilelang", "triton", "python") if name in one}
    for library, worker in workers.items():
        text = f"absent: {worker.absent}" if worker.absent else worker.info["version"]
        meta[f"{make_report.LABELS[library]} version"] = text
    for library in LIBRARIES:
        if library not in workers:
            meta[f"{make_report.LABELS[library]} version"] = "absent: not asked for (--baselines)"
    meta["commit"] = options.commit or _commit()
    meta["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    meta["rows"] = f"set {options.set}, --rows {options.rows!r}, --passes {options.passes}, seed {options.seed}"
    return meta


def seconds_spent(workers) -> dict[str, str]:
    """Where the run's time went, per library."""
    spent = {name: worker.seconds for name, worker in workers.items() if worker.seconds}
    return {
        f"seconds of {make_report.LABELS[name]}": ", ".join(f"{part} {s:.1f}" for part, s in seconds.items())
        for name, seconds in spent.items()
    } | {SECONDS: f"{time.monotonic() - STARTED:.0f}"}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return UNKNOWN_COMMIT
    return done.stdout.strip() or UNKNOWN_COMMIT


def say(progress_bar, text: str) -> None:
    """Prints without breaking the bar."""
    getattr(progress_bar, "write", print)(text)


def make_progress_bar():
    """tqdm over the rows; prints alone where it is missing."""
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda rows: rows

    def bar(rows):
        return tqdm(rows, unit="row", mininterval=0.5 if sys.stderr.isatty() else 30, dynamic_ncols=True)

    bar.write = tqdm.write
    return bar


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the published rows (same as --set quick)")
    parser.add_argument("--set", choices=tuple(ROW_SETS), default="full", help="rows; tiny is for trying the script")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose id matches")
    parser.add_argument("--passes", default=",".join(PASSES), help="which passes")
    parser.add_argument("--baselines", default="original,fla,flashinfer", help="libraries beside ours; empty for none")
    parser.add_argument("--original", default=os.environ.get("PEER_QLA"), metavar="PATH", help="original's folder")
    parser.add_argument(
        "--original-cache", default=os.environ.get("PEER_QLA_CACHE"), metavar="PATH",
        help="TileLang cache of the original's process alone (it compiles for minutes where this is empty)",
    )  # fmt: skip
    parser.add_argument("--fla", default=os.environ.get("PEER_FLA"), metavar="PATH", help="flash_linear_attention's")
    parser.add_argument(
        "--fla-passes", default=",".join(PASSES),
        help="passes that FLA is measured on: it compiles 30 candidates and more for each pair of heads and pass",
    )  # fmt: skip
    parser.add_argument("--recorded", type=Path, help="recorded FlashInfer times (the H200's on an H200 if not given)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results", help="folder of the results")
    parser.add_argument("--suffix", help="of the file names (default: the GPU's last word, H200)")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="CSV",
        help="keep the complete rows of an earlier run of this commit on this GPU (no path: of --out's CSV)",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit", type=float, default=0.0, metavar="S", help="start no row this long after the start; 0: none"
    )
    parser.add_argument("--row-timeout", type=float, default=400.0, metavar="S", help="for one row of one library")
    parser.add_argument("--jobs", type=int, default=min(6, (os.cpu_count() or 2) // 2), help="of the warm-up; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--repeats", type=int, help="in place of 15 replays and 30 eager calls")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--commit", help="recorded in the results (default: git describe)")
    parser.add_argument("--list", action="store_true", help="print the row ids and stop")
    options = parser.parse_args(argv)
    if options.quick:
        options.set = "quick"
    options.libraries = ["ours", *filter(None, options.baselines.split(","))]
    options.fla_passes = options.fla_passes.split(",")
    for name, values, known in (
        ("--passes", options.passes.split(","), PASSES),
        ("--fla-passes", options.fla_passes, PASSES),
        ("--baselines", options.libraries[1:], LIBRARIES[1:]),
    ):
        unknown = sorted(set(values) - set(known))
        if unknown:
            parser.error(f"{name}: {', '.join(unknown)} is not among {', '.join(known)}")
    return options


def main(argv=None) -> int:
    options = parse(argv)
    rows = select_rows(options)
    if options.list:
        print("\n".join(row.id for row in rows))
        return 0
    with tempfile.TemporaryDirectory(prefix="flash_qla_bench_") as folder:
        return _run(rows, options, Path(folder))


def _run(rows, options, folder: Path) -> int:
    bar = make_progress_bar()
    workers = {}
    try:
        with ThreadPoolExecutor(len(options.libraries)) as pool:  # each takes seconds to import
            started = pool.map(lambda name: Worker(name, options, folder / f"{name}.log"), options.libraries)
            workers.update(zip(options.libraries, started))
        meta = describe_run(workers, options)
        print("\n".join(make_report.head_lines(meta)), flush=True)
        if workers["ours"].absent:
            print(f"flash_qla cannot be measured: {workers['ours'].absent}", file=sys.stderr)
            return 1
        suffix = options.suffix or re.sub(r"\W", "", meta["gpu"].split()[-1])
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"bench_{suffix}.csv"
        recorded = options.recorded or (RECORDED if "H200" in meta["gpu"] and RECORDED.exists() else None)
        records = []
        earlier = Path(options.resume) if options.resume else path
        if options.resume is not None and earlier.exists():
            records = take_up(earlier, rows, workers, meta, options)
            rows = [row for row in rows if all(record.row != row.id for record in records)]
        if options.jobs and options.device != "cpu":
            warm(rows, options, folder, lambda text: print(text, flush=True))
        if rows and options.device != "cpu":
            wake(rows, workers)
            print(f"ready after {time.monotonic() - STARTED:.0f} s", flush=True)

        every = [*ROW_SETS[options.set](), *workloads.benchmark_rows()]
        place = {row.id: -n for n, row in enumerate(reversed(every))}  # where a row comes first

        def save():
            in_order = sorted(records, key=lambda record: place[record.row])
            make_report.write_csv(path, meta, add_recorded(in_order, recorded) if recorded else in_order)

        references = reference_folder(folder)
        try:
            left_out = measure(rows, workers, options, records, save, bar, references)
        finally:
            if references is not None:
                shutil.rmtree(references, ignore_errors=True)
    finally:
        for worker in workers.values():
            worker.stop()
    spent = seconds_spent(workers)
    meta |= spent | {SECONDS: " + ".join(filter(None, (meta.get(SECONDS), spent[SECONDS])))}
    done = {record.row for record in records}
    left_out = [row for row in dict.fromkeys([*meta.pop("left out", "").split(), *left_out]) if row not in done]
    if left_out:
        meta["left out"] = " ".join(left_out)
    save()
    return finish(path, suffix)


def finish(path: Path, suffix: str) -> int:
    """Writes Markdown and plots, prints the report. Returns 1 when one of our own checks failed, 0 otherwise."""
    meta, records = make_report.read_csv(path)
    path.with_suffix(".md").write_text(make_report.full_markdown(meta, records), encoding="utf-8")
    try:
        make_report.write_plots(meta, records, path.parent, suffix)
    except ImportError as error:
        print(f"no plots: {error}")
    text = make_report.full_text(meta, records)
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
    print(text)
    ours = [record for record in records if record.library == "ours"]
    return int(any(record.check != "ok" for record in ours))


if __name__ == "__main__":
    sys.exit(main())

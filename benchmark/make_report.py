"""Makes what is shown of a benchmark run from its CSV: README table and plot, plots per pass, text and Markdown.

    python benchmark/make_report.py [benchmark/results/bench_H200.csv]

Writes beside the CSV `<pass>_H200.png` and `bench_H200.md`; one folder up `benchmark_results_H200.txt`, readable; and
the README's sections between `<!-- speed:begin -->` and `<!-- speed:end -->`, and between the same with `accuracy`.
Nothing there is written by hand.

Rules, stated once: a time whose check failed is shown and marked, and gives no speed-up; the best peer of a row is the
fastest library other than ours whose check passed, or its recorded time (marked); geometric means are over the rows
that have a speed-up.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LABELS = {"ours": "flash_qla", "original": "original 0.1.3", "flashinfer": "FlashInfer", "fla": "FLA"}
PASS_TITLES = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"}
TENSORS = ("o", "ht", "dq", "dk", "dv", "dbeta", "dg", "dh0")


@dataclass
class Record:
    """One library's result on one row, as a line of the CSV. Times in ms, None where there is none.

    Attributes:
        row, passes, h_qk, h_v, lengths, published: the row; published: one of the published comparison's.
        library: a key of LABELS.
        source: measured, scaled (recorded time × the original run again / its recorded time), recorded, absent, failed.
        gpu_ms, gpu_min_ms, gpu_max_ms, gpu_method: see flash_qla/testing/timing.py.
        eager_ms, host_ms, peak_mib, input_sets: likewise.
        check: ok, failed, or empty where nothing ran here.
        errors: "o=1.2e-03 ht=…": the worst head's error of each tensor.
        checked_heads: value heads compared, of all.
        note: why there is no time, or what failed.
    """

    row: str
    passes: str
    h_qk: int
    h_v: int
    lengths: str
    published: int
    library: str
    source: str
    gpu_ms: float | None = None
    gpu_min_ms: float | None = None
    gpu_max_ms: float | None = None
    gpu_method: str = ""
    eager_ms: float | None = None
    host_ms: float | None = None
    peak_mib: float | None = None
    input_sets: int | None = None
    check: str = ""
    errors: str = ""
    checked_heads: str = ""
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether the time may be compared."""
        return self.gpu_ms is not None and (self.check == "ok" or self.source in ("scaled", "recorded"))


@dataclass
class Row:
    """One row of the benchmark: every library's record."""

    records: dict[str, Record]

    @property
    def first(self) -> Record:
        return next(iter(self.records.values()))

    def speedup(self, library: str) -> float | None:
        """Returns peer ms / ours ms; None unless both count."""
        ours, peer = self.records.get("ours"), self.records.get(library)
        if ours is None or peer is None or not (ours.counts and peer.counts):
            return None
        return peer.gpu_ms / ours.gpu_ms

    @property
    def best_peer(self) -> Record | None:
        peers = [record for name, record in self.records.items() if name != "ours" and record.counts]
        return min(peers, key=lambda record: record.gpu_ms, default=None)

    @property
    def speedup_best(self) -> float | None:
        return None if self.best_peer is None else self.speedup(self.best_peer.library)


_NUMBERS = {"h_qk": int, "h_v": int, "published": int, "input_sets": int}
_NUMBERS |= {field.name: float for field in fields(Record) if field.name.endswith(("_ms", "_mib"))}


def write_csv(path: Path, meta: dict[str, str], records: Iterable[Record]) -> None:
    """Writes `# key: value` lines, then one line per record."""
    text = io.StringIO()
    for key, value in meta.items():
        text.write(f"# {key}: {value}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Record)])
    for record in records:
        values = [getattr(record, field.name) for field in fields(Record)]
        writer.writerow([f"{v:.5g}" if isinstance(v, float) else "" if v is None else v for v in values])
    path.write_text(text.getvalue(), encoding="utf-8")


def read_csv(path: Path) -> tuple[dict[str, str], list[Record]]:
    """Reads what `write_csv` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    meta = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    records = []
    for line in csv.DictReader(line for line in lines if not line.startswith("#")):
        values = {k: (_NUMBERS[k](v) if v else None) if k in _NUMBERS else v for k, v in line.items()}
        records.append(Record(**values))
    return meta, records


def group_rows(records: Iterable[Record]) -> list[Row]:
    """Returns rows in the order of the records."""
    rows: dict[str, Row] = {}
    for record in records:
        rows.setdefault(record.row, Row({})).records[record.library] = record
    return list(rows.values())


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _fills_the_card(record: Record) -> bool:
    """The published rows that need no splitting of sequences: 16 key heads, or short, or batches of 4 and 8."""
    tokens, _, count = record.lengths.partition("x")
    return record.h_qk == 16 or int(tokens) <= 2048 or int(count) in (4, 8)


def groups(rows: list[Row]) -> dict[str, list[Row]]:
    """Returns named groups of rows, per pass: published (all, by heads, without context parallelism), and others."""
    result: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        r = row.first
        title = PASS_TITLES[r.passes]
        if r.published:
            result[f"{title}, published rows"].append(row)
            if _fills_the_card(r):
                result[f"{title}, but for 2/8 on one or two long sequences"].append(row)
            result[f"{title}, {r.h_qk}/{r.h_v}"].append(row)
        else:
            result[f"{title}, further rows"].append(row)
    return dict(sorted(result.items(), key=lambda item: list(PASS_TITLES.values()).index(item[0].split(",")[0])))


def summary_table(rows: list[Row]) -> list[list[str]]:
    """Header and one line per group: rows compared, geometric means against the best peer and each peer, losses."""
    peers = [name for name in LABELS if name != "ours" and any(row.speedup(name) for row in rows)]
    table = [["group", "rows", "vs best peer", *(f"vs {LABELS[name]}" for name in peers), "slowest row", "rows lost"]]
    for name, members in groups(rows).items():
        speedups = [row.speedup_best for row in members if row.speedup_best]
        means = [geometric_mean(filter(None, (row.speedup(peer) for row in members))) for peer in peers]
        lost = sum(speedup < 1 for speedup in speedups)
        slowest = min(speedups, default=None)
        cells = [name, f"{len(speedups)} of {len(members)}", _times(geometric_mean(speedups))]
        table.append([*cells, *map(_times, means), _times(slowest), str(lost) if speedups else "–"])
    return table


def losing_rows(rows: list[Row]) -> list[str]:
    """One line per row where a peer is faster."""
    lost = [row for row in rows if row.speedup_best is not None and row.speedup_best < 1]
    return [
        f"{row.first.row}: {row.records['ours'].gpu_ms:.4f} ms, {LABELS[row.best_peer.library]} "
        f"{row.best_peer.gpu_ms:.4f} ms{_mark(row.best_peer)} ({row.speedup_best:.2f}×)"
        for row in sorted(lost, key=lambda row: row.speedup_best)
    ]


def unchecked_rows(records: list[Record]) -> list[str]:
    """One line per result that failed its check or did not run."""
    bad = [r for r in records if r.check == "failed" or r.source == "failed"]
    return [f"{LABELS[r.library]}, {r.row}: {r.note or r.errors or 'check failed'}" for r in bad]


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _mark(record: Record) -> str:
    marks = {"scaled": "ˢ", "recorded": "ʳ"}.get(record.source, "")
    return (
        marks + ("" if record.counts or record.gpu_ms is None else "!") + ("ᵉ" if record.gpu_method == "events" else "")
    )


def _ms(record: Record | None, name: str = "gpu_ms") -> str:
    value = None if record is None else getattr(record, name)
    return "–" if value is None else f"{value:.4f}" + (_mark(record) if name == "gpu_ms" else "")


def row_table(rows: list[Row]) -> list[list[str]]:
    """Header and one line per row: each library's GPU time, ours against the best of the others, ours' spread."""
    names = [name for name in LABELS if any(name in row.records for row in rows)]
    table = [["pass", "heads q/v", "lengths", *(f"{LABELS[name]} ms" for name in names), "vs best peer", "spread"]]
    for row in rows:
        r = row.first
        cells = [_ms(row.records.get(name)) for name in names]
        spread = _spread(row.records.get("ours"))
        table.append([r.passes, f"{r.h_qk}/{r.h_v}", r.lengths, *cells, _times(row.speedup_best), spread])
    return table


def _measured_libraries(rows: list[Row]) -> list[str]:
    return [n for n in LABELS if any(n in row.records and row.records[n].source == "measured" for row in rows)]


def detail_table(rows: list[Row], *, errors: bool = True) -> list[list[str]]:
    """Header and one line per row: what else was measured, the libraries that ran side by side (`detail_legend`)."""
    names = _measured_libraries(rows)
    table = [["pass", "heads q/v", "lengths", "eager ms", "host ms", "MiB", "spread", "sets", "heads checked"]]
    table[0] += ["errors of flash_qla"] if errors else []
    for row in rows:
        r, ours = row.first, row.records.get("ours")
        found = [row.records.get(name) for name in names]
        sizes = ["–" if x is None or x.peak_mib is None else f"{x.peak_mib:.0f}" for x in found]
        columns = [[_ms(x, "eager_ms") for x in found], [_ms(x, "host_ms") for x in found], sizes, map(_spread, found)]
        line = [r.passes, f"{r.h_qk}/{r.h_v}", r.lengths, *map(" / ".join, columns)]
        checked = ["–"] * 3 if ours is None else [str(ours.input_sets or "–"), ours.checked_heads, ours.errors]
        table.append(line + [text or "–" for text in checked][: 3 if errors else 2])
    return table


def detail_legend(rows: list[Row]) -> str:
    """What `detail_table` shows, and in which order the libraries stand."""
    return f"{' / '.join(LABELS[name] for name in _measured_libraries(rows))}. {DETAIL_LEGEND}"


def _spread(record: Record | None) -> str:
    if record is None or not record.gpu_ms or record.gpu_min_ms is None:
        return "–"
    return f"{(record.gpu_max_ms - record.gpu_min_ms) / record.gpu_ms:.1%}"


def what_ran(meta: dict[str, str], records: list[Record]) -> str:
    """One sentence on who was measured, recorded or absent, and what a limit left out."""
    parts = []
    for name, label in LABELS.items():
        mine = [record for record in records if record.library == name]
        measured = sum(record.source == "measured" for record in mine)
        recorded = sum(record.source in ("scaled", "recorded") for record in mine)
        version = meta.get(f"{label} version", "absent: not asked for")
        texts = [f"measured on {measured} rows (version {version})"] if measured else []
        texts += [f"recorded times on {recorded} rows"] if recorded else []
        reasons = sorted({r.note for r in mine if r.source == "absent" and r.note} - {version.removeprefix("absent: ")})
        texts += [] if measured else [version if version.startswith("absent") else "measured on no row"]
        texts += [f"elsewhere {'; '.join(reasons)}"] if measured and reasons else []
        parts.append(f"{label}: {', '.join(texts)}")
    took = f" The run took {meta['seconds in all']} s." if "seconds in all" in meta else ""
    missing = meta.get("left out", "").split()
    text = f"{len(missing)} rows: {' '.join(missing[:12])}{' …' * (len(missing) > 12)}"
    return "; ".join(parts) + "." + took + (f" Left out by a time limit: {text}." if missing else "")


def latency_table(rows: list[Row]) -> list[list[str]]:
    """Header and one line per forward of few tokens: what a caller waits for, per library."""
    rows = [row for row in rows if row.first.passes == "fwd" and _tokens(row.first) <= LATENCY_TOKENS]
    names = [n for n in LABELS if any(n in row.records and row.records[n].eager_ms is not None for row in rows)]
    table = [["pass", "heads q/v", "lengths", *(f"{LABELS[name]} ms" for name in names), "flash_qla host ms"]]
    for row in rows:
        r = row.first
        cells = [_eager(row.records.get(name)) for name in names]
        table.append([r.passes, f"{r.h_qk}/{r.h_v}", r.lengths, *cells, _ms(row.records.get("ours"), "host_ms")])
    return table


def _eager(record: Record | None) -> str:
    recorded = record is not None and record.source in ("scaled", "recorded")
    return _ms(record, "eager_ms") + ("ʳ" if recorded and record.eager_ms is not None else "")


def _tokens(record: Record) -> int:
    """Tokens of a published row, whose lengths are all alike; other rows have their total in another form."""
    tokens, _, count = record.lengths.partition("x")
    return int(tokens) * int(count) if tokens.isdigit() and count.isdigit() else sys.maxsize


def _errors(record: Record) -> dict[str, float]:
    return {name: float(value) for name, value in (each.split("=") for each in record.errors.split())}


def accuracy_table(rows: list[Row]) -> list[list[str]]:
    """Header and one line per tensor: the worst head of any row, per library, and the bound on ours."""
    rows = [Row({n: r for n, r in row.records.items() if r.source == "measured"}) for row in rows]
    rows = [row for row in rows if row.records]
    names = [n for n in LABELS if any(n in row.records and row.records[n].errors for row in rows)]
    table = [["tensor", "rows", "bound", *(LABELS[name] for name in names), "worst row of flash_qla"]]
    for tensor in TENSORS:
        found = {
            name: {row.first.row: _errors(row.records[name]).get(tensor) for row in rows if name in row.records}
            for name in names
        }
        found = {name: {row: e for row, e in errors.items() if e is not None} for name, errors in found.items()}
        ours = found.get("ours")
        if ours:
            worst = [f"{max(found[n].values()):.1e}" if found[n] else "–" for n in names]
            table.append([tensor, str(len(ours)), f"{_bound(tensor):.0e}", *worst, max(ours, key=ours.get)])
    return table


def _bound(tensor: str) -> float:
    """The cap on a tensor's error per head for bf16 inputs, from the table of tolerances."""
    sys.path.insert(0, str(ROOT))
    try:
        import torch

        from flash_qla.testing.compare import tolerance
    finally:
        sys.path.remove(str(ROOT))
    return tolerance(tensor, torch.bfloat16)


def markdown(table: list[list[str]]) -> str:
    head, *lines = table
    rule = ["---"] * min(3, len(head)) + ["---:"] * (len(head) - 3)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])


def plain(table: list[list[str]]) -> str:
    widths = [max(len(line[n]) for line in table) for n in range(len(table[0]))]
    pad: list[Callable] = [str.ljust] * min(3, len(widths)) + [str.rjust] * (len(widths) - 3)
    lines = ["  ".join(p(cell, w) for p, cell, w in zip(pad, line, widths)).rstrip() for line in table]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


# Forwards of no more tokens than this are in the table of waiting times.
LATENCY_TOKENS = 8192
LEGEND = (
    "Median of one call's GPU time by CUDA-graph replay, ms. ˢ recorded, scaled by the original's time in this run "
    "over its recorded time; ʳ recorded, not scaled; ᵉ by events, launch gaps included; ! its check failed, so it is "
    "not compared; – absent or not run. Spread: (largest - smallest) / median of flash_qla's replays."
)
DETAIL_LEGEND = (
    "Eager: wall time of one call, synchronised on both sides, median. Host: time to issue it. MiB: the most memory a "
    "call holds above its inputs. Spread: of the GPU time. Sets: of inputs, by turns so that no cache serves them."
)
WHAT_IS_WHAT = (
    "original 0.1.3: that release of the flash-qla package, whose functions these are; FlashInfer: flashinfer-python's "
    "GDN prefill (forward only); FLA: flash-linear-attention's own kernels. Heads are query/key and value heads of "
    "size 128; lengths are tokens x sequences, packed; bf16, with an initial and a final state. Bars above the line, "
    "and factors above 1, mean that flash_qla is faster; the best peer is the fastest other library of the row."
)
LATENCY_LEGEND = (
    "Wall time of one eager call, synchronised before and after, median of 30, ms; host: how long our call takes to "
    "issue; ʳ recorded on another machine."
)
ACCURACY_LEGEND = (
    "Largest relative L2 error of any head of any row above, against the chunked algorithm in float64 on the same bf16 "
    "inputs (up to half a million head-tokens a row: all heads; above: whole groups, one without decay among them)."
)


def head_lines(meta: dict[str, str]) -> list[str]:
    return [f"{key}: {value}" for key, value in meta.items()]


def full_markdown(meta, records) -> str:
    """The whole report of a run."""
    rows = group_rows(records)
    parts = ["# Benchmark of the chunked gated delta rule", "\n".join(f"- {line}" for line in head_lines(meta))]
    parts.append(what_ran(meta, records))
    parts += ["## Geometric means", markdown(summary_table(rows)), "## Rows that lose"]
    parts.append("\n".join(f"- {line}" for line in losing_rows(rows)) or "None.")
    parts += ["## Checks that failed, rows that did not run"]
    parts.append("\n".join(f"- {line}" for line in unchecked_rows(records)) or "None.")
    parts += ["## Errors", ACCURACY_LEGEND, markdown(accuracy_table(rows))]
    parts += ["## Waiting times", LATENCY_LEGEND, markdown(latency_table(rows))]
    parts += ["## Rows", LEGEND, markdown(row_table(rows))]
    parts += ["## Waiting, memory and spread of every row", detail_legend(rows), markdown(detail_table(rows))]
    return "\n\n".join(parts) + "\n"


def full_text(meta, records) -> str:
    """The same, for a terminal."""
    rows = group_rows(records)
    parts = ["\n".join(head_lines(meta)), what_ran(meta, records)]
    parts += [plain(row_table(rows)), LEGEND, plain(summary_table(rows))]
    parts += [plain(latency_table(rows)), LATENCY_LEGEND, plain(accuracy_table(rows)), ACCURACY_LEGEND]
    parts += [plain(detail_table(rows, errors=False)), detail_legend(rows)]
    parts.append("Rows that lose:\n" + ("\n".join(losing_rows(rows)) or "none"))
    parts.append("Checks that failed, rows that did not run:\n" + ("\n".join(unchecked_rows(records)) or "none"))
    return "\n\n".join(part if "\n" in part else textwrap.fill(part, 120) for part in parts) + "\n"


def plot(rows: list[Row], path: Path, title: str) -> bool:
    """Draws each library's time over ours, per row (the published rows when there are any). False: nothing to draw."""
    published = [row for row in rows if row.first.published]
    rows = [row for row in published or rows if "ours" in row.records and row.records["ours"].counts][:60]
    names = [n for n in LABELS if n != "ours" and any(row.speedup(n) for row in rows)]
    if not rows or not names:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"original": "#9a6fb0", "flashinfer": "#5b8c5a", "fla": "#d08c4a"}
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.55 * len(rows) + 1.5), 4.2), dpi=130)
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        heights = [row.speedup(name) or 0.0 for row in rows]
        places = [x + (n - (len(names) - 1) / 2) * width for x in range(len(rows))]
        bars = axes.bar(places, heights, width, label=LABELS[name], color=colors.get(name))
        for bar, row in zip(bars, rows):
            if name in row.records and row.records[name].source in ("scaled", "recorded"):
                bar.set_hatch("//")
                bar.set_edgecolor("white")
    axes.axhline(1.0, color="black", linewidth=1.2)
    axes.text(1.003, 1.0, "flash_qla", fontsize=8, va="center", transform=axes.get_yaxis_transform())
    axes.set_xlim(-0.6, len(rows) - 0.4)
    labels = [f"{row.first.h_qk}/{row.first.h_v}\n{row.first.lengths}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=60, fontsize=8, ha="right", rotation_mode="anchor")
    axes.set_ylabel("time / flash_qla's time")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, ncols=len(names))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def write_plots(meta, records, folder: Path, suffix: str) -> dict[str, Path]:
    """Writes `<pass>_<suffix>.png` for each pass that has something to compare; returns pass → path."""
    written = {}
    for passes, title in PASS_TITLES.items():
        rows = group_rows(r for r in records if r.passes == passes)
        path = folder / f"{passes}_{suffix}.png"
        if plot(
            rows, path, f"{title.capitalize()}, {meta.get('gpu', '')}: time of other libraries (hatched: recorded)"
        ):
            written[passes] = path
    return written


def speed_section(meta, records, plots: dict[str, Path], report: Path, base: Path) -> str:
    """The README's speed section: what ran where, plots, means, rows that lose; folded: every published row, waits."""
    rows = group_rows(records)
    run = ", ".join(f"{key} {meta[key]}" for key in ("gpu", "driver", "torch", "commit", "date") if key in meta)
    parts = [f"Measured by `benchmark/bench_gated_delta_rule.py`: {run}. {what_ran(meta, records)}", WHAT_IS_WHAT]
    parts += [f"![{PASS_TITLES[name]}]({path.relative_to(base).as_posix()})" for name, path in plots.items()]
    lost = losing_rows(rows)
    parts += [markdown(summary_table(rows)), "Rows that lose: " + ("; ".join(lost) if lost else "none") + "."]
    bad = unchecked_rows(records)
    if bad:
        parts.append("Checks that failed, rows that did not run: " + "; ".join(bad) + ".")
    published = row_table([row for row in rows if row.first.published])
    parts.append(f"<details><summary>Every published row</summary>\n\n{markdown(published)}\n\n{LEGEND}\n\n</details>")
    table = f"{markdown(latency_table(rows))}\n\n{LATENCY_LEGEND}"
    parts.append(f"<details><summary>What a caller waits for a short forward</summary>\n\n{table}\n\n</details>")
    link = report.relative_to(base).as_posix()
    parts.append(f"Eager times, memory, spread and errors of every row and library: [`{report.name}`]({link}).")
    return "\n\n".join(parts)


def accuracy_section(records) -> str:
    """The README's accuracy section."""
    return "\n\n".join([markdown(accuracy_table(group_rows(records))), ACCURACY_LEGEND])


def write_readme(readme: Path, **sections: str) -> None:
    """Replaces what lies between each section's markers. Raises SystemExit when markers are missing."""
    text = readme.read_text(encoding="utf-8")
    for name, section in sections.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
        if not pattern.search(text):
            raise SystemExit(f"{readme}: the markers {begin} and {end} are missing; put them where the table belongs")
        text = pattern.sub(lambda _, whole=f"{begin}\n{section}\n{end}": whole, text)
    readme.write_text(text, encoding="utf-8")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", nargs="?", type=Path, default=ROOT / "benchmark/results/bench_H200.csv")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--text", type=Path, help="readable results (default: benchmark/benchmark_results_<GPU>.txt)")
    args = parser.parse_args(argv)
    if not args.csv.exists():
        sys.exit(f"{args.csv} does not exist; run benchmark/bench_gated_delta_rule.py on the GPU first")
    meta, records = read_csv(args.csv)
    suffix = args.csv.stem.removeprefix("bench_")
    plots = write_plots(meta, records, args.csv.parent, suffix)
    text = args.text or ROOT / f"benchmark/benchmark_results_{suffix}.txt"
    text.write_text(full_text(meta, records), encoding="utf-8")
    report = args.csv.resolve().with_suffix(".md")
    report.write_text(full_markdown(meta, records), encoding="utf-8")
    base = args.readme.resolve().parent
    speed = speed_section(meta, records, {k: p.resolve() for k, p in plots.items()}, report, base)
    write_readme(args.readme, speed=speed, accuracy=accuracy_section(records))
    print(f"wrote {text}, {report}, {', '.join(map(str, plots.values()))}, {args.readme}")


if __name__ == "__main__":
    main()

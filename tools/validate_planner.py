"""The planner's choice against the best measured candidate, on problems that the fit has not seen.

    python tools/validate_planner.py [--quick] [--profiles mild,fast,none] [--passes fwd,bwd] [--time-limit S]
    python tools/validate_planner.py --replan CSV       # today's planner on times measured before; needs no GPU

For each (heads, lengths): GPU time by graph replay of a whole pass without a split, with every segment length that the
planner prices and with the powers of two besides; regret = time of the planner's choice / best time - 1. With the
published comparison's gates (`mild`), with every head decaying fast and with none decaying; and for each the choice of
a planner that knows the gates (`build_cp_context(g=...)`). A backward gets the results of a forward split as the
planner chose. Writes `planner_<GPU>.csv` and `.md`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

import fit_coefs  # noqa: E402
import measure_kernels  # noqa: E402
import torch  # noqa: E402

import flash_qla  # noqa: E402
from flash_qla import arch, env  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context, planner  # noqa: E402
from flash_qla.testing import timing  # noqa: E402
from flash_qla.testing.workloads import Workload  # noqa: E402

HEADS = ((1, 4), (2, 6), (2, 8), (4, 12), (4, 16), (8, 24), (8, 32), (16, 32), (16, 48), (16, 64))
LENGTHS = ([3000], [6144], [12000], [24576], [65536], [20000, 3000], [6000] * 3)
QUICK_LENGTHS = LENGTHS[1:4]
COLUMNS = (
    *("passes", "num_k_heads", "num_v_heads", "lengths", "gates", "whole_ms", "best", "best_ms", "chosen", "chosen_ms"),
    *("predicted_ms", "regret", "informed", "informed_ms", "informed_regret", "forward", "candidates"),
)
REPLAYS = 5
# More input sets take time and change all candidates alike.
MAX_SETS = 4
# More segments of a sequence than that are hopeless, and slow to measure.
MAX_SEGMENTS = 128
# By how much a head of the profile `fast` decays in a chunk.
FAST_DECAY = 52.0
LIMIT = 0.08


def problems(quick: bool) -> list[Workload]:
    """Returns what is compared, in order: nothing that the fit has seen."""
    seen = {row.workload.id for row in measure_kernels.rows(quick=False)}
    found = [Workload(list(lengths), *heads) for lengths in (QUICK_LENGTHS if quick else LENGTHS) for heads in HEADS]
    return [workload for workload in found if workload.id not in seen]


def plan(passes: str, workload: Workload, card, decays=None, cached=None) -> planner.Plan:
    """The plan for lengths that the host knows; card: (Arch, multiprocessors)."""
    offsets = torch.tensor([0, *workload.lengths]).cumsum(0).numpy().tobytes(), 8
    dims = workload.head_dim_k, workload.head_dim_v
    request = planner.Request(True, decays=decays)
    return planner.plan_lengths(
        passes, offsets, workload.num_v_heads, dims, *card, env.cp_tolerance(), request, cached
    )  # fmt: skip


def make_call(passes: str, x, segment_chunks: int | None, forward_chunks: int | None):
    """A whole pass, split as told; a backward with the results of a forward that was split into forward_chunks."""
    context = FlashQLACPContext(segment_chunks=segment_chunks)
    if passes == "bwd":
        return measure_kernels.calls(x, segment_chunks, forward_chunks)["bwd"]

    def forward():
        with torch.no_grad():
            return flash_qla.chunk_gated_delta_rule(
                **x.kwargs, output_final_state=True, auto_cp=False, cp_context=context
            )

    return forward


def compare(passes: str, workload: Workload, sets, profile: str, device) -> dict:
    """Measures every candidate of one problem. Returns a line of the table."""
    sets, card = [measure_kernels.with_gates(x, profile) for x in sets], (arch.of_device(device), arch.num_sms(device))
    decays = build_cp_context(sets[0].cu_seqlens, g=sets[0].g).decays
    forward = None if passes == "fwd" else plan("fwd", workload, card).segment_chunks
    chosen = [plan(passes, workload, card, each, forward).segment_chunks for each in (None, decays)]
    shape = planner.Shape.of(
        planner.length_runs([-(-length // planner.CHUNK_SIZE) for length in workload.lengths]), workload.num_v_heads,
        (workload.head_dim_k, workload.head_dim_v), card[1], (),
    )  # fmt: skip
    powers = (1 << n for n in range(2, 10) if shape.longest / MAX_SEGMENTS <= 1 << n <= shape.longest / 2)
    times = {}
    for segment_chunks in dict.fromkeys((None, *planner.candidates(shape), *powers, *chosen)):
        calls = [make_call(passes, x, segment_chunks, forward) for x in sets]
        times[segment_chunks] = timing.gpu_time(calls, device, replays=REPLAYS).median_ms
    return judge(passes, workload, profile, card, times, decays, forward)


def judge(passes: str, workload: Workload, profile: str, card, times, decays, forward) -> dict:
    """A line of the table from the candidates' times (None: no split).

    Raises:
        KeyError: the planner chose what was not measured.
    """
    plain, informed = (plan(passes, workload, card, each, forward) for each in (None, decays))
    best = min(times, key=times.get)

    def regret(chosen):
        return times[chosen.segment_chunks] / times[best] - 1

    return {
        "passes": passes,
        "num_k_heads": workload.num_k_heads,
        "num_v_heads": workload.num_v_heads,
        "lengths": workload.lengths_id,
        "gates": profile,
        "whole_ms": f"{times[None]:.5f}",
        "best": best or "whole",
        "best_ms": f"{times[best]:.5f}",
        "chosen": plain.segment_chunks or "whole",
        "chosen_ms": f"{times[plain.segment_chunks]:.5f}",
        "predicted_ms": f"{plain.total_ms:.5f}",
        "regret": f"{regret(plain):.4f}",
        "informed": informed.segment_chunks or "whole",
        "informed_ms": f"{times[informed.segment_chunks]:.5f}",
        "informed_regret": f"{regret(informed):.4f}",
        "forward": forward or "whole",
        "candidates": " ".join(f"{n or 'whole'}:{ms:.5f}" for n, ms in times.items()),
    }


def replan(path: Path) -> tuple[dict, list[dict]]:
    """Today's planner on the times of an earlier run. Returns the run's description and the table's lines."""
    meta, rows = fit_coefs.read([path])
    card = next(each for each in arch.ARCHS.values() if each.name == meta["arch"]), int(meta["P"])
    workloads, lines = {(w.num_k_heads, w.num_v_heads, w.lengths_id): w for w in problems(False)}, []
    for row in rows:
        workload = workloads[int(row["num_k_heads"]), int(row["num_v_heads"]), row["lengths"]]
        pairs = (each.split(":") for each in row["candidates"].split())
        times = {None if name == "whole" else int(name): float(ms) for name, ms in pairs}
        forward = None if row["forward"] == "whole" else int(row["forward"])
        heads = workload.num_v_heads
        mild = (0.0,) * (heads // 4) + (planner.ASSUMED_DECAY_PER_CHUNK,) * (heads - heads // 4)
        decays = {"mild": mild, "fast": (FAST_DECAY,) * heads, "none": (0.0,) * heads}[row["gates"]]
        lines.append(judge(row["passes"], workload, row["gates"], card, times, decays, forward))
    return meta, lines


def summary(lines) -> list[str]:
    """Markdown: regrets per pass and gates, then every row."""
    text = [
        "| pass | gates | problems | median regret | worst | over 8 % | knowing the gates: median | worst | over 8 % |"
    ]
    text.append("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for passes, gates in dict.fromkeys((line["passes"], line["gates"]) for line in lines):
        cells = []
        for name in ("regret", "informed_regret"):
            regrets = [float(x[name]) for x in lines if (x["passes"], x["gates"]) == (passes, gates)]
            over = sum(x > LIMIT for x in regrets)
            cells += [f"{statistics.median(regrets):.1%}", f"{max(regrets):.1%}", str(over)]
        text.append(f"| {passes} | {gates} | {len(regrets)} | {' | '.join(cells)} |")
    columns = ("pass", "heads", "lengths", "gates", "no split ms", "best", "ms", "chosen", "ms", "predicted ms")
    columns += ("regret", "knowing the gates", "regret")
    text += ["", f"| {' | '.join(columns)} |", "|---|---|---|---|---:|---|---:|---|---:|---:|---:|---|---:|"]
    for x in lines:
        values = [x["passes"], f"{x['num_k_heads']}/{x['num_v_heads']}", x["lengths"], x["gates"], x["whole_ms"]]
        values += [str(x[name]) for name in ("best", "best_ms", "chosen", "chosen_ms", "predicted_ms")]
        values += [f"{float(x['regret']):.1%}", str(x["informed"]), f"{float(x['informed_regret']):.1%}"]
        text.append(f"| {' | '.join(values)} |")
    return text


def write_markdown(path: Path, meta, lines) -> None:
    what = [f"- {name}: {text}" for name, text in measure_kernels.GATES.items()]
    head = [
        "# The planner's choice against the best measured candidate",
        "",
        "Whole passes, GPU time by graph replay, K = V = 128, bf16. Segment lengths in chunks of 64 tokens; "
        "candidates: no split, every length that the planner prices, and the powers of two besides. None of these "
        "problems was used in the fit. "
        "Written by `tools/validate_planner.py`.",
        "",
        *what,
        "",
        ", ".join(f"{name} {value}" for name, value in meta.items()),
        "",
    ]
    path.write_text("\n".join([*head, *summary(lines), ""]), encoding="utf-8")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three of the lengths")
    parser.add_argument("--profiles", default="mild,fast,none")
    parser.add_argument("--passes", default="fwd,bwd")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only problems whose id matches")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results", metavar="FOLDER")
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no problem after so many seconds")
    parser.add_argument("--replan", type=Path, metavar="CSV", help="no measurement: times of an earlier run")
    options = parser.parse_args(argv)
    if options.replan:
        meta, lines = replan(options.replan)
        measure_kernels.write(options.replan, meta, COLUMNS, lines)
        write_markdown(options.replan.with_suffix(".md"), meta, lines)
        print("\n".join(summary(lines)[:6]))
        return 0
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    name = re.sub(r"^NVIDIA\s+|\W", "", torch.cuda.get_device_name(device))
    every = [each for each in problems(options.quick) if re.search(options.rows, each.id)]
    # Passes and gates outermost: a run that hits the limit lacks the least important ones.
    order = [(passes, gates) for gates in options.profiles.split(",") for passes in options.passes.split(",")]
    started, lines = time.perf_counter(), []
    options.out.mkdir(parents=True, exist_ok=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        measure_kernels.warm_up(device)
        meta = measure_kernels.describe_run(device)
        for passes, gates in order:
            for workload in measure_kernels.progress(every, f"{passes} {gates}"):
                if options.time_limit and time.perf_counter() - started > options.time_limit:
                    print(f"time limit: stopped before {passes} {gates} {workload.id}", file=sys.stderr)
                    break
                sets = measure_kernels.make_sets(workload, device, MAX_SETS)
                lines.append(compare(passes, workload, sets, gates, device))
                del sets
            if lines:
                measure_kernels.write(options.out / f"planner_{name}.csv", meta, COLUMNS, lines)
                write_markdown(options.out / f"planner_{name}.md", meta, lines)
    print("\n".join(summary(lines)[: 2 + len(order)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

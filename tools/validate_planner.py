"""The planner's choice against the best measured candidate, on problems that the fit has not seen.

    python tools/validate_planner.py [--quick] [--profiles mild,fast,none] [--passes fwd,bwd] [--time-limit S]
    python tools/validate_planner.py --replan CSV       # today's planner on times measured before; needs no GPU

For each (heads, lengths): GPU time by graph replay of a whole pass without a split, with every segment length that the
planner prices and with the powers of two besides; regret = time of the planner's choice / best time - 1. With the
published comparison's gates (`mild`), with every head decaying fast and with none decaying; and for each the choice of
a planner that knows the gates (`build_cp_context(g=...)`). A backward gets the results of a forward split as the
planner chose. Writes `planner_<GPU>.csv` and `.md`. A recorded time is one of launches as wide as they were then: the
file says how wide, and a later planner is judged with those.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

import fit_coefs  # noqa: E402
import measure_kernels  # noqa: E402
import torch  # noqa: E402

import flash_qla  # noqa: E402
from flash_qla import arch, env  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context, coefs, planner  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.kernels import build, launch  # noqa: E402
from flash_qla.testing import timing  # noqa: E402
from flash_qla.testing.workloads import Workload  # noqa: E402

HEADS = ((1, 4), (2, 6), (2, 8), (4, 12), (4, 16), (8, 24), (8, 32), (16, 32), (16, 48), (16, 64))
LENGTHS = ([3000], [6144], [12000], [24576], [65536], [20000, 3000], [6000] * 3)
QUICK_LENGTHS = LENGTHS[1:4]
COLUMNS = (
    *("passes", "num_k_heads", "num_v_heads", "lengths", "gates", "whole_ms", "best", "best_ms", "chosen", "chosen_ms"),
    *("predicted_ms", "regret", "informed", "informed_ms", "informed_regret", "forward", "candidates", "widths"),
)
REPLAYS = 5
# More input sets take time and change all candidates alike.
MAX_SETS = 4
# More segments of a sequence than that are hopeless, and slow to measure.
MAX_SEGMENTS = 128
# By how much a head decays in a chunk, one of the profile `fast` and one of `mild` that decays.
FAST_DECAY, MILD_DECAY = 52.0, 3.2
LIMIT = 0.08


def problems(quick: bool) -> list[Workload]:
    """Returns what is compared, in order: nothing that the fit has seen."""
    seen = {row.workload.id for row in measure_kernels.rows(quick=False)}
    found = [Workload(list(lengths), *heads) for lengths in (QUICK_LENGTHS if quick else LENGTHS) for heads in HEADS]
    return [workload for workload in found if workload.id not in seen]


def shape_of(workload: Workload, card, decays=None) -> planner.Shape:
    """What the planner makes of a workload; card: (Arch, multiprocessors)."""
    chunks = [-(-length // planner.CHUNK_SIZE) for length in workload.lengths]
    warmups = planner.head_warmups(workload.num_v_heads, env.cp_tolerance(), decays)
    dims = workload.head_dim_k, workload.head_dim_v
    return planner.Shape.of(planner.length_runs(chunks), workload.num_v_heads, dims, card[1], warmups)


@contextlib.contextmanager
def as_measured(widths: dict, forward):
    """The planner's launches become those that were measured.

    Args:
        widths: by segment length, as `widths_planned`; the planner's own where it lacks one.
        forward: of a backward, as a line's `forward`.
    """
    forward_launches, backward_launches = planner.forward_launches, planner.backward_launches

    def wide(segment_chunks):
        if segment_chunks not in widths:
            return contextlib.nullcontext()
        walk, *ends = widths[segment_chunks]
        asked = iter(ends)
        rules = {"num_value_warpgroups": lambda *_: walk, "num_end_warpgroups": lambda *_: next(asked, ends[-1])}
        return mock.patch.multiple(launch, **rules)

    def measured_forward(shape, segment_chunks):
        with wide(segment_chunks):
            return list(forward_launches(shape, segment_chunks))

    def measured_backward(shape, segment_chunks, cached):
        with wide(segment_chunks):
            at_hand = segment_chunks if forward == measure_kernels.ALIKE else cached
            return list(backward_launches(shape, segment_chunks, at_hand))

    measured = {"forward_launches": measured_forward, "backward_launches": measured_backward}
    with mock.patch.multiple(planner, **measured):
        yield


def plan(passes: str, workload: Workload, card, decays=None, forward=None, widths=None) -> planner.Plan:
    """The plan for lengths that the host knows, of launches as wide as `as_measured` is told."""
    request = planner.Request(True, decays=decays)
    with as_measured(widths or {}, forward):
        return planner.choose(passes, shape_of(workload, card, decays), coefs.load(card[0]), request, forward)


def make_call(passes: str, x, segment_chunks: int | None, forward_chunks: int | None):
    """A whole pass, split as told; a backward with the results of a forward that was split into forward_chunks."""
    context = FlashQLACPContext(segment_chunks=segment_chunks)
    if passes == "bwd":
        return measure_kernels.calls(x, segment_chunks, forward_chunks)["bwd"]

    cu_seqlens_cpu = x.seqs.cu_seqlens_cpu  # read here: a capture may not

    def forward():
        with torch.no_grad():
            return flash_qla.chunk_gated_delta_rule(
                **x.kwargs, cu_seqlens_cpu=cu_seqlens_cpu, output_final_state=True, auto_cp=False, cp_context=context,
            )  # fmt: skip

    return forward


def widths_planned(passes: str, shape: planner.Shape, segment_chunks: int | None, cached=None) -> tuple[int, ...]:
    """Value warpgroups of the walk and, where it is split, of segment_ends; a backward's reverse ones first."""
    if passes == "fwd":
        launches = planner.forward_launches(shape, segment_chunks)
    else:
        launches = planner.backward_launches(shape, segment_chunks, cached)
    return tuple(int(each.kernel[-1]) for each in launches if each.kernel[-2] == "w")


def widths_that_ran(call) -> tuple[int, ...]:
    """Runs a call; returns what `widths_planned` does."""
    with build.record_launches() as launches:
        call()
    found = {}
    for (make, spec, _), _, _ in launches:
        kind = measure_kernels.kind((make, spec))
        found[f"{kind}_reverse" if make.__name__ == "make_reverse" else kind] = spec
    kinds = ("fused_fwd", "states", "segment_ends_reverse", "segment_ends")
    return tuple(found[kind].value_warpgroups for kind in kinds if kind in found)


def compare(passes: str, workload: Workload, sets, profile: str, device) -> dict:
    """Measures every candidate of one problem. Returns a line of the table.

    Raises:
        AssertionError: the planner prices other launches than run.
        RuntimeError: a call could not be captured.
    """
    sets, card = [measure_kernels.with_gates(x, profile) for x in sets], (arch.of_device(device), arch.num_sms(device))
    decays = build_cp_context(sets[0].cu_seqlens, g=sets[0].g).decays
    forward = None if passes == "fwd" else plan("fwd", workload, card).segment_chunks
    chosen = [plan(passes, workload, card, each, forward).segment_chunks for each in (None, decays)]
    shape = shape_of(workload, card)
    powers = (1 << n for n in range(2, 10) if shape.longest / MAX_SEGMENTS <= 1 << n <= shape.longest / 2)
    times, widths = {}, {}
    for segment_chunks in dict.fromkeys((None, *planner.candidates(shape), *powers, *chosen)):
        calls = [make_call(passes, x, segment_chunks, forward) for x in sets]
        widths[segment_chunks] = widths_that_ran(calls[0])
        expected = widths_planned(passes, shape, segment_chunks, forward)
        if widths[segment_chunks] != expected:
            ran = widths[segment_chunks]
            raise AssertionError(f"{workload.id} {passes}, {segment_chunks}: ran with {ran} warpgroups, not {expected}")
        times[segment_chunks] = timing.gpu_time(calls, device, replays=REPLAYS, must_capture=True).median_ms
    return judge(passes, workload, profile, card, times, widths, decays, forward)


def judge(passes: str, workload: Workload, profile: str, card, times, widths, decays, forward) -> dict:
    """A line of the table from the candidates' times and widths (None: no split).

    Raises:
        KeyError: the planner chose what was not measured.
    """
    plain, informed = (plan(passes, workload, card, each, forward, widths) for each in (None, decays))
    best = min(times, key=times.get)

    def regret(chosen):
        return times[chosen.segment_chunks] / times[best] - 1

    def by_candidate(texts):
        return " ".join(f"{n or 'whole'}:{text}" for n, text in texts.items())

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
        "candidates": by_candidate({n: f"{ms:.5f}" for n, ms in times.items()}),
        "widths": by_candidate({n: "/".join(map(str, each)) for n, each in widths.items()}),
    }


def lengths_of(lengths_id: str) -> list[int]:
    """The inverse of `Workload.lengths_id`, of packed sequences that it spells out."""
    tokens, _, count = lengths_id.partition("x")
    return [int(tokens)] * int(count) if count else [int(each) for each in lengths_id.split("+")]


def decays_of(gates: str, num_v_heads: int) -> tuple[float, ...]:
    """By how much each head of a profile decays in a chunk, as `build_cp_context` measures it."""
    never = {"mild": num_v_heads // 4, "fast": 0, "none": num_v_heads}[gates]
    others = FAST_DECAY if gates == "fast" else MILD_DECAY
    return (0.0,) * never + (others,) * (num_v_heads - never)


def replan(path: Path) -> tuple[dict, list[dict]]:
    """Today's planner on the times of an earlier run. Returns the run's description and the table's lines."""
    meta, rows = fit_coefs.read([path])
    card = next(each for each in arch.ARCHS.values() if each.name == meta["arch"]), int(meta["P"])
    lines = []

    def chunks_of(name):
        return int(name) if name.isdigit() else {"whole": None}.get(name, name)

    def by_candidate(texts):
        return {chunks_of(name): text for name, _, text in (each.partition(":") for each in texts.split())}

    for row in rows:
        workload = Workload(lengths_of(row["lengths"]), int(row["num_k_heads"]), int(row["num_v_heads"]))
        times = {n: float(ms) for n, ms in by_candidate(row["candidates"]).items()}
        widths = {n: tuple(map(int, text.split("/"))) for n, text in by_candidate(row["widths"]).items()}
        decays = decays_of(row["gates"], workload.num_v_heads)
        forward = chunks_of(row["forward"])
        lines.append(judge(row["passes"], workload, row["gates"], card, times, widths, decays, forward))
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

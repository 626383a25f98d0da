"""Where the time of one call goes: per kernel, against the two floors, with launches and host time.

    python profile/profile_gdr.py --set develop|varlen|product|profile [--skip-bwd]     several sets may follow --set

For each setting (profile/settings/<set>.csv) and pass: GPU time by graph replay beside the floors (operations and bytes
counted from the shapes, over this card's measured matrix rate and copy bandwidth), what that is in TFLOP/s and TB/s,
launches per call, host time per call, and the planner's prediction where there is a planner; then each kernel's own
time inside the call, by torch.profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import flash_qla  # noqa: E402
from flash_qla.testing import timing, workloads  # noqa: E402
from flash_qla.testing.floors import floors, input_bytes  # noqa: E402
from flash_qla.testing.workloads import Workload  # noqa: E402

SETTINGS = ROOT / "profile/settings"
SETS = ("develop", "varlen", "product", "profile")
# Calls inside one profiler window; times are per call.
PROFILED_CALLS = 5
# Where no ceilings can be measured (a CPU): the H200's, so that the columns stay readable.
H200_CEILINGS = {"tflops": 790.0, "bytes_per_s": 4.25e12}


@dataclass(frozen=True)
class KernelTime:
    """Attributes: name, launches per call, ms per call (all launches together)."""

    name: str
    launches: float
    ms: float


def parse_lengths(text: str) -> list[int]:
    """`8192x4`, `28672+4096` or `random` as a list of lengths.

    Raises:
        ValueError: anything else.
    """
    if text == "random":
        return list(workloads.RANDOM_LENGTHS)
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        return [int(match[1])] * int(match[2])
    if re.fullmatch(r"\d+(\+\d+)*", text):
        return [int(part) for part in text.split("+")]
    raise ValueError(f"lengths={text!r} is none of 8192x4, 28672+4096, random")


def read_settings(path: Path) -> list[Workload]:
    """Returns the workloads of a settings file, in order."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return [
        Workload(parse_lengths(row["lengths"]), int(row["h_qk"]), int(row["h_v"]), gate_profile=row["gate_profile"])
        for row in csv.DictReader(lines)
    ]


def make_call(passes: str, x):
    """Returns the call of one pass on inputs x: the public forward, or the low-level backward alone."""
    arguments = {"scale": x.scale, "initial_state": x.initial_state, "cu_seqlens": x.cu_seqlens}
    if passes == "fwd":

        def forward():
            with torch.no_grad():
                return flash_qla.chunk_gated_delta_rule(**x.kwargs, output_final_state=True)

        return forward
    low = flash_qla.chunk_gated_delta_rule_fwd(x.q, x.k, x.v, x.g, x.beta, enable_fwd_cp_cache=True, **arguments)
    g_cumsum, T_inv, cache = low[0], low[1], low[5]
    return lambda: flash_qla.chunk_gated_delta_rule_bwd(
        x.q, x.k, x.v, g_cumsum, x.beta, T_inv, x.do, x.dht, cp_cache=cache, **arguments
    )


def kernel_times(call, device) -> list[KernelTime]:
    """Profiles a few calls; returns device kernels (operators on a CPU), slowest first."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    call()
    timing.synchronize(device)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(PROFILED_CALLS):
            call()
        timing.synchronize(device)
    found = []
    for event in profiler.key_averages():
        time_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if time_us > 0:
            name = event.key.removesuffix("_kernel")
            found.append(KernelTime(name, event.count / PROFILED_CALLS, time_us / PROFILED_CALLS / 1e3))
    return sorted(found, key=lambda kernel: -kernel.ms)


def predicted_ms(passes: str, workload: Workload, device) -> float | None:
    """The planner's predicted time of a pass; None where there is no planner, or no coefficients for the device."""
    try:
        from flash_qla.ops.gated_delta_rule.chunk.cp import planner
    except ImportError:
        return None
    predict = getattr(planner, "predicted_ms", None)
    return None if predict is None else predict(passes, workload.lengths, workload.num_v_heads, device)


def profile(
    workload: Workload, passes: str, device, ceilings, repeats: int | None
) -> tuple[list[str], list[list[str]]]:
    """Profiles one pass. Returns its line of the summary and its kernels' lines."""
    count = timing.num_input_sets(input_bytes(workload)) if repeats is None else 1
    sets = [workload.make(device=device, seed=n) for n in range(count)]
    calls = [make_call(passes, x) for x in sets]
    measured = timing.gpu_time(calls, device, replays=repeats or timing.REPLAYS)
    host = timing.host_time(calls[0], device, repeats=repeats or timing.EAGER_CALLS)
    kernels = kernel_times(calls[0], device)
    floor = floors(workload, passes)
    flops_ms, bytes_ms, handed_ms = floor.times_ms(**ceilings)
    best = max(flops_ms, bytes_ms)
    predicted = predicted_ms(passes, workload, device)
    summary = [
        passes,
        f"{workload.num_k_heads}/{workload.num_v_heads}",
        workload.lengths_id,
        f"{measured.median_ms:.4f}",
        f"±{measured.spread / 2:.1%}",
        "–" if predicted is None else f"{predicted:.4f}",
        f"{flops_ms:.4f}",
        f"{bytes_ms:.4f}",
        f"{handed_ms:.4f}",
        f"{measured.median_ms / best:.2f}",
        f"{floor.flops / measured.median_ms / 1e9:.0f}",
        f"{floor.min_bytes / measured.median_ms / 1e9:.2f}",
        f"{sum(kernel.launches for kernel in kernels):.0f}",
        f"{host.median_ms * 1e3:.0f}",
    ]
    total = sum(kernel.ms for kernel in kernels) or 1.0
    lines = [[k.name[:60], f"{k.launches:.1f}", f"{k.ms:.4f}", f"{k.ms / total:.0%}"] for k in kernels[:12]]
    return summary, lines


SUMMARY = (
    *("pass", "heads", "lengths", "ms", "spread", "planned ms", "operations ms", "bytes ms", "with T, S, dS ms"),
    *("× floor", "TFLOP/s", "TB/s", "launches", "host µs"),
)
KERNELS = ("kernel", "launches", "ms per call", "share")


def print_table(title: str, columns, lines) -> None:
    """Prints with rich where it is installed, in plain columns elsewhere."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join([title, "\t".join(columns), *("\t".join(line) for line in lines)]), flush=True)
        return
    table = Table(*columns)
    for column in table.columns[1 if columns is KERNELS else 3 :]:
        column.justify = "right"
    for line in lines:
        table.add_row(*line)
    console = Console()
    console = console if console.is_terminal else Console(width=180)
    console.print(title, markup=False, highlight=False)
    console.print(table)
    sys.stdout.flush()


def write_summary(path: Path, summaries: list[list[str]]) -> None:
    """Writes the lines so far: after every pass, so that a run cut short keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([SUMMARY, *summaries])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default=["develop"], nargs="+", help="profile/settings/<set>.csv")
    parser.add_argument("--settings", type=Path, help="another settings file")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only settings whose id matches")
    parser.add_argument("--skip-bwd", action="store_true", help="the forward alone")
    parser.add_argument("--out", type=Path, metavar="CSV", help="also write the summary there")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--repeats", type=int, help="in place of 15 replays and 30 calls")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; --device cpu profiles the PyTorch implementation")
    files = [options.settings] if options.settings else [SETTINGS / f"{name}.csv" for name in options.set]
    every = {workload.id: workload for path in files for workload in read_settings(path)}
    chosen = [workload for workload in every.values() if re.search(options.rows, workload.id)]
    if not chosen:
        sys.exit(f"no setting matches --rows {options.rows!r}; there are:\n" + "\n".join(every))
    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()
    summaries = []
    with stream:
        ceilings = timing.measure_ceilings(device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (floors of an H200)"
        ceilings = ceilings or H200_CEILINGS
        rates = f"{ceilings['tflops']:.0f} TFLOP/s, {ceilings['bytes_per_s'] / 1e12:.2f} TB/s"
        print(f"{name}: {rates}; flash_qla {flash_qla.__version__}, torch {torch.__version__}", flush=True)
        for workload in chosen:
            for passes in ("fwd",) if options.skip_bwd else ("fwd", "bwd"):
                summary, kernels = profile(workload, passes, device, ceilings, options.repeats)
                summaries.append(summary)
                print_table(", ".join(f"{name} {cell}" for name, cell in zip(SUMMARY, summary)), KERNELS, kernels)
                if options.out:
                    write_summary(options.out, summaries)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    print_table("one call", SUMMARY, summaries)
    return 0


if __name__ == "__main__":
    sys.exit(main())

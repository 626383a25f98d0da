"""Measures every kernel of the operator over heads, lengths and segment lengths, for `tools/fit_coefs.py`.

    python tools/measure_kernels.py [--quick] [--out FILE.csv] [--rows REGEX] [--time-limit S]

One line of the CSV is one launch: the kernel's name in `coefs/<arch>.csv`, the depth and number of CTAs that the
planner gives it, and its GPU time by CUDA-graph replay. Launches are recorded from real calls, forward and backward,
unsplit and split, and each is replayed alone on several input sets, so that the L2 cache serves none of them. --quick
takes about 40 s of a GPU when the kernels are compiled. `--list` prints the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import flash_qla  # noqa: E402
from flash_qla import arch, env  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context, cost, planner  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.kernels import build  # noqa: E402
from flash_qla.testing import timing  # noqa: E402
from flash_qla.testing.floors import input_bytes  # noqa: E402
from flash_qla.testing.workloads import Workload  # noqa: E402

COLUMNS = (
    *("kernel", "depth", "ctas", "ms", "spread", "num_k_heads", "num_v_heads", "lengths", "gate_profile"),
    *("segment_chunks", "passes"),
)
# (q/k heads, value heads) and tokens of each sequence x sequences.
HEADS = ((1, 4), (2, 8), (4, 16), (8, 32), (16, 32), (16, 64))
LENGTHS = ((512, 1), (2048, 1), (8192, 1), (32768, 1), (131072, 1), (8192, 2), (16384, 2), (4096, 4), (1024, 8))
QUICK_HEADS = ((2, 8), (4, 16), (16, 32), (16, 64))
QUICK_LENGTHS = ((2048, 1), (8192, 1), (32768, 1), (4096, 4), (1024, 8))
SEGMENT_CHUNKS = (4, 8, 16, 32, 64, 128, 256)
QUICK_SEGMENT_CHUNKS = (4, 16, 32, 64)
# The walks of splits that nobody would choose are not worth the time.
MAX_SEGMENTS = 160
# What the gates may be like. Those of heads that never or quickly decay are measured where sequences are split.
GATES = {
    "mild": "the published comparison's gates: a quarter of the heads at 0, logsigmoid(normal)/16",
    "fast": "every head: softplus(normal), 50 a chunk",
    "none": "no head decays",
}
OTHER_GATES_HEADS = (8, 32)
REPLAYS, QUICK_REPLAYS = 11, 5
# A card that was idle is not yet at its clock.
WARM_UP_S = 1.0


@dataclass(frozen=True)
class Row:
    """Attributes: workload; segment_chunks (None: no split); gates (of GATES)."""

    workload: Workload
    segment_chunks: int | None
    gates: str = "mild"

    @property
    def id(self) -> str:
        gates = "" if self.gates == "mild" else f"-{self.gates}"
        return f"{self.workload.id.removeprefix('fwd-')}-{self.segment_chunks or 'whole'}{gates}"


def rows(quick: bool) -> list[Row]:
    """Returns what is measured, rows of one workload together."""
    found = []
    heads, lengths, segments = (
        (QUICK_HEADS, QUICK_LENGTHS, QUICK_SEGMENT_CHUNKS) if quick else (HEADS, LENGTHS, SEGMENT_CHUNKS)
    )
    for num_k_heads, num_v_heads in heads:
        for tokens, count in lengths:
            chunks = tokens // planner.CHUNK_SIZE
            if chunks * count * num_v_heads > 512 * 64:
                continue
            workload = Workload([tokens] * count, num_k_heads, num_v_heads)
            found.append(Row(workload, None))
            lengths_of_segments = [
                each for each in segments if each < chunks and chunks * count // each <= MAX_SEGMENTS
            ]
            for gates in GATES:
                if gates == "mild" or num_v_heads in OTHER_GATES_HEADS:
                    found += [Row(workload, each, gates) for each in lengths_of_segments]
    return found


def with_gates(x, gates: str):
    """The inputs with other gates (of GATES)."""
    if gates == "mild":
        return x
    if gates == "none":
        return dataclasses.replace(x, g=torch.zeros_like(x.g))
    generator = torch.Generator(x.g.device).manual_seed(1)
    noise = torch.randn(x.g.shape, generator=generator, device=x.g.device, dtype=x.g.dtype)
    return dataclasses.replace(x, g=-torch.nn.functional.softplus(noise))


def record(call) -> list[tuple]:
    """Runs a call twice; returns (key, kernel, arguments) of each launch in order."""
    call()  # compiles
    with build.record_launches() as launches:
        call()
    return launches


def kind(key) -> str:
    """The kernel of a launch in the planner's terms, without variant and direction."""
    module = key[0].__module__.rpartition(".")[2]
    return {"segments": "segment_scan", "ends": "segment_ends"}.get(module, module)


def shape_of(workload: Workload, x) -> planner.Shape:
    """What the planner makes of a workload when it knows the gates."""
    chunks = [-(-length // planner.CHUNK_SIZE) for length in x.lengths]
    decays = build_cp_context(x.cu_seqlens, g=x.g).decays
    warmups = planner.head_warmups(workload.num_v_heads, env.cp_tolerance(), decays)
    dims = workload.head_dim_k, workload.head_dim_v
    return planner.Shape.of(planner.length_runs(chunks), workload.num_v_heads, dims, arch.num_sms(x.q.device), warmups)


def planned(passes: str, shape: planner.Shape, segment_chunks: int | None) -> dict[str, cost.Launch]:
    """The planner's launches of a pass by kind (the backward with the forward's results at hand)."""
    common = planner.common_launch(passes, shape)
    if passes == "fwd":
        others = planner.forward_launches(shape, segment_chunks)
    else:
        others = planner.backward_launches(shape, segment_chunks, segment_chunks)
    return {re.sub(r"(_reverse)?(_w\d)?$", "", each.kernel): each for each in (common, *others)}


ALIKE = "alike"


def calls(x, segment_chunks: int | None, forward_chunks: int | None | str = ALIKE):
    """The forward and the backward of one input set.

    Args:
        x: the inputs.
        segment_chunks: chunks of a segment; None: no split.
        forward_chunks: those of the forward whose results the backward gets, where they are others.
    """
    arguments = {"scale": x.scale, "initial_state": x.initial_state, "auto_cp": False}
    # The planner that is compared knows the lengths: so must the launches, which choose their widths by them.
    arguments |= {"cu_seqlens": x.cu_seqlens, "cu_seqlens_cpu": x.seqs.cu_seqlens_cpu}
    context = FlashQLACPContext(segment_chunks=segment_chunks)
    before = context if forward_chunks == ALIKE else FlashQLACPContext(segment_chunks=forward_chunks)

    def forward(cp_context=context, keep=False):
        return flash_qla.chunk_gated_delta_rule_fwd(
            x.q, x.k, x.v, x.g, x.beta, enable_fwd_cp_cache=keep, cp_context=cp_context, **arguments
        )

    g_cumsum, T_inv, _, _, _, cache = forward(before, keep=True)

    def backward():
        return flash_qla.chunk_gated_delta_rule_bwd(
            x.q, x.k, x.v, g_cumsum, x.beta, T_inv, x.do, x.dht, cp_cache=cache, cp_context=context, **arguments
        )

    return {"fwd": forward, "bwd": backward}


def measure(row: Row, sets, replays: int, only: str = "") -> list[dict]:
    """Times every launch of one row whose kernel matches the pattern `only`."""
    sets = [with_gates(x, row.gates) for x in sets]
    shape, lines, done = shape_of(row.workload, sets[0]), [], set()
    by_set = [calls(x, row.segment_chunks) for x in sets]
    for passes in ("fwd", "bwd"):
        launches = [record(each[passes]) for each in by_set]
        expected = planned(passes, shape, row.segment_chunks)
        for index, (key, _, _) in enumerate(launches[0]):
            name = kind(key)
            if name not in expected:
                continue  # not the planner's business: l2norm, copies
            launch = expected[name]
            warpgroups = getattr(key[1], "value_warpgroups", None)
            if warpgroups is not None and not launch.kernel.endswith(f"_w{warpgroups}"):
                raise AssertionError(f"{row.id}: {name} ran with {warpgroups} warpgroups, planned was {launch.kernel}")
            done.add(name)
            if not re.search(only, launch.kernel):
                continue
            again = [(one[index][1], one[index][2]) for one in launches]
            relaunch = [lambda k=k, a=a: k(*a) for k, a in again]
            measured = timing.gpu_time(relaunch, sets[0].q.device, replays=replays, must_capture=True)
            lines.append(
                {
                    "kernel": launch.kernel,
                    "depth": cost.schedule_depth(launch.runs, shape.num_sms),
                    "ctas": launch.ctas,
                    "ms": f"{measured.median_ms:.6f}",
                    "spread": f"{measured.spread:.3f}",
                    "num_k_heads": row.workload.num_k_heads,
                    "num_v_heads": row.workload.num_v_heads,
                    "lengths": row.workload.lengths_id,
                    "gate_profile": row.gates,
                    "segment_chunks": row.segment_chunks or 0,
                    "passes": passes,
                }
            )
        if missing := set(expected) - done:
            raise AssertionError(
                f"{row.id}, {passes}: {missing} did not run; launches: {[k for k, _, _ in launches[0]]}"
            )
    return lines


def describe_run(device) -> dict[str, str]:
    """GPU, clocks, versions, commit: what the numbers mean."""
    meta = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "flash_qla": flash_qla.__version__}
    meta["commit"] = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or "unknown"
    for package in ("torch", "tilelang"):
        with contextlib.suppress(PackageNotFoundError):
            meta[package] = version(package)
    meta["gpu"] = torch.cuda.get_device_name(device)
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
    values = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", str(device.index or 0))
    meta |= dict(zip(fields.split(","), (value.strip() for value in values.split(","))))
    meta |= {"arch": arch.of_device(device).name, "P": str(arch.num_sms(device)), "chunk": str(planner.CHUNK_SIZE)}
    return meta | {"tolerance": str(env.cp_tolerance())}


def _output(*command) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def progress(items, label):
    """tqdm where it is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=label, mininterval=2)


def write(path: Path, meta: dict, columns, lines) -> None:
    """CSV with the run's description in comment lines on top."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in meta.items())
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def warm_up(device) -> None:
    a = torch.randn(4096, 4096, device=device).bfloat16()
    end = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:
        a @ a
        torch.cuda.synchronize(device)


def make_sets(workload: Workload, device, most: int = timing.MAX_SETS):
    """Input sets that the L2 cache cannot hold together, or `most` of them."""
    first = workload.make(device=device)
    copies = min(most, timing.num_input_sets(input_bytes(workload))) - 1

    def copy(x):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        return dataclasses.replace(x, **{n: t.clone() for n, t in fields.items() if isinstance(t, torch.Tensor)})

    return [first, *(copy(first) for _ in range(copies))]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller sweep: about 40 s of GPU")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose id matches")
    parser.add_argument("--list", action="store_true", help="print the rows' ids and stop")
    parser.add_argument("--out", type=Path, metavar="CSV", help="default: profile/kernels_<arch>.csv")
    parser.add_argument("--time-limit", type=float, metavar="S", help="start no row after so many seconds")
    options = parser.parse_args(argv)
    chosen = [row for row in rows(options.quick) if re.search(options.rows, row.id)]
    if options.list:
        print("\n".join(row.id for row in chosen))
        return 0
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    out = options.out or ROOT / f"profile/kernels_{arch.of_device(device).name}.csv"
    started, lines, sets, workload = time.perf_counter(), [], None, None
    with torch.cuda.stream(torch.cuda.Stream()):
        warm_up(device)
        meta = describe_run(device)
        for row in progress(chosen, "rows"):
            if options.time_limit and time.perf_counter() - started > options.time_limit:
                print(f"time limit: stopped before {row.id}", file=sys.stderr)
                break
            if row.workload != workload:
                sets, workload = None, row.workload
                torch.cuda.empty_cache()
                sets = make_sets(workload, device)
            lines += measure(row, sets, QUICK_REPLAYS if options.quick else REPLAYS)
            write(out, meta, COLUMNS, lines)
    print(f"{len(lines)} launches of {len(chosen)} rows in {time.perf_counter() - started:.1f} s: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""compute-sanitizer over small ragged calls, each pass and tool on its own; needs a GPU and the CUDA toolkit.

    python tools/sanitize.py                                    every tool on the forward, states and gradients
    python tools/sanitize.py --tools racecheck --parts forward  one of each
    python tools/sanitize.py --every-lane                       compiles anew with arrivals that racecheck understands
    python tools/sanitize.py --log DIR                          keeps the tools' full output

A warp hands over by `__syncwarp` and one lane's arrival at an mbarrier, which orders the accesses of all its lanes.
racecheck sees the arriving lane's alone and reports the other 31: a dozen lines of CUDA show it (`--demonstrate`: the
same hand-over with 1 and with 32 arrivals). With --every-lane each lane arrives, for counts 32 times as high; nothing
else changes, so what it reports then is real.

The forward is a call without gradients: solve, fused_fwd, l2norm, and segment_ends and segment_scan where it splits.
`states` and `gradients` run forward and backward with only that kernel watched. One line per tool and part: calls that
ran and what the tool counted; then each distinct report. Exit status 1 when a call failed or a tool reported anything.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "synccheck")
# Which kernels a part watches; None: all of ours (PyTorch's own are left out).
PARTS = {"forward": None, "states": "backward_states", "gradients": "gradients"}
DONE = "case done:"
_SUMMARY = re.compile(r"ERROR SUMMARY|RACECHECK SUMMARY")
_NONE_FOUND = re.compile(r"SUMMARY: 0 (errors|hazards)")


def calls(gradients: bool):
    """Yields (name, inputs, options) of the calls: every way through the kernels that a few hundred tokens can take."""
    from flash_qla.testing.workloads import make_inputs

    ragged = [70, 0, 3, 130]
    yield "ragged 2/4", make_inputs(ragged, 2, 4, gate_profile="strong", device="cuda", tail_tokens=5), {}
    yield "dense 1/3", make_inputs((2, 65), 1, 3, gate_profile="mild", device="cuda"), {}
    yield "many short", make_inputs([1, 63, 0, 64, 2] * 4, 1, 2, gate_profile="mild", device="cuda"), {}
    yield "long 1/1", make_inputs([400], 1, 1, gate_profile="mild", device="cuda"), {"state_v_first": True}
    split = make_inputs([500, 0, 65, 200], 1, 2, gate_profile="mixed", device="cuda")
    yield "split 1/2", split, {"force_intra_cp": True, "use_qk_l2norm_in_kernel": True}
    if not gradients:
        yield "wide 16/64", make_inputs([130] * 4, 16, 64, gate_profile="mild", device="cuda"), {}


_FIRST_LANE = r"\(\(\(int\)threadIdx\.x\) (?:% 32|& 31)\) == 0"
_BY_ONE_LANE = re.compile(rf"if \((?:{_FIRST_LANE}|\({_FIRST_LANE}\) && (\w+))\) \{{\s*([^;{{}}]+\.arrive\(\));\s*\}}")
_ARRIVE_FOR = """
template <int lanes> TL_DEVICE void arrive_for(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_ptr_to_uint(barrier)), "n"(lanes) : "memory");
}
"""


_ELECTED = "if (tl::tl_shuffle_elect<32>()) {"
_ONE_ARRIVAL = re.compile(r"(\w+\[[^;{}]*?\])\.arrive\(\);")


def _block_end(source: str, start: int) -> int:
    """Where the block ends whose opening brace lies just before start."""
    depth = 1
    for end in range(start, len(source)):
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        if depth == 0:
            return end
    raise ValueError("a block does not end")


def every_lane_arrives(source: str) -> str:
    """Rewrites generated CUDA: barriers count lanes, every lane of a warp arrives.

    Only where the elected lane's block does more than arrive (it also starts copies, which count bytes), does that lane
    arrive for all 32.
    """
    mark = ".arrive_of_lane();"
    source = re.sub(r"\.init\((\d+)\)", lambda m: f".init({32 * int(m[1])})", source)
    source = _BY_ONE_LANE.sub(
        lambda m: f"{{ {f'if ({m[1]}) ' if m[1] else ''}{m[2].replace('.arrive()', mark[:-1])}; }}", source
    )
    pieces, place = [], 0
    while (found := source.find(_ELECTED, place)) >= 0:
        start = found + len(_ELECTED)
        end = _block_end(source, start)
        body = source[start:end]
        if re.sub(r"if \([^{}]*\) \{|[}\s]", "", _ONE_ARRIVAL.sub("", body)) == "":
            pieces += [source[place:found], "{", body.replace(".arrive();", mark)]
        else:
            pieces.append(source[place:end])
        place = end
    source = "".join([*pieces, source[place:]])
    barrier = r"(reinterpret_cast<uint64_t*>(&\1));"
    source = _ONE_ARRIVAL.sub(r"arrive_for<32>" + barrier, source)
    others = r"arrive_for<31>" + barrier + r" \1.arrive_and_expect_tx("
    source = re.sub(r"(\w+\[[^;{}]*?\])\.arrive_and_expect_tx\(", others, source)
    return source.replace(mark, ".arrive();").replace('extern "C"', _ARRIVE_FOR + 'extern "C"', 1)


def compile_with_every_lane(part: str) -> None:
    """From here on this process compiles the part's kernels so; the flag keeps them apart in TileLang's cache."""
    import tilelang
    from tilelang.engine.callback import register_cuda_postproc

    from flash_qla.ops.gated_delta_rule.chunk.kernels import build

    module = PARTS[part] and PARTS[part].removeprefix("backward_")
    rewritten = threading.local()
    register_cuda_postproc(lambda source, target: every_lane_arrives(source) if rewritten.on else source)

    def compile_now(make, spec, arch):
        rewritten.on = module in (None, make.__module__.rpartition(".")[2])
        flags = ["-DFLASH_QLA_EVERY_LANE"] if rewritten.on else None
        return tilelang.compile(
            make(spec), target=build.target(arch), pass_configs=build.pass_configs(make), compile_flags=flags
        )

    build.compile_now = compile_now


def run_calls(gradients: bool) -> None:
    """What runs under the sanitizer: prints a line per call."""
    os.environ["FLASH_QLA_BACKEND"] = "kernels"
    import torch

    import flash_qla

    for name, inputs, options in calls(gradients):
        x = inputs.differentiable() if gradients else inputs
        with torch.set_grad_enabled(gradients):
            o, ht = flash_qla.chunk_gated_delta_rule(**x.kwargs, output_final_state=True, **options)
        if gradients:
            torch.autograd.grad([o, ht], [x.q, x.k, x.v, x.g, x.beta, x.initial_state], [x.do, x.dht])
        torch.cuda.synchronize()
        print(DONE, name, flush=True)


def sanitize(tool: str, part: str, log: Path, timeout_s: float, every_lane: bool) -> tuple[str, list[str], bool]:
    """Runs a tool over a part. Returns its line, its distinct reports and whether it is clean."""
    kernels = PARTS[part]
    which = ["--kernel-name-exclude", "kernel_substring=at::"]
    if kernels is not None:
        which = ["--kernel-name", f"kernel_substring={kernels}"]
    command = ["compute-sanitizer", "--tool", tool, *which, "--print-limit", "500", "--show-backtrace", "device"]
    command += [sys.executable, str(Path(__file__).resolve()), "--child", part]
    command += ["--every-lane"] if every_lane else []
    with open(log, "w", encoding="utf-8") as file:
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            status = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            status = "none: it ran out of time"
    text = log.read_text(encoding="utf-8", errors="replace")
    summary = next((line for line in reversed(text.splitlines()) if _SUMMARY.search(line)), "no summary")
    num_done = text.count(DONE)
    clean = status == 0 and bool(_NONE_FOUND.search(summary))
    return f"{tool} {part}: {num_done} calls, status {status}, {summary.strip('= ')}", reports_of(text), clean


_DEMONSTRATION = r"""
#include <cstdint>
template <bool every_lane> __device__ void hand_over(uint32_t barrier) {
  __syncwarp();
  if (every_lane || threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{.reg .pred p;\nW_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra W_%=;\n}"
               ::"r"(barrier), "r"(parity) : "memory");
}
// Warp 0 fills the row and hands it over, warp 1 reads it and hands it back, eight times.
template <bool every_lane> __device__ void exchange(float* out) {
  __shared__ float row[32];
  __shared__ uint64_t barriers[2];
  uint32_t filled = __cvta_generic_to_shared(&barriers[0]), emptied = __cvta_generic_to_shared(&barriers[1]);
  uint32_t lane = threadIdx.x % 32, arrivals = every_lane ? 32 : 1;
  if (threadIdx.x < 2)
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(threadIdx.x ? emptied : filled), "r"(arrivals) : "memory");
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 8; ++i) {
    if (threadIdx.x < 32) { wait(emptied, (i + 1) % 2); row[lane] = i + lane; hand_over<every_lane>(filled); }
    else { wait(filled, i % 2); sum += row[31 - lane]; hand_over<every_lane>(emptied); }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}
__global__ void one_lane_arrives(float* out) { exchange<false>(out); }
__global__ void every_lane_arrives(float* out) { exchange<true>(out); }
int main() {
  float* out;
  cudaMalloc(&out, 128);
  KERNEL<<<1, 64>>>(out);
  return cudaDeviceSynchronize();
}
"""


def demonstrate() -> int:
    """Prints racecheck's verdict on one correct hand-over, written in two ways. Returns 0 when only one is reported."""
    clean = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kernel in ("one_lane_arrives", "every_lane_arrives"):
            source, program = Path(scratch) / f"{kernel}.cu", Path(scratch) / kernel
            source.write_text(_DEMONSTRATION.replace("KERNEL", kernel), encoding="utf-8")
            subprocess.run(["nvcc", "-arch=sm_90a", "-o", str(program), str(source)], check=True)
            done = subprocess.run(
                ["compute-sanitizer", "--tool", "racecheck", str(program)], capture_output=True, text=True
            )
            summary = next(line for line in done.stdout.splitlines() if _SUMMARY.search(line))
            clean[kernel] = bool(_NONE_FOUND.search(summary))
            print(f"{kernel}: {summary.strip('= ')}")
    return 0 if clean == {"one_lane_arrives": False, "every_lane_arrives": True} else 1


def reports_of(text: str) -> list[str]:
    """Returns a sanitizer log's distinct reports, addresses and threads left out, each with how often it came."""
    found: Counter[str] = Counter()
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    for number, line in enumerate(lines):
        if re.match(r"Error: Race|Warning: Race|Barrier error|Invalid|Error: Potential", line):
            where = [line]
            for following in lines[number + 1 : number + 12]:
                if not re.match(r"and |at |Device Frame|Barrier is", following):
                    if following == "" or following.startswith("Saved"):
                        break
                    continue
                where.append(following)
            found[re.sub(r"\+0x[0-9a-f]+|\(\d+,\d+,\d+\)|\[\d+ hazards\]| *\[0x[0-9a-f]+\]", "", "; ".join(where))] += 1
    return [f"{count}x {report}" for report, count in found.most_common()]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="of " + ", ".join(TOOLS))
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--jobs", type=int, default=1, help="sanitizers side by side")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one tool and part")
    parser.add_argument("--log", type=Path, metavar="DIR", help="keeps the full output there")
    parser.add_argument("--every-lane", action="store_true", help="compile the watched kernels anew, so (see above)")
    parser.add_argument("--demonstrate", action="store_true", help="what racecheck says of either hand-over, and stop")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        if options.every_lane:
            compile_with_every_lane(options.child)
        run_calls(gradients=options.child != "forward")
        return 0
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer was not found; it comes with the CUDA toolkit")
    if options.demonstrate:
        return demonstrate()
    tools, parts = options.tools.split(","), options.parts.split(",")
    for chosen, known in ((tools, TOOLS), (parts, PARTS)):
        if unknown := set(chosen) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    all_clean = True
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.log or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [
            pool.submit(sanitize, tool, part, folder / f"{tool}_{part}.log", options.timeout, options.every_lane)
            for part in parts
            for tool in tools
        ]
        for job in jobs:
            line, reports, clean = job.result()
            all_clean &= clean
            print("\n   ".join([line, *reports]), flush=True)
    return 0 if all_clean else 1


if __name__ == "__main__":
    sys.exit(main())

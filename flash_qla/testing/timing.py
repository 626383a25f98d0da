"""How long a call takes: GPU time by CUDA-graph replay, eager wall time, host time, peak memory.

GPU time: one graph holds the same call on several input sets, so that the L2 cache of the last call does not serve the
next; its replays are queued back to back with an event between them, so that launch latency hides behind work. Eager
wall time has a synchronisation on both sides, as a caller that needs the result would see it. On a CPU the wall clock
serves for all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

REPLAYS = 15
EAGER_CALLS = 30
# As many calls or more, for at least so long: one pause of the host of 2 ms would be half of 30 short calls.
EAGER_S = 0.05
# Input sets together hold at least this many bytes: four times the L2 of the GPUs that we time on.
COLD_BYTES = 4 * 60 * 2**20
# Two at least: what a call does may depend on the values of its gates.
MIN_SETS, MAX_SETS = 2, 16


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call over several repeats.

    Attributes:
        median_ms, min_ms, max_ms: over the repeats.
        repeats: how many.
        method: "graph" (CUDA-graph replay), "events" (queued calls between CUDA events: launch gaps included), or
            "wall" (host clock, synchronised on both sides).
    """

    median_ms: float
    min_ms: float
    max_ms: float
    repeats: int
    method: str

    @classmethod
    def of(cls, times_ms: Sequence[float], method: str) -> Timing:
        return cls(statistics.median(times_ms), min(times_ms), max(times_ms), len(times_ms), method)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (self.max_ms - self.min_ms) / self.median_ms if self.median_ms else 0.0


def num_input_sets(bytes_per_set: int) -> int:
    """Returns how many input sets one graph needs so that the cache serves none of them, MIN_SETS to MAX_SETS."""
    return max(MIN_SETS, min(MAX_SETS, -(-COLD_BYTES // max(1, bytes_per_set))))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu_time(
    calls: Sequence[Callable[[], object]], device, *, replays: int = REPLAYS, must_capture: bool = False
) -> Timing:
    """Times one call on the GPU.

    Args:
        calls: the same call on each input set. What they return stays alive through the capture, so every set has
            outputs of its own too.
        device: where they run; on a CPU the wall clock is used.
        replays: repeats.
        must_capture: no falling back, where events' share of the host would spoil a comparison.

    Returns:
        A Timing by graph replay; by events when the capture failed (a call that reads the device, for instance).

    Raises:
        RuntimeError: the capture failed, with must_capture.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return wall_time(calls, device, repeats=replays)
    stream = torch.cuda.current_stream(device)
    if stream == torch.cuda.default_stream(device):
        raise ValueError(
            "gpu_time needs a stream that can capture; call it under torch.cuda.stream(torch.cuda.Stream())"
        )
    for call in calls:  # compiles, autotunes, fills caches
        call()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            outputs = [call() for call in calls]
    except RuntimeError:
        synchronize(device)
        if must_capture:
            raise
        return _event_time(calls, device, replays)
    try:
        return _timed(graph.replay, device, replays, len(calls), "graph")
    finally:
        del outputs
        graph.reset()


def _event_time(calls, device, repeats):
    def run_all():
        for call in calls:
            call()

    return _timed(run_all, device, repeats, len(calls), "events")


def _timed(run, device, repeats, calls_per_run, method) -> Timing:
    for _ in range(2):
        run()
    synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    run()  # the first timed run starts behind this one, so its launch is hidden as well
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    synchronize(device)
    return Timing.of([a.elapsed_time(b) / calls_per_run for a, b in zip(events, events[1:])], method)


def _rounds(repeats: int):
    """Yields 0, 1, 2, …: `repeats` of them; from EAGER_CALLS on until EAGER_S have passed as well."""
    start, n = time.perf_counter(), 0
    while n < repeats or (repeats >= EAGER_CALLS and time.perf_counter() - start < EAGER_S):
        yield n
        n += 1


def wall_time(calls: Sequence[Callable[[], object]], device, *, repeats: int = EAGER_CALLS) -> Timing:
    """Times eager calls by the host clock, synchronised before and after each; sets taken in turn."""
    device = torch.device(device)
    calls[0]()
    times_ms = []
    for n in _rounds(repeats):
        synchronize(device)
        start = time.perf_counter()
        calls[n % len(calls)]()
        synchronize(device)
        times_ms.append((time.perf_counter() - start) * 1e3)
    return Timing.of(times_ms, "wall")


def host_time(call: Callable[[], object], device, *, repeats: int = EAGER_CALLS) -> Timing:
    """Times how long the host needs to issue a call: no synchronisation inside, an idle device before it."""
    device = torch.device(device)
    call()
    times_ms = []
    for _ in _rounds(repeats):
        synchronize(device)
        start = time.perf_counter()
        result = call()
        times_ms.append((time.perf_counter() - start) * 1e3)
        del result
    synchronize(device)
    return Timing.of(times_ms, "wall")


def peak_memory(call: Callable[[], object], device) -> int | None:
    """Returns the most bytes that one call holds above what was allocated before it, outputs included.

    None on a CPU, where torch does not count.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    call()
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def measure_ceilings(device) -> dict[str, float]:
    """Measures what the device can do: an 8192³ bf16 matrix product and a 4 GiB copy (bytes read + written).

    Returns:
        {"tflops": …, "bytes_per_s": …}; empty on a CPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return {}
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product_ms = gpu_time([lambda: a @ b], device).median_ms
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    copy_ms = gpu_time([lambda: target.copy_(source)], device).median_ms
    return {"tflops": 2 * 8192**3 / product_ms / 1e9, "bytes_per_s": 2 * source.nbytes / copy_ms * 1e3}

"""The planner: is a sequence split inside the card, and into segments of how many chunks? Pure host code.

Few (sequence, head) pairs leave multiprocessors idle, each walking its chunks one after the other. Splitting a
sequence into segments shortens the walk and adds work: the segments' end states and, for heads whose gate does not
make it negligible, their transitions, then a scan. The planner writes down the launches of every candidate
(`forward_launches`, `backward_launches`), prices each launch by `cost.py` with the coefficients that were measured
on the card, and takes the cheapest sum. Candidates: no split; segments of 4, 8, 16, … chunks; segments that fill the
multiprocessors once or twice.
Whether a walk's CTA takes all of V or 64 columns is not a candidate but `kernels/launch.py`'s rule, asked here.

A plan is a function of its inputs alone: lengths (or, where the host does not know them, T and N as N equal sequences),
value heads, V, multiprocessors, architecture, tolerance and what is known about the gates. It does not know about
gradients: a checkpointed forward and its recomputation get the same plan, so the same bits. Plans are kept by value.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from flash_qla import arch as archs
from flash_qla import env

from ..constants import CHUNK_SIZE
from ..kernels import launch
from ..split import Split
from . import coefs, cost
from .cost import Launch

# Without gates on the host: the share of heads that never decay (their transitions are needed), and what the others
# decay by in a chunk (natural log). The published comparison's gates: a quarter (rounded down) at 0, the others
# logsigmoid(normal)/16.
SHARE_NEVER_DECAYING = 0.25
ASSUMED_DECAY_PER_CHUNK = 3.2
# A split must promise to be this much faster: predictions are off by a few percent, and no split is exact.
MIN_GAIN = 0.03
# Segments of the PyTorch implementation's longest sequence, when a split is forced: there is nothing to fill.
FORCED_SEGMENTS = 4
# More runs of equal lengths than this are grouped: planning must not take longer than a launch.
MAX_RUNS = 8
# The launches of a split cost as much as walking a few chunks.
MIN_SEGMENT_CHUNKS = 4
# With so many times the longest walk's chunks for each multiprocessor there is nothing to fill.
FULL_CARD_WAVES = 8
# A walk of segment_ends starts and ends in the time of so many of its chunks.
ENDS_START_CHUNKS = 2


@dataclass(frozen=True)
class Plan:
    """One decision.

    Attributes:
        segment_chunks: chunks of a segment, None for no split.
        num_segments: segments that hold tokens (sequences, without a split).
        predicted_ms: (kernel, milliseconds) of each launch, in no order; empty where nothing was priced.
        reason: one line.
    """

    segment_chunks: int | None
    num_segments: int
    predicted_ms: tuple[tuple[str, float], ...]
    reason: str

    def split(self, tolerance: float) -> Split | None:
        """What the stages are handed; None for no split."""
        return None if self.segment_chunks is None else Split(self.segment_chunks, tolerance, self.num_segments)

    @property
    def total_ms(self) -> float:
        return sum(ms for _, ms in self.predicted_ms)

    def __str__(self) -> str:
        what = f"segments of {self.segment_chunks} chunks" if self.segment_chunks else "no split"
        parts = ", ".join(f"{kernel} {ms:.4f}" for kernel, ms in self.predicted_ms)
        times = f"; predicted {self.total_ms:.4f} ms ({parts})" if parts else ""
        return f"{what}{times}: {self.reason}"


class Request(NamedTuple):
    """What a call asks of the planner.

    Attributes:
        allowed: it may split.
        forced: it must, where a sequence has two chunks.
        segment_chunks: this length instead of a choice (measurements, tests).
        decays: by how much each value head decays in a chunk, `[Hv]` natural logs >= 0; None when nobody knows.
    """

    allowed: bool = False
    forced: bool = False
    segment_chunks: int | None = None
    decays: tuple[float, ...] | None = None


NO_SPLIT, AUTO = Request(), Request(allowed=True)


class Shape(NamedTuple):
    """What a plan depends on.

    Attributes:
        lengths: (chunks of a sequence, how many such sequences), in order.
        num_v_heads: Hv.
        head_dim_k, head_dim_v: native head sizes K, V.
        num_sms: multiprocessors.
        warmups: (chunks until a head's transition is negligible or None for never, how many such heads).
        num_seqs, longest, total_chunks: of the lengths.
    """

    lengths: tuple[tuple[int, int], ...]
    num_v_heads: int
    head_dim_k: int
    head_dim_v: int
    num_sms: int
    warmups: tuple[tuple[int | None, int], ...]
    num_seqs: int
    longest: int
    total_chunks: int

    @classmethod
    def of(cls, lengths, num_v_heads, head_dims, num_sms, warmups) -> Shape:
        totals = (sum(n for _, n in lengths), max((c for c, _ in lengths), default=0), sum(c * n for c, n in lengths))
        return cls(lengths, num_v_heads, *map(launch.native_head_dim, head_dims), num_sms, warmups, *totals)

    def segments(self, segment_chunks: int | None) -> tuple[tuple[tuple[int, int], ...], int]:
        """Returns (chunks of a segment, how many), full ones first, and how many in all. None: of sequences."""
        if segment_chunks is None:
            return self.lengths, self.num_seqs
        full, rests = 0, {}
        for chunks, count in self.lengths:
            full += chunks // segment_chunks * count
            rest = chunks % segment_chunks
            if rest:
                rests[rest] = rests.get(rest, 0) + count
        runs = (((segment_chunks, full),) if full else ()) + tuple(sorted(rests.items(), reverse=True))
        return runs, full + sum(rests.values())

    def carrying(self, segment_chunks: int) -> int:
        """Heads that need the transitions of segments so long."""
        return sum([heads for warmup, heads in self.warmups if warmup is None or warmup > segment_chunks])


# --- the launches of each pass: the cost model's only knowledge of the kernels


def _walk(kernel: str, shape: Shape, segments, directions: int = 1) -> Launch:
    """A walk over every chunk of sequences or segments: a CTA for each direction, head and tile of V."""
    (runs, count), walks = segments, directions * shape.num_v_heads
    warpgroups = launch.num_value_warpgroups(walks * count, shape.head_dim_v, shape.num_sms)
    ctas = walks * (shape.head_dim_v // (64 * warpgroups))
    return Launch(f"{kernel}_w{warpgroups}", tuple([(chunks, n * ctas) for chunks, n in runs]), count * ctas)


def _segment_ends(shape: Shape, segment_chunks: int, num_segments: int, *, reverse: bool) -> Launch:
    """The segments' end states from zero, and forward their transitions, whose columns are tiles of their own.

    A head that carries walks its whole segments, b and transition at once; another one b alone over its warm-up. Every
    kind of walk has its CTAs, the long ones first (`kernels/tiles/decay.py`); those that a head does not need exit.
    """
    pairs, walking = shape.num_v_heads * num_segments, num_segments - shape.num_seqs
    dims = shape.head_dim_k, shape.head_dim_v
    warpgroups = launch.num_end_warpgroups(pairs, *dims, shape.num_sms, segment_chunks, reverse)
    tiles = shape.head_dim_v // (64 * warpgroups)
    long_tiles = tiles if reverse else tiles + shape.head_dim_k // (64 * warpgroups)
    runs = [(ENDS_START_CHUNKS + segment_chunks, walking * shape.carrying(segment_chunks) * long_tiles)]
    for warmup, heads in reversed(shape.warmups):
        if warmup is not None and warmup <= segment_chunks:
            runs.append((ENDS_START_CHUNKS + warmup, walking * heads * tiles))
    kernel = "segment_ends_reverse" if reverse else "segment_ends"
    return Launch(f"{kernel}_w{warpgroups}", tuple(runs), walking * shape.num_v_heads * (long_tiles + tiles))


def _scan(shape: Shape, segment_chunks: int) -> Launch:
    """The scan over the segments of each sequence, head and tile of V: a step of depth is a segment handed on.

    The CTAs of heads that do not carry exit.
    """
    tiles = shape.head_dim_v // launch.SCAN_COLUMNS
    walks = shape.carrying(segment_chunks) * tiles
    runs = tuple([(-(-chunks // segment_chunks) - 1, count * walks) for chunks, count in shape.lengths])
    return Launch("segment_scan", runs, shape.num_seqs * shape.num_v_heads * tiles)


def common_launch(passes: str, shape: Shape) -> Launch:
    """What a split does not change: a CTA a chunk and four value heads, or a chunk and value head."""
    if passes == "fwd":
        count = shape.total_chunks * -(-shape.num_v_heads // 4)
        return Launch("solve", ((1, count),), count)
    count = shape.total_chunks * shape.num_v_heads
    return Launch("gradients", ((1, count),), count)


def forward_launches(shape: Shape, segment_chunks: int | None) -> Iterator[Launch]:
    """The others of a forward, as they are needed: a candidate is left at the first that makes it too dear."""
    segments = shape.segments(segment_chunks)
    yield _walk("fused_fwd", shape, segments)
    if segment_chunks is not None:
        yield _segment_ends(shape, segment_chunks, segments[1], reverse=False)
        yield _scan(shape, segment_chunks)


def backward_launches(shape: Shape, segment_chunks: int | None, cached: int | None) -> Iterator[Launch]:
    """Those of a backward, which computes the states that enter the segments again unless a forward left them."""
    segments = shape.segments(segment_chunks)
    yield _walk("states", shape, segments, directions=2)
    if segment_chunks is not None:
        yield _segment_ends(shape, segment_chunks, segments[1], reverse=True)
        yield (scan := _scan(shape, segment_chunks))
        if segment_chunks != cached:
            yield _segment_ends(shape, segment_chunks, segments[1], reverse=False)
            yield scan


# --- the choice


def candidates(shape: Shape) -> list[int]:
    """Segment lengths to price: what fills the multiprocessors once or twice, then the powers of two around those."""
    tiles = shape.head_dim_v // 64
    wanted = {waves * shape.num_sms // (shape.num_v_heads * n) for n in (1, tiles) for waves in (1, 2)}
    balanced = sorted({shortest_for(shape, count) for count in wanted if count > shape.num_seqs}, reverse=True)
    low, high = (balanced[-1], balanced[0]) if balanced else (MIN_SEGMENT_CHUNKS, shape.longest)
    powers = (1 << n for n in range((4 * high).bit_length(), -1, -1))
    # Far shorter segments only add walks and steps of the scan; far longer ones leave multiprocessors idle.
    near = (n for n in powers if low <= 2 * n and n <= 4 * high)
    return [n for n in dict.fromkeys((*balanced, *near)) if MIN_SEGMENT_CHUNKS <= n < shape.longest]


def shortest_for(shape: Shape, wanted: int) -> int:
    """The shortest segments of which there are no more than `wanted`."""
    if len(shape.lengths) == 1:
        return -(-shape.longest // (wanted // shape.num_seqs))
    # As if all lay end to end, and as if each sequence had one more that is not full.
    low, high = max(1, -(-shape.total_chunks // wanted)), max(1, shape.longest)
    if wanted > shape.num_seqs:
        high = max(low, min(high, -(-shape.total_chunks // (wanted - shape.num_seqs))))
    while low < high:
        middle = (low + high) // 2
        total = 0
        for chunks, count in shape.lengths:
            total -= -chunks // middle * count
        if total <= wanted:
            high = middle
        else:
            low = middle + 1
    return high


def choose(passes: str, shape: Shape, table: coefs.Table, request: Request = AUTO, cached=None) -> Plan:
    """Prices the candidates and returns the cheapest.

    Args:
        passes: "fwd" or "bwd".
        shape: the problem.
        table: the card's coefficients.
        request: what is allowed or wanted.
        cached: segment length whose forward results are at hand (bwd).
    """
    common = common_launch(passes, shape)
    common_ms = cost.launch_ms(common, table, shape.num_sms)

    def price(segment_chunks, limit_ms=float("inf")):
        """(kernel, ms) of each launch and their sum; None as soon as the sum is not below the limit."""
        if passes == "fwd":
            launches = forward_launches(shape, segment_chunks)
        else:
            launches = backward_launches(shape, segment_chunks, cached)
        times, total_ms = [(common.kernel, common_ms)], common_ms
        for each in launches:
            ms = cost.launch_ms(each, table, shape.num_sms)
            times.append((each.kernel, ms))
            total_ms += ms
            if total_ms >= limit_ms:
                return None
        return times, total_ms

    def made(segment_chunks, times, reason):
        return Plan(segment_chunks, shape.segments(segment_chunks)[1], tuple(times), reason)

    whole, whole_ms = price(None)
    must = request.forced or request.segment_chunks is not None
    if not (request.allowed or must):
        return made(None, whole, "not allowed to split")
    if request.segment_chunks is not None:
        return made(request.segment_chunks, price(request.segment_chunks)[0], "this length was asked for")
    if not must:
        if shape.longest < 2:
            return made(None, whole, "no sequence has two chunks")
        if shape.total_chunks * shape.num_v_heads >= FULL_CARD_WAVES * shape.num_sms * shape.longest:
            return made(None, whole, "the sequences fill the card")
    best, best_ms = None, float("inf") if must else (1 - MIN_GAIN) * whole_ms
    # A forced split splits also where the longest sequence is thought to be short: lengths may be unknown.
    shortest = -(-max(shape.longest, 1) // 2)
    for segment_chunks in candidates(shape) or ([shortest] if must else []):
        priced = price(segment_chunks, best_ms)
        if priced is not None:
            best, best_ms = (segment_chunks, priced[0]), priced[1]
    if best is None:
        return made(None, whole, "no split is faster")
    if must:
        return made(*best, f"forced; without a split {whole_ms:.4f} ms")
    never = sum(heads for warmup, heads in shape.warmups if warmup is None or warmup > best[0])
    carrying = f"{never} of {shape.num_v_heads} heads {'carry' if request.decays else 'taken to carry'}"
    return made(*best, f"without a split {whole_ms:.4f} ms ({carrying})")


# --- from a call to its shape


@lru_cache(maxsize=256)
def head_warmups(num_v_heads: int, tolerance: float, decays) -> tuple[tuple[int | None, int], ...]:
    """(chunks until a head's decay reaches the tolerance or None, how many heads), sorted."""
    if decays is None:
        never = int(SHARE_NEVER_DECAYING * num_v_heads)
        decays = (0.0,) * never + (ASSUMED_DECAY_PER_CHUNK,) * (num_v_heads - never)
    chunks = Counter(max(1, int(-(tolerance // decay))) if decay > 0 else None for decay in decays)
    return tuple(sorted(chunks.items(), key=lambda item: (item[0] is None, item[0])))


def length_runs(chunks: list[int]) -> tuple[tuple[int, int], ...]:
    """Run-length form of the sequences' chunk counts, the empty ones left out; grouped by size where there are many."""
    runs = []
    for each in chunks:
        if runs and runs[-1][0] == each:
            runs[-1][1] += 1
        elif each > 0:
            runs.append([each, 1])
    if len(runs) > MAX_RUNS:
        longest_first = sorted((each for each in chunks if each > 0), reverse=True)
        size = -(-len(longest_first) // MAX_RUNS)
        groups = (longest_first[start : start + size] for start in range(0, len(longest_first), size))
        runs = [[-(-sum(group) // len(group)), len(group)] for group in groups]
    return tuple((each, count) for each, count in runs)


def _lengths_key(seqs):
    """What is known about the lengths, by value: packed offsets on the host, or (sequences, tokens of each)."""
    if not seqs.is_varlen:
        return seqs.num_seqs, seqs.num_tokens
    if seqs.cu_seqlens_cpu is not None:
        return seqs.cu_seqlens_cpu.numpy().tobytes(), seqs.cu_seqlens_cpu.element_size()
    return seqs.num_seqs, -(-seqs.num_tokens // max(seqs.num_seqs, 1))


def key_runs(key) -> tuple[tuple[int, int], ...]:
    if isinstance(key[0], bytes):
        offsets = memoryview(key[0]).cast({4: "i", 8: "q"}[key[1]]).tolist()
        return length_runs([-(-max(0, end - start) // CHUNK_SIZE) for start, end in zip(offsets, offsets[1:])])
    num_seqs, tokens = key
    return ((-(-tokens // CHUNK_SIZE), num_seqs),) if num_seqs and tokens else ()


@lru_cache(maxsize=4096)
def plan_lengths(
    passes: str, key, num_v_heads: int, head_dims: tuple[int, int], arch: archs.Arch, num_sms: int, tolerance: float,
    request: Request = AUTO, cached: int | None = None,
) -> Plan:  # fmt: skip
    """The plan as a function of plain values; kept by value.

    Args:
        passes: "fwd" or "bwd".
        key: (N, tokens of each sequence), or offsets as (bytes, bytes per number).
        num_v_heads, head_dims: Hv, (K, V).
        arch, num_sms: of the device.
        tolerance: natural log, as FLASH_QLA_CP_TOLERANCE.
        request: what may be done.
        cached: segment length whose forward results are at hand (bwd).
    """
    warmups = head_warmups(num_v_heads, tolerance, request.decays)
    shape = Shape.of(key_runs(key), num_v_heads, head_dims, num_sms, warmups)
    table = coefs.load(arch)
    if table is None:
        return Plan(None, shape.num_seqs, (), f"there are no coefficients for {arch.name}")
    return choose(passes, shape, table, request, cached)


@lru_cache(maxsize=4096)
def _split_on_device(passes, key, num_v_heads, head_dims, device, tolerance: str, request, cached):
    """Returns (the split or None, a line that describes the plan). Every argument is a plain value."""
    arch, num_sms, tolerance = archs.of_device(device), archs.num_sms(device), env.cp_tolerance()
    plan = plan_lengths(passes, key, num_v_heads, head_dims, arch, num_sms, tolerance, request, cached)
    if isinstance(key[0], bytes):
        sequences = f"{len(key[0]) // key[1] - 1} known lengths"
    else:
        sequences = f"{key[0]} x {key[1]} tokens"
    where = f"flash_qla plan, {passes}: {sequences}, {num_v_heads} value heads, {arch.name} with {num_sms} SMs"
    return plan.split(tolerance), f"{where}: {plan}"


_printed: set[str] = set()


def split_of_call(
    passes: str, problem, seqs, request: Request, *, on_kernels: bool, cached: int | None = None
) -> Split | None:
    """Decides for one call; prints new plans with FLASH_QLA_PRINT_PLAN=1. Reads nothing from the device.

    Args:
        passes: "fwd" or "bwd".
        problem, seqs: the call.
        request: from `context.split_request`.
        on_kernels: False for the PyTorch implementation. It walks all sequences at once on any machine, nothing is
            idle, and a split would add the transitions' work: it splits only when forced.
        cached: segment length whose forward results are at hand (bwd).
    """
    if not on_kernels:
        return _split_in_pytorch(seqs, request)
    split, line = _split_on_device(
        passes, _lengths_key(seqs), problem.num_v_heads, (problem.head_dim_k, problem.head_dim_v), problem.device,
        env.read("FLASH_QLA_CP_TOLERANCE"), request, cached,
    )  # fmt: skip
    if env.print_plan() and line not in _printed:
        _printed.add(line)
        print(line, file=sys.stderr, flush=True)
    return split


def _split_in_pytorch(seqs, request: Request) -> Split | None:
    if not (request.forced or request.segment_chunks):
        return None
    counts = seqs.num_chunks()
    segment_chunks = request.segment_chunks or max(1, -(-max(counts, default=0) // FORCED_SEGMENTS))
    return Split(segment_chunks, env.cp_tolerance(), sum(-(-count // segment_chunks) for count in counts))


def predicted_ms(passes: str, lengths, num_v_heads: int, device, head_dims=(128, 128)) -> float | None:
    """Returns the predicted time of a pass over known lengths; None without coefficients for the device.

    Args:
        passes: "fwd", "bwd" (with the forward's results at hand) or "fwdbwd".
        lengths: tokens of each sequence, or a tuple (B, T) of a dense input.
        num_v_heads: Hv.
        device: a torch.device or its name.
    """
    device = torch.device(device)
    if device.type != "cuda" or not archs.of_device(device).has_kernels:
        return None
    key = lengths if isinstance(lengths, tuple) else (torch.tensor([0, *lengths]).cumsum(0).numpy().tobytes(), 8)
    card = archs.of_device(device), archs.num_sms(device)
    rest = (key, num_v_heads, tuple(head_dims), *card, env.cp_tolerance(), AUTO)
    forward = plan_lengths("fwd", *rest)
    if not forward.predicted_ms:
        return None
    backward = plan_lengths("bwd", *rest, forward.segment_chunks)
    return {"fwd": forward.total_ms, "bwd": backward.total_ms, "fwdbwd": forward.total_ms + backward.total_ms}[passes]

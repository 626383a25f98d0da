"""Context parallelism's arithmetic in plain PyTorch: a sequence cut into segments that run at once.

Over a segment the state moves by `S_out = M S_in + b`: b is the walk's end state from zero, M its transition. A scan
over the segments turns them into the state entering each one, and then every segment is a sequence of its own. The
backward mirrors it: `dS_in = M^T dS_out + c`, c being the reverse walk from zero.

Where the gate has made M negligible, a head needs b alone, and b from its last chunks alone (the warm-up). Negligible
is a bound on the norm, not a guess (equation C5): what is left out is at most exp(tolerance) times the norm of the
state entering the warm-up. Segments are whole chunks, so g_cumsum and T_inv are the same split or not.

Equations C1 to C6 of `ops/gated_delta_rule/README.md`. The kernels' segment stages are checked against these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flash_qla.ops.gated_delta_rule.chunk import reference
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
from flash_qla.ops.gated_delta_rule.chunk.split import SegmentStates, Split


@dataclass(frozen=True)
class Segments:
    """Sequences cut into segments of whole chunks.

    Attributes:
        outer: the N sequences.
        inner: the J segments as sequences of the same rows, in order. An empty sequence has one empty segment.
        offsets: N + 1 numbers: sequence n owns the segments offsets[n] to offsets[n + 1] - 1.
    """

    outer: Sequences
    inner: Sequences
    offsets: tuple[int, ...]

    @property
    def num_segments(self) -> int:
        return self.offsets[-1]

    @property
    def owner(self) -> list[int]:
        """The sequence of each segment."""
        return [n for n, (a, b) in enumerate(self._ranges()) for _ in range(a, b)]

    @property
    def first(self) -> list[int]:
        """The first segment of each sequence."""
        return [a for a, _ in self._ranges()]

    @property
    def last(self) -> list[int]:
        """The last segment of each sequence."""
        return [b - 1 for _, b in self._ranges()]

    def _ranges(self):
        return list(zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def chunk_ranges(self) -> list[tuple[int, int]]:
        """(first, end) chunk number of each segment, among all chunks in order."""
        ranges, total = [], 0
        for count in self.inner.num_chunks():
            ranges.append((total, total + count))
            total += count
        return ranges


@dataclass(frozen=True)
class _Windows(Sequences):
    """Sequences given by their bounds, so that rows may be left out between them."""

    windows: tuple[tuple[int, int], ...] = ()

    @property
    def is_varlen(self) -> bool:
        return True

    def bounds(self) -> list[tuple[int, int]]:
        return list(self.windows)


def cut(seqs: Sequences, segment_chunks: int | Sequence[Sequence[int]]) -> Segments:
    """Cuts sequences into segments.

    Args:
        seqs: the sequences; dense ones too.
        segment_chunks: chunks of every segment (a sequence's last one may be shorter), or for each sequence the list of
            its segments' chunks, empty for an empty sequence.

    Raises:
        ValueError: when the lists do not add up to the sequences' chunks or hold a number below 1.
    """
    counts = seqs.num_chunks()
    if isinstance(segment_chunks, int):
        if segment_chunks < 1:
            raise ValueError(f"segment_chunks={segment_chunks} must be at least 1")
        segment_chunks = [
            [min(segment_chunks, count - start) for start in range(0, count, segment_chunks)] for count in counts
        ]
    if len(segment_chunks) != seqs.num_seqs:
        raise ValueError(f"segment_chunks has {len(segment_chunks)} lists for {seqs.num_seqs} sequences")
    bounds = seqs.bounds()
    starts, offsets = [], [0]
    for n, (parts, count) in enumerate(zip(segment_chunks, counts, strict=True)):
        if sum(parts) != count or any(part < 1 for part in parts):
            raise ValueError(f"segment_chunks[{n}]={list(parts)} must be numbers >= 1 that add up to {count} chunks")
        begin, end = bounds[n]
        for part in parts or [0]:
            starts.append(min(begin, end))
            begin += part * seqs.chunk_size
        offsets.append(len(starts))
    cu_seqlens = torch.tensor([*starts, bounds[-1][1] if bounds else 0], dtype=torch.int64)
    inner = Sequences.build(seqs.batch, seqs.num_tokens, seqs.chunk_size, cu_seqlens)
    return Segments(seqs, inner, tuple(offsets))


@reference.stage
def decay_bound(k, g_cumsum, beta, seqs: Sequences):
    """Bounds the log norm of each chunk's transition. Equation: C5.

    A token's transition is `exp(g)(I - beta k k^T)`, of norm `exp(g) max(1, |1 - beta |k|^2|)`: the second factor is 1
    for normalised keys with 0 <= beta <= 2, and only then.

    Returns:
        `[total_chunks, Hv]` natural log in the compute dtype; a run of chunks has at most the sum.
    """
    dtype, num_v_heads = reference.compute_dtype(k), beta.shape[2]
    bound = torch.empty(seqs.total_chunks(), num_v_heads, dtype=dtype, device=k.device)
    for block, rows in reference.chunk_blocks(seqs, k.device, dtype, num_v_heads, k.shape[-1]):
        square = rows.take(k).square().sum(-1).repeat_interleave(num_v_heads // k.shape[2], dim=1)
        # Padding has beta = 0: |0 - 1| = 1 adds nothing.
        growth = (rows.take(beta) * square - 1).abs().clamp(min=1).log().sum(-1)
        bound[block] = rows.take_gate(g_cumsum)[..., -1] + growth
    return bound


def warmup_chunks(bound, segments: Segments, tolerance: float, reverse: bool = False):
    """Finds how many chunks of each segment and head must be walked for its end state. Equation: C6.

    Args:
        bound: `[total_chunks, Hv]` from `decay_bound`.
        tolerance: natural log of the largest norm that may be left out; -inf cuts nothing off.
        reverse: for the reverse walk, which ends at the segment's first chunk, so that the warm-up is a prefix.

    Returns:
        warmup int64 `[J, Hv]` and needs_carry bool `[J, Hv]`, on the host. needs_carry: nowhere in the segment is the
        bound reached, so the whole segment is walked and its transition carries what came before.
    """
    num_v_heads = bound.shape[1]
    warmup = torch.zeros(segments.num_segments, num_v_heads, dtype=torch.int64)
    needs_carry = torch.ones(segments.num_segments, num_v_heads, dtype=torch.bool)
    for j, (start, end) in enumerate(segments.chunk_ranges()):
        if start == end:
            continue
        from_end = bound[start:end] if reverse else bound[start:end].flip(0)
        reached = (from_end.cumsum(0) <= tolerance).cpu()
        needs_carry[j] = ~reached.any(0)
        warmup[j] = torch.where(needs_carry[j], end - start, reached.int().argmax(0) + 1)
    return warmup, needs_carry


def _head_groups(chunks) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (value heads, chunks per segment) for each distinct column of `[J, Hv]`: they share their windows."""
    if chunks.numel() == 0:
        return
    columns, group = chunks.unique(dim=1, return_inverse=True)
    for i in range(columns.shape[1]):
        yield (group == i).nonzero().flatten().tolist(), columns[:, i].tolist()


def _cut_windows(segments: Segments, chunks: list[int], at_start: bool) -> tuple[list[int], _Windows]:
    """The first or last `chunks[j]` chunks of each segment, and which segments have any."""
    seqs = segments.inner
    used, bounds = [], []
    for j, ((start, end), count) in enumerate(zip(seqs.bounds(), seqs.num_chunks(), strict=True)):
        if chunks[j]:
            first = start if at_start else start + (count - chunks[j]) * seqs.chunk_size
            used.append(j)
            bounds.append((first, min(end, first + chunks[j] * seqs.chunk_size)))
    return used, _Windows(seqs.batch, seqs.num_tokens, len(bounds), seqs.chunk_size, windows=tuple(bounds))


def _pick_heads(heads, num_v_heads, *tensors):
    """The value heads of `[B, T, H, ...]` tensors; of those with key heads, each value head's own one."""
    if len(heads) == num_v_heads:
        return tensors
    return tuple(x[:, :, [head * x.shape[2] // num_v_heads for head in heads]] for x in tensors)


def segment_states(k, v, T_inv, g_cumsum, beta, segments: Segments, warmup):
    """Walks the last warm-up chunks of each segment and head from a state of zero. Equation: C1.

    Args:
        warmup: int64 `[J, Hv]`, the chunks to walk; 0 leaves b zero.

    Returns:
        b `[J, Hv, K, V]` in the compute dtype.
    """
    num_v_heads, dims = v.shape[2], (k.shape[-1], v.shape[-1])
    b = torch.zeros(segments.num_segments, num_v_heads, *dims, dtype=reference.compute_dtype(k, v), device=k.device)
    for heads, chunks in _head_groups(warmup):
        used, windows = _cut_windows(segments, chunks, at_start=False)
        ht = b.new_empty(len(used), len(heads), *dims)
        tensors = _pick_heads(heads, num_v_heads, k, v, T_inv, g_cumsum, beta)
        reference.fused_forward(None, ht, None, None, *tensors, 1.0, None, windows)
        b[_grid(used, heads)] = ht
    return b


def reverse_segment_states(q, k, T_inv, g_cumsum, beta, do, scale, segments: Segments, warmup):
    """Walks the first warm-up chunks of each segment and head backwards from zero. Equation: C4.

    Returns:
        c `[J, Hv, K, V]` in the compute dtype.
    """
    num_v_heads, dims = do.shape[2], (k.shape[-1], do.shape[-1])
    c = torch.zeros(segments.num_segments, num_v_heads, *dims, dtype=reference.compute_dtype(k, do), device=k.device)
    for heads, chunks in _head_groups(warmup):
        used, windows = _cut_windows(segments, chunks, at_start=True)
        dh0 = c.new_empty(len(used), len(heads), *dims)
        tensors = _pick_heads(heads, num_v_heads, q, k, T_inv, g_cumsum, beta, do)
        reference.reverse_states(*tensors, None, scale, dh0, windows)
        c[_grid(used, heads)] = dh0
    return c


def transition(k, T_inv, g_cumsum, beta, segments: Segments, needs_carry):
    """Computes the segments' transitions: the walk with v = 0 from the identity. Equation: C2.

    Args:
        needs_carry: bool `[J, Hv]`: where it is needed; zero elsewhere.

    Returns:
        M `[J, Hv, K, K]` in the compute dtype.
    """
    num_v_heads, dim = beta.shape[2], k.shape[-1]
    dtype = reference.compute_dtype(k)
    M = torch.zeros(segments.num_segments, num_v_heads, dim, dim, dtype=dtype, device=k.device)
    counts = torch.tensor(segments.inner.num_chunks(), dtype=torch.int64).view(-1, 1)
    for heads, chunks in _head_groups(counts * needs_carry):
        used, windows = _cut_windows(segments, chunks, at_start=True)
        ht = M.new_empty(len(used), len(heads), dim, dim)
        keys, inverse, g, b = _pick_heads(heads, num_v_heads, k, T_inv, g_cumsum, beta)
        v = M.new_zeros(1).expand(*k.shape[:2], len(heads), dim)
        eye = torch.eye(dim, dtype=dtype, device=k.device).expand_as(ht)
        reference.fused_forward(None, ht, None, None, keys, v, inverse, g, b, 1.0, eye, windows)
        M[_grid(used, heads)] = ht
    return M


def _grid(segments, heads):
    return torch.tensor(segments, dtype=torch.int64).view(-1, 1), torch.tensor(heads, dtype=torch.int64)


def scan_forward(b, M, needs_carry, h0, segments: Segments):
    """Chains the segments: the state entering each one. Equation: C3.

    Args:
        b, M: from `segment_states` and `transition`; not read for the last segment of a sequence.
        needs_carry: bool `[J, Hv]`; where false M is not read.
        h0: `[N, Hv, K, V]` or None for zeros.

    Returns:
        `[J, Hv, K, V]` in b's dtype.
    """
    entering = torch.zeros_like(b)
    needs = needs_carry.to(b.device)[..., None, None]
    for n, (first, end) in enumerate(segments._ranges()):
        if h0 is not None:
            entering[first] = h0[n]
        for j in range(first, end - 1):
            entering[j + 1] = torch.where(needs[j], M[j] @ entering[j], 0) + b[j]
    return entering


def scan_reverse(c, M, needs_carry, dht, segments: Segments):
    """Chains the segments backwards: the cotangent of the state leaving each one. Equation: C4.

    Args:
        c, M: from `reverse_segment_states` and `transition`; not read for the first segment of a sequence.
        needs_carry: bool `[J, Hv]` of the reverse walk; where false M is not read.
        dht: `[N, Hv, K, V]` or None for zeros.

    Returns:
        `[J, Hv, K, V]` in c's dtype.
    """
    leaving = torch.zeros_like(c)
    needs = needs_carry.to(c.device)[..., None, None]
    for n, (first, end) in enumerate(segments._ranges()):
        if dht is not None:
            leaving[end - 1] = dht[n]
        for j in range(end - 1, first, -1):
            leaving[j - 1] = torch.where(needs[j], M[j].mT @ leaving[j], 0) + c[j]
    return leaving


# --- the stages of a split, twins of those in `kernels/stages.py`


@reference.stage
def entering_states(
    k, v, T_inv, g_cumsum, beta, h0, seqs: Sequences, split: Split, for_backward: bool = False, ready: bool = False
):  # fmt: skip
    """Computes the state entering each segment: walk, transition, scan.

    Args:
        for_backward: transitions also where only `leaving_cotangents` needs them.
        ready: as handed to `solve`.

    Returns:
        SegmentStates whose states are `[J, Hv, K, V]` in the compute dtype.
    """
    segments = cut(seqs, split.segment_chunks)
    bound = decay_bound(k, g_cumsum, beta, seqs)
    warmup, needs_carry = _skip(segments.last, *warmup_chunks(bound, segments, split.tolerance))
    b = segment_states(k, v, T_inv, g_cumsum, beta, segments, warmup)
    wanted = needs_carry
    if for_backward:
        wanted = needs_carry | _skip(segments.first, *warmup_chunks(bound, segments, split.tolerance, reverse=True))[1]
    M = transition(k, T_inv, g_cumsum, beta, segments, wanted)
    return SegmentStates(split, scan_forward(b, M, needs_carry, h0, segments), M, wanted)


@reference.stage
def leaving_cotangents(
    q, k, T_inv, g_cumsum, beta, do, dht, scale, seqs: Sequences, split: Split, entering: SegmentStates
):
    """Computes the cotangent of the state leaving each segment; the mirror of `entering_states`.

    Args:
        entering: made for_backward, from the same split: its transitions are used.
    """
    segments = cut(seqs, split.segment_chunks)
    bound = decay_bound(k, g_cumsum, beta, seqs)
    warmup, needs_carry = _skip(segments.first, *warmup_chunks(bound, segments, split.tolerance, reverse=True))
    c = reverse_segment_states(q, k, T_inv, g_cumsum, beta, do, scale, segments, warmup)
    return SegmentStates(split, scan_reverse(c, entering.transitions, needs_carry, dht, segments))


@reference.stage
def fused_forward(
    o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs: Sequences, entering=None, ready: bool = False
):  # fmt: skip
    """`reference.fused_forward`, with every segment run at once from `entering` unless that is None."""
    if entering is None:
        return reference.fused_forward(o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs)
    segments = cut(seqs, entering.split.segment_chunks)
    leaving = None if ht is None else torch.empty_like(entering.states)
    args = (q, k, v, T_inv, g_cumsum, beta, scale, entering.states, segments.inner)
    reference.fused_forward(o, leaving, h, *args)
    if ht is not None:
        ht.copy_(leaving[segments.last])


@reference.stage
def backward_states(
    q, k, v, T_inv, g_cumsum, beta, do, scale, h0, dht, dh0, seqs: Sequences, entering=None, leaving=None, dv=None
):
    """`reference.backward_states`, with every segment run at once between `entering` and `leaving` unless None."""
    if entering is None:
        return reference.backward_states(q, k, v, T_inv, g_cumsum, beta, do, scale, h0, dht, dh0, seqs)
    segments = cut(seqs, entering.split.segment_chunks)
    first = None if dh0 is None else torch.empty_like(leaving.states)
    args = (q, k, v, T_inv, g_cumsum, beta, do, scale, entering.states, leaving.states, first, segments.inner)
    S, dS = reference.backward_states(*args)
    if dh0 is not None:
        dh0.copy_(first[segments.first])
    # Slots are numbered by sequence: chunks are the same, their slots in the segments' numbering are not.
    shape = (seqs.max_slots, *S.shape[1:])
    source, target = (reference.chunk_slots(x, k.device) for x in (segments.inner, seqs))
    S_all, dS_all = S.new_zeros(shape), dS.new_zeros(shape)
    S_all[target], dS_all[target] = S[source], dS[source]
    return S_all, dS_all


def __getattr__(name):
    """The other stages are `reference`'s: chunks are the same split or not."""
    return getattr(reference, name)


def _skip(skipped, *tables):
    """Zeroes the rows of segments whose end state nobody reads."""
    for table in tables:
        table[skipped] = 0
    return tables

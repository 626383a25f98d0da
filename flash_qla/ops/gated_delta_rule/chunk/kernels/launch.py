"""Host-side rules that every kernel wrapper shares: argument views, placeholders, tile and grid choices.

The planner asks the same functions, so a launch rule exists once.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, lru_cache

import torch

from ..sequences import Sequences

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
NATIVE_HEAD_DIMS = (64, 128)


def native_head_dim(head_dim: int) -> int:
    """Returns the smallest natively supported head size that holds `head_dim` (zero padding is exact)."""
    for native in NATIVE_HEAD_DIMS:
        if head_dim <= native:
            return native
    raise NotImplementedError(f"head size {head_dim} is above {NATIVE_HEAD_DIMS[-1]}, the largest of the kernels")


@cache
def placeholder(device: torch.device, dtype: torch.dtype, *trailing: int) -> torch.Tensor:
    """An absent tensor argument: 0 rows, no memory, so it may be kept across CUDA graphs."""
    return torch.empty((0, *trailing), device=device, dtype=dtype)


def present(x: torch.Tensor | None, device: torch.device, dtype: torch.dtype, *trailing: int) -> torch.Tensor:
    """Returns x, or where it is None a `placeholder` for it."""
    return placeholder(device, dtype, *trailing) if x is None else x


def cu_arguments(seqs: Sequences, device: torch.device) -> tuple[torch.Tensor, int, int]:
    """Returns (cu, cu_step, seq_len) as `tiles/program.py` reads them. No launch and no device read.

    Only a `cu_seqlens` that lives on the host costs a copy.
    """
    if not seqs.is_varlen:
        return placeholder(device, torch.int32), 0, seqs.num_tokens
    cu = seqs.cu_seqlens
    if cu.device != device:
        cu = cu.to(device, non_blocking=True)
    if not cu.is_contiguous():
        cu = cu.contiguous()
    return (cu, 1, 0) if cu.dtype == torch.int32 else (cu.view(torch.int32), 2, 0)


def num_segment_slots(seqs: Sequences, segment_chunks: int) -> int:
    """Upper bound of segment slots (`tiles/program.py` numbers them); exact arithmetic, no device read."""
    return seqs.flat_tokens // (segment_chunks * seqs.chunk_size) + seqs.num_seqs


def num_walks(seqs: Sequences, segment_states=None, split=None) -> int:
    """Walks per head that a launch is expected to hold: sequences, or segments of a split."""
    split = split if segment_states is None else segment_states.split
    return seqs.num_seqs if split is None else split.num_segments


def segment_arguments(seqs: Sequences, segment_states, device, num_v_heads: int, head_dim_v: int, head_dim_k: int):
    """Returns (starts, segment_tokens, num_slots) as the walks read them; unsplit where segment_states is None."""
    if segment_states is None:
        return placeholder(device, torch.float32, num_v_heads, head_dim_v, head_dim_k), 0, seqs.num_seqs
    segment_chunks = segment_states.split.segment_chunks
    return segment_states.states, segment_chunks * seqs.chunk_size, num_segment_slots(seqs, segment_chunks)


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """Returns x itself when TMA can read it through its strides, a contiguous copy otherwise.

    TMA wants a unit last stride, every other stride a multiple of 16 bytes, and a base aligned to 16 bytes.
    """
    strides = _tma_strides(x.shape, x.stride(), x.element_size())
    if strides is None or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x if strides is _AS_THEY_ARE else x.as_strided(x.shape, strides)


_AS_THEY_ARE = ()


@lru_cache(maxsize=4096)
def _tma_strides(shape, strides, element_size: int) -> tuple[int, ...] | None:
    """Strides under which TMA reads a tensor: its own (`_AS_THEY_ARE`), others that mean the same, or None.

    Strides of axes of size 1 mean nothing; where they do not suit TMA, all such become those of a contiguous tensor.
    """
    axes = tuple(zip(shape, strides))[:-1]
    if strides[-1] != 1 or any(n != 1 and (stride <= 0 or stride * element_size % 16) for n, stride in axes):
        return None
    if not any(n == 1 and stride * element_size % 16 for n, stride in axes):
        return _AS_THEY_ARE
    mended = list(strides)
    for axis in range(len(shape) - 2, -1, -1):
        if shape[axis] == 1:
            mended[axis] = mended[axis + 1] * shape[axis + 1]
    return tuple(mended)


def on_device(device: torch.device):
    """Context that makes `device` current; nothing (and no cost) when it already is."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


# One chunk's time with one value warpgroup per CTA (64 columns of V) over that with two (measured on an H200).
ONE_WARPGROUP_COST = 0.6


def num_value_warpgroups(num_pairs: int, head_dim_v: int, num_sms: int) -> int:
    """Returns 64-column slices of V per CTA of the fused forward: the count with the shorter schedule.

    One CTA fits a multiprocessor. V split over CTAs is quicker per chunk, but needs twice the CTAs.

    Args:
        num_pairs: (sequence, value head) pairs.
        head_dim_v: native head size.
        num_sms: multiprocessors of the device.
    """
    if head_dim_v < 128:
        return 1
    waves_split, waves_whole = -(-2 * num_pairs // num_sms), -(-num_pairs // num_sms)
    return 1 if waves_split * ONE_WARPGROUP_COST < waves_whole else 2


# Up to this mean length a walk's start and end, which persistent CTAs hide, cost more than their slower chunks (H200).
PERSISTENT_CHUNKS = 32


def has_persistent_walks(seqs: Sequences, num_v_heads: int, warpgroups: int, num_sms: int) -> bool:
    """Whether the fused forward's CTAs take several walks each. Lengths are not known: their mean decides.

    Args:
        seqs: the sequences, unsplit.
        num_v_heads: value heads.
        warpgroups: 64-column slices of V per CTA; with one, and its shorter chunks, nothing was won.
        num_sms: multiprocessors of the device.
    """
    is_short = seqs.flat_tokens <= PERSISTENT_CHUNKS * seqs.chunk_size * seqs.num_seqs
    return warpgroups == 2 and seqs.num_seqs * num_v_heads > num_sms and is_short


# Columns of V per CTA of segment_scan.
SCAN_COLUMNS = 32


# Where segment_ends is quicker with 64 columns per CTA: a chunk takes half as long, but there are twice the CTAs, most
# of which only decide that they have nothing to do. Pairs up to a + b chunks of a segment, on 132 multiprocessors;
# measured on an H200: 64 pairs with 16 chunks and 32 with 8 gain 18 to 24 %, 88 with 12 and 128 with 32 lose 4 to 9 %.
NARROW_ENDS_PAIRS = 44
NARROW_ENDS_PAIRS_PER_CHUNK = 2
# The reverse walk has no transitions: up to so many pairs a multiprocessor the CTAs of the heads that carry, a quarter,
# still run at once, and each takes 0.74 as long (H200: 64 to 128 pairs with 16 to 64 chunks; 264 in whole passes).
NARROW_REVERSE_ENDS_PAIRS_PER_SM = 2


def num_end_warpgroups(
    num_pairs: int, head_dim_k: int, head_dim_v: int, num_sms: int, segment_chunks: int, reverse: bool = False
) -> int:
    """Returns 64-column slices per CTA of segment_ends: of V, and of K where it walks transitions.

    Args:
        num_pairs: (segment, value head) pairs.
        head_dim_k, head_dim_v: native head sizes.
        num_sms: multiprocessors of the device.
        segment_chunks: chunks of a segment.
        reverse: of the reverse walk.
    """
    if min(head_dim_k, head_dim_v) < 128:
        return 1
    if reverse:
        return 1 if num_pairs <= NARROW_REVERSE_ENDS_PAIRS_PER_SM * num_sms else 2
    most = NARROW_ENDS_PAIRS + NARROW_ENDS_PAIRS_PER_CHUNK * segment_chunks
    return 1 if 132 * num_pairs <= most * num_sms else 2

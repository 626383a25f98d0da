"""Host-side rules that every kernel wrapper shares: argument views, placeholders, tile and grid choices.

The planner asks the same functions, so a launch rule exists once.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

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


def tma_ready(x: torch.Tensor) -> torch.Tensor:
    """Returns x itself when TMA can read it through its strides, a contiguous copy otherwise.

    TMA wants a unit last stride, every other stride a multiple of 16 bytes, and a base aligned to 16 bytes.
    """
    size = x.element_size()
    ready = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    for n, stride in zip(x.shape[:-1], x.stride()[:-1]):
        ready = ready and (n == 1 or (stride > 0 and stride * size % 16 == 0))
    if not ready:
        return (
            x.contiguous()
            if x.data_ptr() % 16 == 0 and not x.is_contiguous()
            else x.clone(memory_format=torch.contiguous_format)
        )
    if any(n == 1 and stride * size % 16 for n, stride in zip(x.shape[:-1], x.stride()[:-1])):
        return x.as_strided(x.shape, _row_major_where_single(x))
    return x


def _row_major_where_single(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of x with those of size-1 axes, which mean nothing, replaced by what a contiguous axis would have."""
    strides = list(x.stride())
    for axis in range(x.dim() - 2, -1, -1):
        if x.shape[axis] == 1:
            strides[axis] = strides[axis + 1] * x.shape[axis + 1]
    return tuple(strides)


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

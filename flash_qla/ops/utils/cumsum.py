"""Cumulative gates, restarting in each chunk."""

import torch

from flash_qla.ops.gated_delta_rule.chunk import reference
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences


def chunk_local_cumsum(
    g: torch.Tensor, chunk_size: int = 64, reverse: bool = False, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums g over the tokens of each chunk; chunks restart at every sequence. Not differentiable.

    Args:
        g: `[B, T, H]`, any float dtype (natural log when it is a gate; the values are not clamped).
        chunk_size: tokens of a chunk, at least 1.
        reverse: sums from the chunk's end instead of its start.
        cu_seqlens: `[N + 1]` int32 or int64 offsets of packed sequences; needs B = 1.

    Returns:
        float32 `[B, T, H]`; rows of no sequence are zero.

    Raises:
        ValueError: a shape or a chunk size that is not as above.
    """
    if g.dim() != 3:
        raise ValueError(f"g must be [B, T, H], got shape {tuple(g.shape)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if cu_seqlens is not None and g.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs g with B = 1 (packed sequences), got B = {g.shape[0]}")
    seqs = Sequences.build(g.shape[0], g.shape[1], chunk_size, cu_seqlens)
    return reference.cumsum(g, seqs, reverse).float()

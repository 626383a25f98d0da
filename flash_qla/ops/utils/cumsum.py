"""Cumulative gates, restarting in each chunk."""

from numbers import Integral

import torch

from flash_qla.ops.gated_delta_rule.chunk import reference
from flash_qla.ops.gated_delta_rule.chunk.problem import Problem, check_flags, require_tensor
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
from flash_qla.utils.guards import reject_transforms


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
        ValueError: an argument that is not as above.
    """
    check_flags(reverse=reverse)
    require_tensor("g", g, 3, "[B, T, H]")
    if not g.is_floating_point() or g.device.type == "meta":
        raise ValueError(f"g must be of a floating-point dtype, on a CPU or a GPU, got {g.dtype} on {g.device}")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, Integral) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer, at least 1, got {chunk_size!r}")
    Problem.check_cu_seqlens(g.shape[0], g.device, cu_seqlens)
    reject_transforms("chunk_local_cumsum", g, cu_seqlens)
    chunk_size = min(int(chunk_size), max(g.shape[1], 1))  # memory is taken for whole chunks
    seqs = Sequences.build(g.shape[0], g.shape[1], chunk_size, cu_seqlens)
    return reference.cumsum(g, seqs, reverse).float()

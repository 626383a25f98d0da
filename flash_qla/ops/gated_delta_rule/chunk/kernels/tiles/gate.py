"""The gates of one chunk for four neighbouring heads inside one warp: load, clamp, cumulative sum.

Lane = 4 u + h holds head h's rows u, u + 8, … u + 56: a load or store of the warp touches 8 rows of 16 bytes, which is
how `[B, T, H]` tensors lie in memory (a warp a head would touch 32 sectors for the same). The scan is shuffles only and
needs no barrier: any warp of any role may call it.
"""

import tilelang.language as T

from ...constants import GATE_FLOOR

LOG2E = 1.4426950408889634
HEADS = 4
STEPS = 8  # of 8 rows


@T.macro
def load_rows(values, source, batch, start, first_head, heads, rows, lane):
    """values[i] = source[batch, start + 8 i + lane // 4, first_head + lane % 4] in fp32, zero past the chunk's end.

    No branch: rows and heads are at least 1, and what would lie past them is read from the last one.
    """
    for i in T.unroll(STEPS):
        values[i] = T.cast(
            source[batch, start + T.min(8 * i + lane // 4, rows - 1), first_head + T.min(lane % 4, heads - 1)],
            "float32",
        )
    for i in T.unroll(STEPS):
        values[i] = T.if_then_else(8 * i + lane // 4 < rows, values[i], 0.0)


@T.macro
def store_rows(target, values, batch, start, first_head, heads, rows, lane):
    """target[batch, start + 8 i + lane // 4, first_head + lane % 4] = values[i] for the chunk's own rows."""
    for i in T.unroll(STEPS):
        if 8 * i + lane // 4 < rows and lane % 4 < heads:
            target[batch, start + 8 * i + lane // 4, first_head + lane % 4] = values[i]


@T.macro
def clamped_cumsum(values, lane):
    """values = inclusive sums over each head's 64 rows of max(values, GATE_FLOOR). Equations: F0, F1.

    Rows past the chunk's end must be zero: they take the last valid row's sum.
    """
    other = T.alloc_var("float32")
    for i in T.unroll(STEPS):
        values[i] = T.max(values[i], GATE_FLOOR)
    for shift in (4, 8, 16):
        for i in T.unroll(STEPS):
            other = T.shfl_up(values[i], shift)
            values[i] = values[i] + T.if_then_else(lane >= shift, other, 0.0)
    for i in T.unroll(STEPS - 1):
        values[i + 1] = values[i + 1] + T.shfl_sync(values[i], 28 + lane % 4)

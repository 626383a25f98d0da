"""Ragged ends: the rows of a tile that belong to no token of the sequence, and the rows of a tensor in no sequence.

A TMA tile that reaches past a packed sequence's end holds the next sequence's rows, which may be NaN. Nothing of them
may reach a result, and zero times NaN is NaN: they are overwritten in shared memory before anything is accumulated.
"""

import tilelang.language as T

from .program import offset


@T.macro
def store_rows(target, tile, batch, left, head, col, count, cols):
    """target[batch, left + i, head, col:] = tile[i, :] for the first `count` of the tile's rows."""
    for i in T.serial(count):
        for j in T.Parallel(cols):
            target[batch, left + i, head, col + j] = tile[i, j]


@T.macro
def zero_tail(target, cu, cu_step, seq_len, flat_tokens, num_seqs, n, head, col, cols):
    """Zeros in a packed tensor's rows after the last sequence; sequence n's CTA takes every num_seqs-th of them."""
    if cu_step != 0:
        row = T.alloc_var("int32")
        row = offset(cu, cu_step, seq_len, flat_tokens, num_seqs) + n
        while row < flat_tokens:
            for j in T.Parallel(cols):
                target[0, row, head, col + j] = 0
            row = row + num_seqs


@T.macro
def zero_whole_tail(target, cu, cu_step, seq_len, flat_tokens, num_seqs, first, step, num_heads, cols):
    """Zeros in a packed tensor's rows after the last sequence: all heads of every step-th of them."""
    if cu_step != 0:
        row = T.alloc_var("int32")
        row = offset(cu, cu_step, seq_len, flat_tokens, num_seqs) + first
        while row < flat_tokens:
            for head in T.serial(num_heads):
                for j in T.Parallel(cols):
                    target[0, row, head, j] = 0
            row = row + step


SOURCE = r"""
namespace flash_qla {
__device__ __forceinline__ void prefetch(void const* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
}  // namespace flash_qla
"""


def prefetch(element):
    """Call expression: brings a global element's line closer. Costs no register while it is under way."""
    return T.call_extern("void", "flash_qla::prefetch", T.address_of(element))


def zero_stage_from(ring, stage, first, cols):
    """Call expression: ring[stage, first:, :] = 0 (64 rows) by one warpgroup; needs `fragments.LEAN_SOURCE`.

    "r" although it stores: TileLang would fence the role's next wgmma on every path. The caller fences.
    """
    tile = ring.access_ptr("r", offset=stage * (64 * cols))
    return T.call_extern("void", "flash_qla::zero_rows_from", tile, first, cols // 64)

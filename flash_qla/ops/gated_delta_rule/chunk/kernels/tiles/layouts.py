"""Register and shared-memory layouts that the compiler does not find by itself."""

import tilelang
import tilelang.language as T


def swizzled(*buffers):
    """Annotation dict: 128-byte swizzle, free of bank conflicts for ldmatrix/stmatrix and what TMA and wgmma expect.

    A dict in argument order: a set's order would change the generated code and with it the cache key.
    """
    return {buffer: tilelang.layout.make_swizzled_layout(buffer) for buffer in buffers}


def transposed_accumulator(rows: int, cols: int = 64):
    """Fragment layout `[rows, cols]` that holds the transpose of a `cols x rows` wgmma accumulator of one warpgroup.

    With it `T.copy(smem, fragment)` becomes ldmatrix.trans and `T.copy(fragment, smem)` stmatrix.trans, and moving
    between `fragment[j, i]` and `accumulator[i, j]` stays inside a thread's registers.
    """
    return T.Fragment(
        [rows, cols],
        forward_thread_fn=lambda j, i: (i // 16) * 32 + (i % 8) * 4 + (j % 8) // 2,
        forward_index_fn=lambda j, i: (j // 8) * 4 + ((i % 16) // 8) * 2 + j % 2,
    )

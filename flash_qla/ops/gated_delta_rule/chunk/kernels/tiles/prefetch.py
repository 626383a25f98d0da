"""Tiles on their way from memory to the L2 cache, before there is room for them in shared memory."""

import tilelang.language as T

from ...constants import CHUNK_SIZE

TMA_16_BIT, TMA_L2_128 = 1, 2  # CUtensorMap enumerators

SOURCE = r"""
namespace flash_qla {
template <class Tensor>
__device__ __forceinline__ void prefetch_tile(Tensor const& tensor, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];"
               ::"l"(&tensor), "r"(0), "r"(row), "r"(head), "r"(batch) : "memory");
}
}  // namespace flash_qla
"""


def tile(x, batch, start, head):
    """Call expression: x[batch, start : start + C, head] (16 bits, run-time strides) to L2, by one thread."""
    batch_size, num_tokens, num_heads, head_dim = x.shape
    descriptor = T.create_tma_descriptor(
        TMA_16_BIT, 4, x.data,
        head_dim, num_tokens, num_heads, batch_size,
        2, 2 * x.strides[1], 2 * x.strides[2], 2 * x.strides[0],
        head_dim, CHUNK_SIZE, 1, 1,
        1, 1, 1, 1,
        0, 0, TMA_L2_128, 0,
    )  # fmt: skip
    return T.call_extern("handle", "flash_qla::prefetch_tile", descriptor, start, head, batch)

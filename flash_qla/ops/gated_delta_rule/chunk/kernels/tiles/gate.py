"""The gates of one chunk for four neighbouring heads inside one warp: load, clamp, cumulative sum.

Lane l holds rows 2 l and 2 l + 1: values[4 r + h] is head h's row 2 l + r. Where the four heads lie side by side a row
is one load or store of the lane, which is how `[B, T, H]` tensors lie in memory. The scan is shuffles only and needs no
barrier: any warp of any role may call it. Kernels that use these macros import SOURCE.
"""

import tilelang.language as T

from ...constants import GATE_FLOOR

LOG2E = 1.4426950408889634
HEADS = 4
ROWS = 2  # of a lane

SOURCE = r"""
namespace flash_qla {
// v[0:4] = four neighbouring heads of a row; the last one that exists stands in for those that do not.
template <class E>
__device__ __forceinline__ void load_heads(float* v, E const* p, int stride, int heads) {
  E x[4];
  if (stride == 1 && heads == 4 && ((unsigned long long)p & (4 * sizeof(E) - 1)) == 0) {
    if constexpr (sizeof(E) == 4) *(uint4*)x = *(uint4 const*)p;
    else *(uint2*)x = *(uint2 const*)p;
  } else {
#pragma unroll
    for (int h = 0; h < 4; ++h) x[h] = p[(long long)min(h, heads - 1) * stride];
  }
#pragma unroll
  for (int h = 0; h < 4; ++h) v[h] = (float)x[h];
}
__device__ __forceinline__ void store_heads(float* p, float const* v, int heads) {
  if (heads == 4 && ((unsigned long long)p & 15) == 0) {
    *(float4*)p = *(float4 const*)v;
  } else {
#pragma unroll
    for (int h = 0; h < 4; ++h)
      if (h < heads) p[h] = v[h];
  }
}
// v = inclusive sums over the rows, head by head.
__device__ __forceinline__ void sum_rows(float* v) {
#pragma unroll
  for (int h = 0; h < 4; ++h) {
    float sum = v[h] + v[4 + h], before;
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
      asm volatile("{ .reg .pred p; .reg .f32 t; shfl.sync.up.b32 t|p, %0, %1, 0, -1; @p add.f32 %0, %0, t; }"
                   : "+f"(sum) : "r"(d));
    asm volatile("{ .reg .pred p; shfl.sync.up.b32 %0|p, %1, 1, 0, -1; @!p mov.f32 %0, 0f00000000; }"
                 : "=f"(before) : "f"(sum));
    v[h] += before;
    v[4 + h] = sum;
  }
}
}  // namespace flash_qla
"""


@T.macro
def load_rows(values, source, batch, start, first_head, heads, rows, head_stride):
    """values = source[batch, start:, first_head:] in fp32; past the chunk's end its last row. rows, heads >= 1."""
    lane = T.get_thread_binding() % 32
    for r in tuple(range(ROWS)):
        row = start + T.min(2 * lane + r, rows - 1)
        T.call_extern(
            "handle", "flash_qla::load_heads", T.address_of(values[HEADS * r]),
            T.address_of(source[batch, row, first_head]), head_stride, heads,
        )  # fmt: skip


@T.macro
def store_rows(target, values, batch, start, first_head, heads, rows):
    """target[batch, start:, first_head:] (contiguous, fp32) = values for the chunk's own rows."""
    lane = T.get_thread_binding() % 32
    for r in tuple(range(ROWS)):
        if 2 * lane + r < rows:
            T.call_extern(
                "handle", "flash_qla::store_heads", T.address_of(target[batch, start + 2 * lane + r, first_head]),
                T.address_of(values[HEADS * r]), heads,
            )  # fmt: skip


@T.macro
def clamped_cumsum(values, rows):
    """values = inclusive sums over each head's rows of max(values, GATE_FLOOR). Equations: F0, F1.

    Rows past the chunk's end take the last valid row's sum.
    """
    lane = T.get_thread_binding() % 32
    for r in T.unroll(ROWS):
        for h in T.unroll(HEADS):
            values[HEADS * r + h] = T.if_then_else(2 * lane + r < rows, T.max(values[HEADS * r + h], GATE_FLOOR), 0.0)
    T.call_extern("handle", "flash_qla::sum_rows", T.address_of(values[0]))

"""A ready T (tiles/inverse.py) on its way to two operands: as it stands and with a factor for each column.

In CUDA for the reasons of `scores.py`, whose conventions hold: a tile goes through registers 16 columns at a time.
"""

import tilelang.language as T

from .scores import PAIR, TILE, UNPACK

_SOURCE = r"""
namespace flash_qla {
__device__ __forceinline__ unsigned pack(float x, float y) {
  unsigned r;
  asm("cvt.rn.%(pair)s.f32 %%0, %%1, %%2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
%(unpack)s
// operand = tile, tile *= factors by columns; exchanged where `exchange`. The upper right quarter, which solve does not
// write, counts as zero. Every warp reads and writes rows of its own.
__device__ __forceinline__ void split_ready(void* operand, void const* tile, void const* factors, int exchange) {
  unsigned* a = (unsigned*)operand;
  unsigned thread = thread_index(), row = ((thread >> 5) & 3) * 16 + (thread & 15);
  unsigned address = (unsigned)__cvta_generic_to_shared(tile) + row * 128 + ((((thread >> 4) & 1) ^ (row & 7)) << 4);
  float2 const* columns = (float2 const*)factors + (thread & 3);
  bool upper = (thread & 64) == 0;
#pragma unroll
  for (int c = 0; c < 4; ++c)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%%0, %%1, %%2, %%3}, [%%4];"
                 : "=r"(a[4 * c]), "=r"(a[4 * c + 1]), "=r"(a[4 * c + 2]), "=r"(a[4 * c + 3])
                 : "r"(address ^ (c << 5)) : "memory");
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    unsigned r[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      unsigned x = c >= 2 && upper ? 0 : a[4 * c + n];
      float2 y = unpack(x), by = columns[8 * c + 4 * (n >> 1)];
      unsigned scaled = pack(y.x * by.x, y.y * by.y);
      a[4 * c + n] = exchange ? scaled : x;
      r[n] = exchange ? x : scaled;
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%%0], {%%1, %%2, %%3, %%4};"
                 :: "r"(address ^ (c << 5)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
}
}  // namespace flash_qla
"""


def source(dtype: str) -> str:
    """The CUDA function below for tiles of a dtype (needs fragments.LEAN_SOURCE)."""
    return _SOURCE % {"pair": PAIR[dtype], "unpack": UNPACK[dtype]}


def split(operand, ring, stage, factors, exchange):
    """Call expression: operand = ring[stage], and ring[stage] = ring[stage] diag(factors[stage]), by one warpgroup.

    operand: 64 x 64 A operand. exchange: the two results change places.
    """
    return T.call_extern(
        "void",
        "flash_qla::split_ready",
        operand.access_ptr("w"),
        ring.access_ptr("r", offset=stage * TILE),
        factors.access_ptr("r", offset=stage * 64),
        exchange,
    )

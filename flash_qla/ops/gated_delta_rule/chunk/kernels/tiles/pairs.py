"""Accumulators of one warpgroup on their way to 16 bits: the gated, causal P, and tiles of shared memory."""

import tilelang.language as T

_TYPES = {"bfloat16": "bf16", "float16": "f16"}

_SOURCE = r"""
namespace flash_qla {
__device__ __forceinline__ unsigned rounded_pair(float low, float high) {
  unsigned pair;
  asm volatile("cvt.rn.TYPEx2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned gated_pair(float first, float second, float row, float2 columns, bool keep_first,
                                               bool keep_second) {
  float x, y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(row - columns.x));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(row - columns.y));
  return rounded_pair(keep_first ? first * x : 0.f, keep_second ? second * y : 0.f);
}
// Blocks of 16 columns right of a warp's rows are zero, those left of them need no mask.
__device__ __forceinline__ void gate_pairs(void* operand, float const* P, void const* gates, float shift,
                                           int negate) {
  unsigned* r = (unsigned*)operand;
  unsigned thread = thread_index(), row = (thread >> 2) & 7, column = (thread & 3) * 2;
  int warp = (thread >> 5) & 3;
  float const* rows = (float const*)gates + warp * 16 + row;
  float upper = rows[0] + shift, lower = rows[8] + shift;
  float2 const* columns = (float2 const*)gates + (thread & 3);
  bool first = column <= row, second = column < row;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    unsigned* o = r + 4 * block;
    float const* p = P + 8 * block;
    if (block < warp) {
      float2 left = columns[8 * block], right = columns[8 * block + 4];
      o[0] = gated_pair(p[0], p[1], upper, left, true, true);
      o[1] = gated_pair(p[2], p[3], lower, left, true, true);
      o[2] = gated_pair(p[4], p[5], upper, right, true, true);
      o[3] = gated_pair(p[6], p[7], lower, right, true, true);
    } else if (block == warp) {
      float2 left = columns[8 * block], right = columns[8 * block + 4];
      o[0] = gated_pair(p[0], p[1], upper, left, first, second);
      o[1] = gated_pair(p[2], p[3], lower, left, true, true);
      o[2] = 0;
      o[3] = gated_pair(p[6], p[7], lower, right, first, second);
    } else {
      o[0] = o[1] = o[2] = o[3] = 0;
    }
  }
  if (negate)
#pragma unroll
    for (int i = 0; i < 16; ++i) r[i] ^= 0x80008000u;
}
__device__ __forceinline__ void store_rounded(void* tile, float const* a) {
  unsigned thread = thread_index(), row = ((thread >> 5) & 3) * 16 + (thread & 15);
  unsigned address = (unsigned)__cvta_generic_to_shared(tile) + row * 128 + ((((thread >> 4) & 1) ^ (row & 7)) << 4);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    unsigned r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = rounded_pair(a[8 * c + 2 * i], a[8 * c + 2 * i + 1]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address ^ (c << 5)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  }
}
}  // namespace flash_qla
"""


def source(dtype: str) -> str:
    """The CUDA functions below for operands of a dtype (needs fragments.LEAN_SOURCE)."""
    return _SOURCE.replace("TYPE", _TYPES[dtype])


def gate_pairs(operand, accumulator, gates, stage, shift, negate):
    """Call expression: operand[i, j] = accumulator[i, j] 2^(gates_i - gates_j + shift) for i >= j, 0 above, rounded.

    Args:
        operand: 64 x 64 A operand of one warpgroup.
        accumulator: 64 x 64, of the same warpgroup.
        gates: ring of 64 floats; only differences with i >= j are made.
        stage: of the ring.
        shift: float32.
        negate: int32, whether the result is negated.
    """
    return T.call_extern(
        "void",
        "flash_qla::gate_pairs",
        operand.access_ptr("w"),
        accumulator.access_ptr("r"),
        gates.access_ptr("r", offset=stage * 64),
        shift,
        negate,
    )


def store_rounded(ring, stage, accumulator, col=0):
    """Call expression: ring[stage, :, col : col + 64] = a 64 x 64 accumulator, rounded.

    "r" although it stores, as in `fragments`: the caller fences before it hands over.
    """
    target = ring.access_ptr("r", offset=stage * (64 * int(ring.shape[2])) + col)
    return T.call_extern("void", "flash_qla::store_rounded", target, accumulator.access_ptr("r"))

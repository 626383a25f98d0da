"""What the scores warpgroup of the fused forward does to 64 x 64 tiles in shared memory, between ldmatrix and stmatrix.

Written in CUDA: TileLang would load row factors one by one, under a predicate each, and branch per element. A thread
holds rows 16 w + l / 4 and 8 below (w: its warp, l: its lane), and two columns of every eight: 2 (l % 4) and the next.
Sources need `fragments.LEAN_SOURCE`. Calls pass pointers as "r" although they store: TileLang would fence the role's
next wgmma. The caller fences before another role's wgmma reads the tile.
"""

import tilelang.language as T

TILE = 64 * 64
TEMPLATE = r"""
namespace flash_qla {
__device__ __forceinline__ unsigned pack(float x, float y) {
  unsigned r;
  asm("cvt.rn.%(pair)s.f32 %%0, %%1, %%2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
%(unpack)s
__device__ __forceinline__ void load_matrices(unsigned* r, unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%%0, %%1, %%2, %%3}, [%%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_matrices(unsigned address, unsigned const* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%%0], {%%1, %%2, %%3, %%4};"
               :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// The thread's 16 columns of a row of factors.
__device__ __forceinline__ void load_factors(void* out, void const* factors) {
  float2* o = (float2*)out;
  float2 const* by = (float2 const*)factors + (threadIdx.x & 3);
#pragma unroll
  for (int n = 0; n < 8; ++n) o[n] = by[4 * n];
}
// W = U + V factor, or U factor - V where strong: a 64 x 64 accumulator, V and W its operand's 16-bit pairs, in place.
template <int STRONG>
__device__ __forceinline__ void make_writes(void* writes, void const* product, void const* factors) {
  unsigned* w = (unsigned*)writes;
  float const* U = (float const*)product;
  float2 const* by = (float2 const*)factors;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    float2 v = unpack(w[n]), f = by[n >> 1];
    if constexpr (STRONG) w[n] = pack(U[2 * n] * f.x - v.x, U[2 * n + 1] * f.y - v.y);
    else w[n] = pack(v.x * f.x + U[2 * n], v.y * f.y + U[2 * n + 1]);
  }
}
// tile = transpose of a 64 x 64 fragment.
__device__ __forceinline__ void store_transposed(void const* tile, void const* fragment) {
  unsigned const* r = (unsigned const*)fragment;
  unsigned thread = thread_index(), row = ((thread >> 1) & 8) + (thread & 7);
  unsigned group = ((thread >> 5) & 3) * 2 + ((thread >> 3) & 1);
  unsigned address = (unsigned)__cvta_generic_to_shared(tile) + row * 128 + ((group ^ (row & 7)) << 4);
#pragma unroll
  for (int c = 0; c < 4; ++c)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%%0], {%%1, %%2, %%3, %%4};"
                 :: "r"(address + c * 2048), "r"(r[4 * c]), "r"(r[4 * c + 1]), "r"(r[4 * c + 2]), "r"(r[4 * c + 3])
                 : "memory");
}
// Zeros in t's upper right quarter, whatever it holds: solve need not have written it.
__device__ __forceinline__ void zero_quarter(void const* t) {
  unsigned thread = thread_index(), row = (thread >> 2) & 31, piece = (4 + (thread & 3)) ^ (row & 7);
  *(uint4*)((char*)t + row * 128 + piece * 16) = make_uint4(0, 0, 0, 0);
}
// t = t * row factor * column factor, in place; row factors of a strong chunk are -1. A step's ldmatrix is issued
// before the last one's arithmetic. The upper right quarter becomes zero.
__device__ __forceinline__ void scale_inverse(void const* t, void const* row_factors, void const* col_factors,
                                              int strong) {
  unsigned thread = thread_index(), row = ((thread >> 5) & 3) * 16;
  unsigned offset = (row + (thread & 15)) * 128 + ((((thread >> 4) & 1) ^ (thread & 7)) << 4);
  unsigned from = (unsigned)__cvta_generic_to_shared(t) + offset;
  float const* rows = (float const*)row_factors + row + ((thread >> 2) & 7);
  float2 const* cols = (float2 const*)col_factors + (thread & 3);
  float factor[2] = {strong ? -1.f : rows[0], strong ? -1.f : rows[8]};
  unsigned r[4], next[4];
  load_matrices(next, from);
#pragma unroll @UNROLL@
  for (int c = 0; c < 4; ++c) {
    float2 by[2] = {cols[8 * c], cols[8 * c + 4]};
#pragma unroll
    for (int n = 0; n < 4; ++n) r[n] = next[n];
    if (c < 3) load_matrices(next, from ^ ((c + 1) << 5));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float2 x = unpack(r[n]);
      r[n] = pack(x.x * (factor[n & 1] * by[n >> 1].x), x.y * (factor[n & 1] * by[n >> 1].y));
      if (c >= 2 && row < 32) r[n] = 0;
    }
    store_matrices(from ^ (c << 5), r);
  }
}
// tile = tril(P), times exp2(g_j - g_t) where strong. j: the thread's two rows, t: its 16 columns.
__device__ __forceinline__ void store_scores(void const* tile, void const* product, void const* gates, int strong) {
  float* P = (float*)product;  // the next product overwrites it
  unsigned thread = thread_index(), row = ((thread >> 5) & 3) * 16;
  unsigned address = (unsigned)__cvta_generic_to_shared(tile) + (row + (thread & 15)) * 128 +
                     ((((thread >> 4) & 1) ^ (thread & 7)) << 4);
  // Of the lane's two elements in an 8 x 8 block on the diagonal, those that stay.
  int ahead = ((thread >> 2) & 7) - 2 * (thread & 3);
  unsigned diagonal = (ahead >= 0 ? 0xffffu : 0u) | (ahead >= 1 ? 0xffff0000u : 0u);
  if (strong) {
    float const* g_row = (float const*)gates + row + ((thread >> 2) & 7);
    float2 const* g_col = (float2 const*)gates + (thread & 3);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      float g = g_row[8 * (n & 1)];
      float2 other = g_col[4 * (n >> 1)];
      P[2 * n] *= exp2f(fminf(g - other.x, 126.0f));
      P[2 * n + 1] *= exp2f(fminf(g - other.y, 126.0f));
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    unsigned r[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) r[n] = pack(P[8 * c + 2 * n], P[8 * c + 2 * n + 1]);
    bool below = row > 16 * c, reached = row >= 16 * c;  // the diagonal, by this block of 16 columns
    unsigned mask = below ? ~0u : reached ? diagonal : 0u;
    r[0] &= mask;
    r[3] &= mask;
    if (!reached) r[1] = 0;
    if (!below) r[2] = 0;
    store_matrices(address ^ (c << 5), r);
  }
}
}  // namespace flash_qla
"""
GATES = r"""
namespace flash_qla {
// out = gates of a chunk's row, of the row 32 away, of the last one, and the row's beta (0 past the chunk's end).
// Offsets of 32 bits from one address of 64: written as indices they took more registers than the role has.
template <class Beta>
__device__ __forceinline__ void load_gates(float* out, float const* g, int g_stride, Beta const* beta,
                                           long long beta_stride, int row, int last) {
  int at = min(row, last);
  out[0] = g[at * g_stride];
  out[1] = g[min((row + 32) & 63, last) * g_stride];
  out[2] = g[last * g_stride];
  float b = (float)beta[at * beta_stride];
  out[3] = row <= last ? b : 0.f;
}
}  // namespace flash_qla
"""
PAIR = {"bfloat16": "bf16x2", "float16": "f16x2"}
UNPACK = {
    "bfloat16": r"""__device__ __forceinline__ float2 unpack(unsigned x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}""",
    "float16": r"""__device__ __forceinline__ float2 unpack(unsigned x) {
  float2 f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f.x) : "h"((unsigned short)x));
  asm("cvt.f32.f16 %0, %1;" : "=f"(f.y) : "h"((unsigned short)(x >> 16)));
  return f;
}""",
}


def source(dtype, unroll):
    """CUDA text for tiles of dtype; `unroll` steps of `scale_inverse` at once (registers against latency)."""
    text = TEMPLATE % {"pair": PAIR[dtype], "unpack": UNPACK[dtype]}
    return text.replace("@UNROLL@", str(unroll)) + GATES


def load_gates(out, g_cumsum, beta, batch, left, head, row, last):
    """Call expression: out = gate of row min(row, last) of the chunk at `left`, of the row 32 away, of `last`; beta.

    g_cumsum: `[B, T, Hv]` contiguous. beta: any strides.
    """
    return T.call_extern(
        "void", "flash_qla::load_gates", T.address_of(out[0]), T.address_of(g_cumsum[batch, left, head]),
        g_cumsum.shape[2], T.address_of(beta[batch, left, head]), beta.strides[1], row, last,
    )  # fmt: skip


def load_factors(out, factors, slot):
    """Call expression: out (16 numbers) = this thread's columns of factors[slot], for `make_writes`."""
    return T.call_extern(
        "void", "flash_qla::load_factors", out.access_ptr("w"), factors.access_ptr("r", offset=slot * 64)
    )


def make_writes(operand, product, factors, strong):
    """Call expression: operand = product + operand diag(factors), or product diag(factors) - operand.

    factors: from `load_factors`.

    strong: static, which of the two. One 64 x 64 accumulator and operand for each warpgroup.
    """
    return T.call_extern(
        "void",
        f"flash_qla::make_writes<{strong:d}>",
        operand.access_ptr("rw"),
        product.access_ptr("r"),
        factors.access_ptr("r"),
    )


def zero_quarter(ring, stage):
    """Call expression: zeros in the upper right 32 x 32 of ring[stage], by one warpgroup."""
    return T.call_extern("void", "flash_qla::zero_quarter", ring.access_ptr("r", offset=stage * TILE))


def scale_inverse(ring, stage, row_factors, col_factors, slot, strong):
    """Call expression: ring[stage] = diag(row_factors[slot]) ring[stage] diag(col_factors[slot]) by one warpgroup.

    strong: row factors are -1.
    """
    return T.call_extern(
        "void",
        "flash_qla::scale_inverse",
        ring.access_ptr("r", offset=stage * TILE),
        row_factors.access_ptr("r", offset=slot * 64),
        col_factors.access_ptr("r", offset=slot * 64),
        T.cast(strong, "int32"),
    )


def store(ring, stage, product, gates, slot, strong):
    """Call expression: ring[stage] = tril(product), times exp2(g_j - g_t) where strong, by one warpgroup.

    product: fp32 accumulator of the warpgroup; lost. gates: cumulative log2 gates, slots of 64.
    """
    return T.call_extern(
        "void",
        "flash_qla::store_scores",
        ring.access_ptr("r", offset=stage * TILE),
        product.access_ptr("r"),
        gates.access_ptr("r", offset=slot * 64),
        T.cast(strong, "int32"),
    )


def store_transposed(ring, tile, fragment):
    """Call expression: columns 64 tile to 64 tile + 63 of ring = a 64 x 64 fragment transposed, by one warpgroup."""
    return T.call_extern(
        "void", "flash_qla::store_transposed", ring.access_ptr("r", offset=tile * 64), fragment.access_ptr("r")
    )

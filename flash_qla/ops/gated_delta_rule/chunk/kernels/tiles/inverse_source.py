"""CUDA functions of inverse.py: splitting into two bf16 terms, products of the terms, packing, storing."""

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace flash_qla {
__device__ __forceinline__ unsigned pair_of(float x, float y) {
  __nv_bfloat162 p = __float22bfloat162_rn(make_float2(x, y));
  return *(unsigned*)&p;
}
// The lane's pair of an 8 x 8 block -I, as a right operand.
__device__ __forceinline__ unsigned minus_one() {
  unsigned lane = threadIdx.x & 31, u = lane >> 2, w = (lane & 3) * 2;
  return (w == u ? 0xbf80u : 0u) | (w + 1 == u ? 0xbf800000u : 0u);
}
// rest = block - (a0 above a1), 16 x 8, by the tensor core: exact, and two instructions a block instead of sixteen.
__device__ __forceinline__ void subtract(float* rest, float c0, float c1, float c2, float c3, unsigned a0, unsigned a1,
                                         unsigned minus) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=f"(rest[0]), "=f"(rest[1]), "=f"(rest[2]), "=f"(rest[3])
      : "r"(a0), "r"(a1), "r"(minus), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
__device__ __forceinline__ void mma(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void split_left(void* high, void* low, float const* x, unsigned minus) {
  unsigned *h = (unsigned*)high, *l = (unsigned*)low;
#pragma unroll
  for (int i = 0; i < 4; ++i) h[i] = pair_of(x[2 * i], x[2 * i + 1]);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    float rest[4];
    subtract(rest, x[4 * s], x[4 * s + 1], x[4 * s + 2], x[4 * s + 3], h[2 * s], h[2 * s + 1], minus);
    l[2 * s] = pair_of(rest[0], rest[1]);
    l[2 * s + 1] = pair_of(rest[2], rest[3]);
  }
}
__device__ __forceinline__ void split_right(void* high, void* low, float const* x, unsigned minus) {
  unsigned *h = (unsigned*)high, *l = (unsigned*)low;
#pragma unroll
  for (int i = 0; i < 4; ++i) h[i % 2 * 2 + i / 2] = pair_of(x[2 * i], x[2 * i + 1]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float rest[4];
    subtract(rest, x[2 * r], x[2 * r + 1], x[4 + 2 * r], x[5 + 2 * r], h[2 * r], h[2 * r + 1], minus);
    l[2 * r] = pair_of(rest[0], rest[1]);
    l[2 * r + 1] = pair_of(rest[2], rest[3]);
  }
}
__device__ __forceinline__ void add_product(float* c, void const* lh, void const* ll, void const* rh, void const* rl) {
  unsigned const *a = (unsigned const*)lh, *al = (unsigned const*)ll;
  unsigned const *b = (unsigned const*)rh, *bl = (unsigned const*)rl;
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(c + 4 * n, al[0], al[1], al[2], al[3], b[2 * n], b[2 * n + 1]);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(c + 4 * n, a[0], a[1], a[2], a[3], bl[2 * n], bl[2 * n + 1]);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma(c + 4 * n, a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1]);
}
// Two pairs; high terms are cut: no operand of another split of the same values is gathered from here, move by move.
__device__ __forceinline__ void split_pairs(unsigned* h, unsigned* l, float const* x, unsigned minus) {
#pragma unroll
  for (int e = 0; e < 2; ++e) h[e] = __byte_perm(__float_as_uint(x[2 * e]), __float_as_uint(x[2 * e + 1]), 0x7632);
  float rest[4];
  subtract(rest, x[0], x[1], x[2], x[3], h[0], h[1], minus);
  l[0] = pair_of(rest[0], rest[1]);
  l[1] = pair_of(rest[2], rest[3]);
}
__device__ __forceinline__ void twin_product(float* c, unsigned const* lh, unsigned const* ll, unsigned const* rh,
                                             unsigned const* rl) {
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  c[0] = c[1] = c[2] = c[3] = 0.f;
  mma(d, ll[0], 0, 0, ll[1], rh[0], rh[1]);
  mma(c, lh[0], 0, 0, lh[1], rl[0], rl[1]);
  mma(c, lh[0], 0, 0, lh[1], rh[0], rh[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += d[i];
}
// Of two diagonal 16 x 16 blocks: x10t = X10 transposed, x10, from pairs of X0 transposed, N10 and X1.
__device__ __forceinline__ void merge_8(float* x10t, float* x10, float const* first_t, float const* n10,
                                        float const* second, unsigned minus) {
  unsigned ah[2], al[2], bh[2], bl[2], ch[2], cl[2], yh[2], yl[2];
  float yt[4];
  split_pairs(ah, al, first_t, minus);
  split_pairs(bh, bl, n10, minus);
  split_pairs(ch, cl, second, minus);
  twin_product(yt, ah, al, bh, bl);
  split_pairs(yh, yl, yt, minus);
  twin_product(x10t, yh, yl, ch, cl);
  twin_product(x10, ch, cl, yh, yl);
}
// Rows of a chunk that is not full, 16 bytes a lane; target: its first one.
__device__ __forceinline__ void store_rows(void* target, int token_words, float const* tile, int rows, int full) {
  unsigned lane = thread_index() & 31, piece = lane & 7;
#pragma unroll 1
  for (int row = lane >> 3; row < rows; row += 4) {
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row >= 32) value = *(uint4 const*)(tile + (row - 32) * 32 + ((piece ^ (row & 7)) * 4));
    else if (piece < 4) value = *(uint4 const*)(tile + 1024 + row * 16 + ((piece ^ ((row >> 1) & 3)) * 4));
    else if (full == 0) continue;
    *(uint4*)((unsigned*)target + (long long)row * token_words + piece * 4) = value;
  }
}
__device__ __forceinline__ void load_operand(void* high, void* low, float const* block, int lane) {
  *(uint4*)high = *(uint4 const*)(block + lane * 4);
  *(uint4*)low = *(uint4 const*)(block + 128 + lane * 4);
}
template <int BFLOAT, int TRANSPOSED>
__device__ __forceinline__ void pack(void* packed, float const* x) {
  unsigned* t = (unsigned*)packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __half2 p = __float22half2_rn(make_float2(x[2 * i], x[2 * i + 1]));
    t[TRANSPOSED ? i % 2 * 2 + i / 2 : i] = BFLOAT ? pair_of(x[2 * i], x[2 * i + 1]) : *(unsigned*)&p;
  }
}
// keys = the lower blocks of K Kt from the warpgroup's accumulator: below the diagonal split, as right operands.
__device__ __forceinline__ void store_keys(float* keys, void const* accumulator, unsigned minus) {
  float const* c = (float const*)accumulator;
  unsigned thread = thread_index(), warp = (thread >> 5) & 3, lane = thread & 31;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b < warp) {
      float* target = keys + (warp * (warp - 1) / 2 + b) * 256 + lane * 4;
      unsigned h[4], l[4];
      split_right(h, l, c + 8 * b, minus);
      *(uint4*)target = make_uint4(h[0], h[1], h[2], h[3]);
      *(uint4*)(target + 128) = make_uint4(l[0], l[1], l[2], l[3]);
    } else if (b == warp) {
      float* target = keys + 6 * 256 + warp * 192;
      *(float4*)(target + lane * 4) = make_float4(c[8 * b], c[8 * b + 1], c[8 * b + 2], c[8 * b + 3]);
      *(float2*)(target + 128 + lane * 2) = make_float2(c[8 * b + 6], c[8 * b + 7]);
    }
  }
}
}  // namespace flash_qla
"""

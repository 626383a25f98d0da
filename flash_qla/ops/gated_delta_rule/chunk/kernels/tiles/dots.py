"""Passes of one warpgroup over 64 x 64 tiles of 16 bits, and row sums of their products on mma.sync's diagonal.

sum_j a_ij b_ij is the diagonal of a bᵀ. An accumulator's (or A operand's) registers of a 16 x 16 block, rounded, are
the A operand of mma.m16n8k16, and in another order two B operands, so 16 columns of a row sum are two instructions
without unpacking, additions or shuffles; the products are exact and added in fp32. The diagonals lie in the lanes with
lane % 4 == lane / 8: each function adds its thread's two rows (row 16 warp + lane / 4 and that plus 8) to sums[0:2],
which only in those lanes mean anything.

Pointers into shared memory come from `at`. "fragment" is an [64, 64] A operand or a local array in its order, "right" a
local array in the order of B operands. Tiles have the 128-byte swizzle.
"""

import tilelang.language as T

# Needs fragments.LEAN_SOURCE; TYPE and UNPACK: see `source`.
_SOURCE = r"""
namespace flash_qla {
// x, by way of a shuffle with oneself: neither compiler stage sees that it is the same value again.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("shfl.sync.idx.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(x) : "r"((int)threadIdx.x & 31));
  return x;
}
__device__ __forceinline__ unsigned first_row(unsigned thread) {
  return ((thread >> 5) & 3) * 16 + ((thread >> 2) & 7);
}
__device__ __forceinline__ void mma(float* c, unsigned const* a, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ unsigned round_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.TYPEx2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ unsigned multiply_pairs(unsigned x, unsigned y) {
  asm("mul.rn.TYPEx2 %0, %0, %1;" : "+r"(x) : "r"(y));
  return x;
}
template <bool transposed>
__device__ __forceinline__ void load_block(unsigned* r, unsigned address) {
  if (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// This thread's ldmatrix row in a tile's block 0 of 16 x 16, as an A or a B operand; the other blocks of the warp's 16
// rows (transposed: columns) follow at ^ (block << 5) (transposed: + block * 2048).
template <bool transposed, bool right>
__device__ __forceinline__ unsigned block_address(void const* tile) {
  unsigned thread = thread_index(), warp = (thread >> 5) & 3, high = (thread >> 4) & 1, middle = (thread >> 3) & 1;
  unsigned row_half = right ? high : middle, k_half = right ? middle : high;
  unsigned row = transposed ? k_half * 8 + (thread & 7) : warp * 16 + row_half * 8 + (thread & 7);
  unsigned group = transposed ? warp * 2 + row_half : k_half;
  return (unsigned)__cvta_generic_to_shared(tile) + row * 128 + ((group ^ (thread & 7)) << 4);
}
// Clears the elements on the diagonal out of registers 0 and 3 of block `warp`.
__device__ __forceinline__ unsigned off_diagonal(int block) {
  unsigned thread = thread_index(), lane = thread & 31;
  unsigned mask = (lane & 3) == (lane >> 3) ? (lane & 4 ? 0xffffu : 0xffff0000u) : 0xffffffffu;
  return block == ((thread >> 5) & 3) ? mask : 0xffffffffu;
}
// c and d: products of the warp's rows with its rows 0 to 7 and 8 to 15.
__device__ __forceinline__ void add_diagonals(float* sums, float const* c, float const* d) {
  bool odd = thread_index() & 4;
  sums[0] += odd ? c[1] : c[0];
  sums[1] += odd ? d[3] : d[2];
}
__device__ __forceinline__ void fragment_dots(float* sums, void const* fragment, void const* right) {
  unsigned const* a = (unsigned const*)fragment;
  unsigned const* b = (unsigned const*)right;
  float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int t = 0; t < 16; t += 4) {
    mma(c, a + t, b[t], b[t + 1]);
    mma(d, a + t, b[t + 2], b[t + 3]);
  }
  add_diagonals(sums, c, d);
}
__device__ __forceinline__ void row_dots(float* sums, void const* fragment, void const* tile) {
  unsigned const* a = (unsigned const*)fragment;
  unsigned address = block_address<false, true>(tile);
  float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    unsigned b[4];
    load_block<false>(b, address ^ (t << 5));
    mma(c, a + 4 * t, b[0], b[1]);
    mma(d, a + 4 * t, b[2], b[3]);
  }
  add_diagonals(sums, c, d);
}
__device__ __forceinline__ void accumulator_dots(float* sums, float const* y, void const* tile) {
  unsigned address = block_address<false, true>(tile);
  float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    unsigned a[4], b[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) a[n] = round_pair(y[8 * t + 2 * n], y[8 * t + 2 * n + 1]);
    load_block<false>(b, address ^ (t << 5));
    mma(c, a, b[0], b[1]);
    mma(d, a, b[2], b[3]);
  }
  add_diagonals(sums, c, d);
}
template <bool transposed, bool strict>
__device__ __forceinline__ void tile_dots(float* sums, void const* a_tile, void const* b_tile) {
  unsigned a_at = block_address<transposed, false>(a_tile), b_at = block_address<transposed, true>(b_tile);
  float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    unsigned a[4], b[4];
    load_block<transposed>(a, transposed ? a_at + t * 2048 : a_at ^ (t << 5));
    load_block<transposed>(b, transposed ? b_at + t * 2048 : b_at ^ (t << 5));
    if (strict) {
      unsigned mask = off_diagonal(t);
      a[0] &= mask;
      a[3] &= mask;
    }
    mma(c, a, b[0], b[1]);
    mma(d, a, b[2], b[3]);
  }
  add_diagonals(sums, c, d);
}
__device__ __forceinline__ void store_row_dots(void* target, float const* sums) {
  unsigned thread = thread_index(), lane = thread & 31;
  float* rows = (float*)target + first_row(thread);
  if ((lane & 3) == (lane >> 3)) {
    rows[0] = sums[0];
    rows[8] = sums[1];
  }
}
__device__ __forceinline__ void store_warp_dot(void* target, float const* sums) {
  unsigned thread = thread_index(), lane = thread & 31;
  float total = (lane & 3) == (lane >> 3) ? sums[0] + sums[1] : 0.f;
#pragma unroll
  for (int shift = 16; shift > 0; shift /= 2) total += __shfl_xor_sync(~0u, total, shift);
  if (lane == 0) ((float*)target)[(thread >> 5) & 3] = total;
}
__device__ __forceinline__ void load_product_transposed(void* fragment, void const* a_tile, void const* b_tile) {
  unsigned* r = (unsigned*)fragment;
  unsigned a = block_address<true, false>(a_tile), b = block_address<true, false>(b_tile);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    unsigned o[4];
    load_block<true>(r + 4 * t, a + t * 2048);
    load_block<true>(o, b + t * 2048);
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("mul.rn.TYPEx2 %0, %0, %1;" : "+r"(r[4 * t + i]) : "r"(o[i]));
  }
}
__device__ __forceinline__ void make_decay(void* fragment, void const* gates) {
  unsigned* r = (unsigned*)fragment;
  unsigned thread = thread_index(), warp = (thread >> 5) & 3, q = thread & 3, p = (thread >> 2) & 7;
  float const* g = (float const*)gates;
  float g0 = g[first_row(thread)], g1 = g[first_row(thread) + 8];
  // Of an 8 x 8 block on the diagonal: columns 2 q, 2 q + 1 <= row p.
  unsigned diagonal = (2 * q <= p ? 0xffffu : 0u) | (2 * q + 1 <= p ? 0xffff0000u : 0u);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float2 column = *(float2 const*)(g + 8 * j + 2 * q);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float row = half ? g1 : g0, low, high;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(low) : "f"(row - column.x));
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(high) : "f"(row - column.y));
      unsigned block = 2 * warp + half, mask = j < block ? 0xffffffffu : j == block ? diagonal : 0u;
      r[2 * j + half] = round_pair(low, high) & mask;
    }
  }
}
__device__ __forceinline__ void multiply_tiles(void* fragment, void const* other) {
  unsigned* r = (unsigned*)fragment;
  unsigned const* o = (unsigned const*)other;
#pragma unroll
  for (int i = 0; i < 16; ++i) r[i] = multiply_pairs(r[i], o[i]);
}
__device__ __forceinline__ void add_tiles(void* fragment, void const* other) {
  unsigned* r = (unsigned*)fragment;
  unsigned const* o = (unsigned const*)other;
#pragma unroll
  for (int i = 0; i < 16; ++i) asm("add.rn.TYPEx2 %0, %0, %1;" : "+r"(r[i]) : "r"(o[i]));
}
__device__ __forceinline__ void scale_tile_rows(void* fragment, void const* factors, float sign) {
  unsigned* r = (unsigned*)fragment;
  float const* rows = (float const*)factors + first_row(thread_index());
  unsigned first = round_pair(sign * rows[0], sign * rows[0]), second = round_pair(sign * rows[8], sign * rows[8]);
#pragma unroll
  for (int i = 0; i < 16; ++i) r[i] = multiply_pairs(r[i], i & 1 ? second : first);
}
__device__ __forceinline__ void pack(void* fragment, float const* accumulator, int part) {
  unsigned* r = (unsigned*)fragment;
  float const* a = accumulator + 32 * part;
#pragma unroll
  for (int i = 0; i < 16; ++i) r[i] = round_pair(a[2 * i], a[2 * i + 1]);
}
__device__ __forceinline__ void pack_right(void* right, float const* accumulator, int part) {
  unsigned* r = (unsigned*)right;
  float const* a = accumulator + 32 * part;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int from = (i & ~3) | ((i & 1) << 1) | ((i >> 1) & 1);
    asm volatile("cvt.rn.TYPEx2.f32 %0, %1, %2;" : "=r"(r[i]) : "f"(a[2 * from + 1]), "f"(a[2 * from]));
  }
}
__device__ __forceinline__ void pack_scaled(void* fragment, float const* a, void const* factors) {
  unsigned* r = (unsigned*)fragment;
  float const* rows = (float const*)factors + first_row(thread_index());
  float first = rows[0], second = rows[8];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float factor = i & 1 ? second : first;
    r[i] = round_pair(a[2 * i] * factor, a[2 * i + 1] * factor);
  }
}
__device__ __forceinline__ void pack_sum(void* fragment, float const* a, float const* other, int part,
                                         void const* factors) {
  unsigned* r = (unsigned*)fragment;
  float const* o = other + 32 * part;
  float const* rows = (float const*)factors + first_row(thread_index());
  float first = rows[0], second = rows[8];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float factor = i & 1 ? second : first;
    r[i] = round_pair(a[2 * i] + factor * o[2 * i], a[2 * i + 1] + factor * o[2 * i + 1]);
  }
}
__device__ __forceinline__ void pack_product(void* fragment, float const* a, void const* tile) {
  unsigned* r = (unsigned*)fragment;
  unsigned address = block_address<false, false>(tile);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    unsigned o[4], mask = off_diagonal(t);
    load_block<false>(o, address ^ (t << 5));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int n = 4 * t + i;
      asm volatile("cvt.rn.TYPEx2.f32 %0, %1, %2;" : "=r"(r[n]) : "f"(a[2 * n + 1]), "f"(a[2 * n]));
      asm volatile("mul.rn.TYPEx2 %0, %0, %1;" : "+r"(r[n]) : "r"(o[i]));
      if (i == 0 || i == 3) r[n] &= mask;
    }
  }
}
__device__ __forceinline__ void combine_rows(void* fragment, void const* v_fragment, float const* u, void const* p,
                                             void const* q) {
  unsigned* r = (unsigned*)fragment;
  unsigned const* v = (unsigned const*)v_fragment;
  unsigned row = first_row(thread_index());
  float p0 = ((float const*)p)[row], p1 = ((float const*)p)[row + 8];
  float q0 = ((float const*)q)[row], q1 = ((float const*)q)[row + 8];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float low, high, pr = i & 1 ? p1 : p0, qr = i & 1 ? q1 : q0;
    UNPACK
    r[i] = round_pair(low * pr + qr * u[2 * i], high * pr + qr * u[2 * i + 1]);
  }
}
__device__ __forceinline__ void add_scaled_rows(float* total, int part, float const* y, void const* factors,
                                                float scale) {
  float const* rows = (float const*)factors + first_row(thread_index());
  float first = scale * rows[0], second = scale * rows[8];
#pragma unroll
  for (int i = 0; i < 32; ++i) total[32 * part + i] += (i & 2 ? second : first) * y[i];
}
__device__ __forceinline__ void zero_rows(void* tile, int first, int panels) {
  unsigned lane = thread_index() & 31;
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel)
#pragma unroll 1
    for (int byte = first * 128 + lane * 16; byte < 64 * 128; byte += 32 * 16)
      *(uint4*)((char*)tile + panel * 64 * 128 + byte) = make_uint4(0, 0, 0, 0);
}
}  // namespace flash_qla
"""
_TYPES = {"bfloat16": "bf16", "float16": "f16"}
_UNPACK = {
    "bfloat16": "low = __uint_as_float(v[i] << 16), high = __uint_as_float(v[i] & 0xffff0000u);",
    "float16": (
        'asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"'
        ' : "=f"(low), "=f"(high) : "r"(v[i]));'
    ),
}


def source(dtype: str) -> str:
    """The CUDA functions below for tiles of a dtype (needs fragments.LEAN_SOURCE)."""
    return _SOURCE.replace("TYPE", _TYPES[dtype]).replace("UNPACK", _UNPACK[dtype])


def _call(name, *arguments, result="void"):
    return T.call_extern(result, f"flash_qla::{name}", *arguments)


def at(ring, *index):
    """Pointer to ring[*index, 0, ...] in shared memory.

    "r" also where the callee stores: TileLang would fence the role's next product, which does not read it.
    """
    offset, size = 0, 1
    for axis in reversed(range(len(ring.shape))):
        offset = offset + (index[axis] * size if axis < len(index) else 0)
        size *= int(ring.shape[axis])
    return ring.access_ptr("r", offset=offset)


def opaque(x):
    """Expression: x, whose uses the compiler does not join with those of another call (addresses live long)."""
    return _call("opaque", x, result="int32")


def fragment_dots(sums, a, right):
    """Call expression: sums += row dots of a fragment and a right (`pack_right`)."""
    return _call("fragment_dots", sums.access_ptr("rw"), a.access_ptr("r"), right.access_ptr("r"))


def row_dots(sums, a, tile):
    """Call expression: sums += row dots of a fragment and a shared tile."""
    return _call("row_dots", sums.access_ptr("rw"), a.access_ptr("r"), tile)


def accumulator_dots(sums, y, tile):
    """Call expression: sums += row dots of an accumulator, rounded, and a shared tile."""
    return _call("accumulator_dots", sums.access_ptr("rw"), y.access_ptr("r"), tile)


def tile_dots(sums, a, b, transposed=False, strict=False):
    """Call expression: sums += row dots of two shared tiles, or of their transposes; strict: without i = j."""
    return _call(f"tile_dots<{str(transposed).lower()}, {str(strict).lower()}>", sums.access_ptr("rw"), a, b)


def store_row_dots(target, sums):
    """Call expression: target[0:64] = the warpgroup's row dots."""
    return _call("store_row_dots", target, sums.access_ptr("r"))


def store_warp_dot(target, sums):
    """Call expression: target[warp] = sum of the warp's row dots."""
    return _call("store_warp_dot", target, sums.access_ptr("r"))


def load_product_transposed(fragment, a, b):
    """Call expression: fragment = (a ∘ b)ᵀ of two shared tiles."""
    return _call("load_product_transposed", fragment.access_ptr("w"), a, b)


def make_decay(fragment, gates):
    """Call expression: fragment = D, exp2(g_i - g_j) for i >= j and 0 above, where the exponent may overflow."""
    return _call("make_decay", fragment.access_ptr("w"), gates)


def multiply_tiles(fragment, other):
    """Call expression: fragment *= other (a fragment), elementwise."""
    return _call("multiply_tiles", fragment.access_ptr("rw"), other.access_ptr("r"))


def add_tiles(fragment, other):
    """Call expression: fragment += other (a fragment), elementwise."""
    return _call("add_tiles", fragment.access_ptr("rw"), other.access_ptr("r"))


def scale_tile_rows(fragment, factors, sign=1.0):
    """Call expression: fragment[i, :] *= sign factors[i], in 16-bit arithmetic."""
    return _call("scale_tile_rows", fragment.access_ptr("rw"), factors, T.cast(sign, "float32"))


def pack(fragment, accumulator, part=0):
    """Call expression: fragment = columns 64 part to 64 part + 63 of an accumulator, rounded."""
    return _call("pack", fragment.access_ptr("w"), accumulator.access_ptr("r"), part)


def pack_right(right, accumulator, part=0):
    """Call expression: `pack` in the order that `fragment_dots` takes its second factor in."""
    return _call("pack_right", right.access_ptr("w"), accumulator.access_ptr("r"), part)


def pack_scaled(fragment, accumulator, factors):
    """Call expression: fragment[i, :] = factors[i] accumulator[i, :], rounded once."""
    return _call("pack_scaled", fragment.access_ptr("w"), accumulator.access_ptr("r"), factors)


def pack_sum(fragment, accumulator, other, part, factors):
    """Call expression: fragment[i, :] = accumulator[i, :] + factors[i] other[i, 64 part : 64 part + 64], rounded."""
    return _call(
        "pack_sum", fragment.access_ptr("w"), accumulator.access_ptr("r"), other.access_ptr("r"), part, factors
    )


def pack_product(fragment, accumulator, tile):
    """Call expression: fragment = rounded accumulator ∘ shared tile, with zeros on the diagonal."""
    return _call("pack_product", fragment.access_ptr("w"), accumulator.access_ptr("r"), tile)


def combine_rows(fragment, v, u, v_factors, u_factors):
    """Call expression: fragment[i, :] = v_factors[i] v[i, :] + u_factors[i] u[i, :], v a fragment, u fp32."""
    return _call("combine_rows", fragment.access_ptr("w"), v.access_ptr("r"), u.access_ptr("r"), v_factors, u_factors)


def add_scaled_rows(total, part, y, factors, scale):
    """Call expression: total[i, 64 part : 64 part + 64] += scale factors[i] y[i, :], all fp32."""
    return _call("add_scaled_rows", total.access_ptr("rw"), part, y.access_ptr("r"), factors, scale)


def zero_rows(tile, first, width):
    """Call expression: tile[first:, :] = 0 by one warp, 64 rows of `width`. The caller fences."""
    return _call("zero_rows", tile, first, width // 64)

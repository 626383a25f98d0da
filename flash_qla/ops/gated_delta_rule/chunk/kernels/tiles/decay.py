"""What a CTA of segment_ends walks: which segment, and how many of its chunks its end state can remember.

The second is a bound on the transition's norm, from gates and keys (C5, C6). `plan_walk` is called by a whole CTA
before its roles part and ends the CTA where nothing is to be walked: most CTAs, so one warp finds that out, with a load
of a gate a chunk, and the keys are read only where the gates alone say that a segment forgets what came before.

Kinds of CTAs, in launch order, so that long walks start first although nobody knows which heads carry:
    TRANSITION   M of a segment that carries
    WHOLE        b of a segment that carries: all its chunks
    SHORT        b of a segment that does not: its last (reverse: first) few chunks
"""

from dataclasses import dataclass

import tilelang.language as T

SOURCE = r"""
namespace flash_qla {
// Sum over the block's threads, the same bits in each. scratch: a float per warp.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.f;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) x += scratch[warp];
  return x;
}
// Sum of log max(1, |beta |k|^2 - 1|) over `count` rows, four lanes a row.
template <int K, class Key, class Beta>
__device__ __forceinline__ float growth(Key const* k, long long k_stride, Beta const* beta, long long beta_stride,
                                     int count, float* scratch) {
  int lane = threadIdx.x % 4, step = blockDim.x / 4;
  float sum = 0.f;
#pragma unroll 2
  for (int first = 0; first < count; first += step) {
    int row = first + threadIdx.x / 4, safe = min(row, count - 1);
    Key const* at = k + safe * k_stride + lane * 8;
    float b = (float)beta[safe * beta_stride], square = 0.f;
    uint4 bits[K / 32];
#pragma unroll
    for (int part = 0; part < K / 32; ++part) bits[part] = *(uint4 const*)(at + part * 32);
#pragma unroll
    for (int part = 0; part < K / 32; ++part) {
      Key const* x = (Key const*)&bits[part];
#pragma unroll
      for (int i = 0; i < 8; ++i) square += (float)x[i] * (float)x[i];
    }
    square += __shfl_xor_sync(~0u, square, 2);
    square += __shfl_xor_sync(~0u, square, 1);
    if (lane == 0 && row < count) sum += __logf(fmaxf(1.f, fabsf(b * square - 1.f)));
  }
  return block_sum(sum, scratch);
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
// By one warp: how many chunks from `done` on, counted from a segment's end (its start if reverse), whose gates with
// `bound` reach the tolerance, 32 at most; adds them to bound. gates: of chunk `done` + lane, 0 beyond `chunks`.
__device__ __forceinline__ int next_chunks(float gates, int chunks, int done, float tolerance, float& bound) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    float other = __shfl_up_sync(~0u, gates, o);
    if (lane >= o) gates += other;
  }
  unsigned enough = __ballot_sync(~0u, done + lane < chunks && bound + gates <= tolerance);
  int count = enough ? __ffs(enough) : min(32, chunks - done);
  bound += __shfl_sync(~0u, gates, count - 1);
  return count;
}
// The sum of the gates of chunk i, counted like that; 0 beyond the segment.
__device__ __forceinline__ float chunk_gates(float const* g, long long g_stride, int length, int chunks, int reverse,
                                             int i) {
  int c = reverse ? i : chunks - 1 - i;
  return i < chunks ? g[(min(64 * c + 64, length) - 1) * g_stride] : 0.f;
}
// By the block: chunks at a segment's end (its start if reverse) that its end state depends on, to exp(tolerance);
// 0: all, and on what comes before. The gates choose a first guess, the growth of those chunks alone extends it.
// first_known: the first guess is in scratch.
template <int K, class Key, class Beta>
__device__ __forceinline__ int decay_window(bool first_known, float const* g, long long g_stride, Key const* k,
                                            long long k_stride, Beta const* beta, long long beta_stride, int length,
                                            int reverse, float tolerance, float* scratch) {
  int chunks = (length + 63) / 64, done = 0;
  float bound = 0.f;
#pragma unroll 1
  while (done < chunks) {
    if (done || !first_known) {
      __syncthreads();
      if (threadIdx.x < 32) {
        float gates = chunk_gates(g, g_stride, length, chunks, reverse, done + threadIdx.x);
        int count = next_chunks(gates, chunks, done, tolerance, bound);
        if (threadIdx.x == 0) {
          scratch[0] = __int_as_float(count);
          scratch[1] = bound;
        }
      }
      __syncthreads();
    }
    int count = __float_as_int(scratch[0]);
    bound = scratch[1];
    int first = 64 * (reverse ? done : chunks - done - count);
    bound += growth<K>(k + first * k_stride, k_stride, beta + first * beta_stride, beta_stride,
                       min(64 * count, length - first), scratch + 2);
    done += count;
    if (bound <= tolerance) return done;
  }
  return 0;
}
__device__ __forceinline__ int offset_of(int const* cu, int cu_step, int seq_len, int flat_tokens, int n) {
  return cu_step == 0 ? n * seq_len : min(max(cu[(long long)n * cu_step], 0), flat_tokens);
}
enum { TRANSITION, WHOLE, SHORT };
// What the block walks; ends the block where that is nothing. place: row of the end state (-1 - slot for a transition),
// key head, value head, column, batch row, start, length. Returns the number of chunks.
template <int K, class Key, class Beta>
__device__ __forceinline__ int plan_walk(
    int* place, float* scratch, int m_tiles, int v_tiles, int width, int m_slots, int b_slots, int const* cu,
    int cu_step, int seq_len, int batch, int num_tokens, int num_seqs, int segment_tokens, int num_v_heads,
    int num_k_heads, int reverse, int has_h0, int for_backward, float tolerance, float const* g, Key const* k,
    long long k_batch, long long k_row, long long k_head_stride, Beta const* beta, long long beta_batch,
    long long beta_row, long long beta_head, int* carries) {
  int flat_tokens = batch * num_tokens;
  if (threadIdx.x < 32) {
    unsigned block = blockIdx.x, whole = b_slots * num_v_heads * v_tiles, others = m_slots * num_v_heads * m_tiles;
    int kind = WHOLE, tiles = v_tiles, slots_apart = 0;
    if (block < others) {
      kind = TRANSITION;
      tiles = m_tiles;
      slots_apart = for_backward;
    } else {
      block -= others;
      if (block >= whole) {
        kind = SHORT;
        block -= whole;
      }
    }
    unsigned pair = block / (unsigned)tiles, at = pair / (unsigned)num_v_heads;
    int tile = block - pair * tiles, v_head = pair - at * num_v_heads;
    int n = 0, count = num_seqs, lane = threadIdx.x;
    while (count > 1) {
      int step = (count + 31) / 32, m = n + lane * step;
      bool before = lane * step < count &&
          (unsigned)offset_of(cu, cu_step, seq_len, flat_tokens, m) / (unsigned)segment_tokens + m * slots_apart <= at;
      int skip = max(__popc(__ballot_sync(~0u, before)) - 1, 0) * step;
      n += skip;
      count = min(step, count - skip);
    }
    int start = offset_of(cu, cu_step, seq_len, flat_tokens, n);
    int rest = max(offset_of(cu, cu_step, seq_len, flat_tokens, n + 1) - start, 0);
    int first = (unsigned)start / (unsigned)segment_tokens, segment = at - first - n * slots_apart + reverse;
    int slot = first + n + segment;
    rest -= segment * segment_tokens;
    int length = max(min(rest, segment_tokens), 0), chunks = (length + 63) / 64;
    int batch_row = cu_step == 0 ? n : 0;
    start = (cu_step == 0 ? 0 : start) + segment * segment_tokens;
    bool needed = reverse ? rest > 0 : rest > segment_tokens;
    if (kind == TRANSITION)
      needed = (needed && (segment > 0 || has_h0)) || (for_backward && rest > 0 && segment > 0);
    int window = 0, unknown = 0;
    if (needed) {
      bool carry;
      if (reverse) {
        carry = carries[((long long)slot * num_v_heads + v_head) * 2 + 1] != 0;
        unknown = !carry && kind == SHORT;
      } else {
        float const* gates = g + ((long long)batch_row * num_tokens + start) * num_v_heads + v_head;
        float last = chunk_gates(gates, num_v_heads, length, chunks, 0, lane), sum = last, bound = 0.f;
        for (int i = lane + 32; i < chunks; i += 32) sum += chunk_gates(gates, num_v_heads, length, chunks, 0, i);
        carry = !(warp_sum(sum) <= tolerance);
        unknown = !carry;
        int count = next_chunks(last, chunks, 0, tolerance, bound);
        if (lane == 0) {
          scratch[0] = __int_as_float(count);
          scratch[1] = bound;
        }
        if (carry && kind == TRANSITION && tile == 0 && lane < 2)
          carries[((long long)slot * num_v_heads + v_head) * 2 + lane] = lane == 0 || for_backward;
      }
      if (carry && kind != SHORT) window = chunks;
    }
    if (lane == 0) {
      place[0] = kind == TRANSITION ? -1 - slot : reverse ? slot - 1 : slot + 1;
      place[1] = v_head / (num_v_heads / num_k_heads);
      place[2] = v_head;
      place[3] = tile * width;
      place[4] = batch_row;
      place[5] = start;
      place[6] = length;
      place[7] = window;
      place[8] = unknown ? 1 + kind : 0;
    }
  }
  __syncthreads();
  int window = place[7], length = place[6];
  if (place[8]) {
    int kind = place[8] - 1, v_head = place[2], start = place[5], flags = 0;
    float const* gates = g + ((long long)place[4] * num_tokens + start) * num_v_heads + v_head;
    k += place[4] * k_batch + start * k_row + place[1] * k_head_stride;
    beta += place[4] * beta_batch + start * beta_row + v_head * beta_head;
    int last = kind == TRANSITION ? for_backward : reverse;
#pragma unroll 1
    for (int d = kind == TRANSITION ? 0 : last; d <= last; ++d) {
      window = decay_window<K>(d == 0 && !reverse, gates, num_v_heads, k, k_row, beta, beta_row, length, d, tolerance,
                               scratch);
      flags |= (window == 0) << d;
    }
    int chunks = (length + 63) / 64;
    if (kind == TRANSITION) {
      if (place[3] == 0 && threadIdx.x < 2)
        carries[((long long)(-1 - place[0]) * num_v_heads + v_head) * 2 + threadIdx.x] = flags >> threadIdx.x & 1;
      window = flags ? chunks : 0;
    } else if (kind == WHOLE) {
      window = flags ? chunks : 0;
    } else if (reverse) {
      window = flags ? chunks : window;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int skipped = reverse ? 0 : (chunks - window) * 64;
      place[5] = start + skipped;
      place[6] = min(length - skipped, window * 64);
    }
    __syncthreads();
  }
  window = __shfl_sync(~0u, window, 0);  // the compiler must know that it is uniform: loops with wgmma depend on it
  if (window == 0) asm volatile("exit;");
  return window;
}
}  // namespace flash_qla
"""


@dataclass
class Walk:
    """What a CTA walks. row: of the end state, -1 - slot for a transition."""

    row: object
    k_head: object
    v_head: object
    v_col: object
    batch: object
    start: object
    length: object
    chunks: object

    @property
    def is_transition(self):
        """Expression: 1 for a walk of M."""
        return T.Select(self.row < 0, 1, 0)


@T.macro
def plan_walk(num_threads, tensors, sizes):
    """Returns the CTA's Walk, of at least one chunk (other CTAs end here). By every thread, before the roles part.

    Args:
        num_threads: of the CTA.
        tensors: k, g_cumsum, beta, carries, cu.
        sizes: the keywords of `call_plan_walk`.
    """
    scratch = T.alloc_shared((num_threads // 32 + 2,), "float32")
    place = T.alloc_shared((9,), "int32")  # what no role has registers for
    start, length, window = (T.alloc_var("int32") for _ in range(3))
    T.pdl_trigger()
    T.pdl_sync()  # by every thread of every CTA: only so may the kernels that follow rely on this one's end
    window = call_plan_walk(place, scratch, *tensors, **sizes)
    start = place[5]
    length = place[6]
    return Walk(place[0], place[1], place[2], place[3], place[4], start, length, window)


def call_plan_walk(
    place, scratch, k, g_cumsum, beta, carries, cu, *, m_tiles, v_tiles, width, m_walks, b_walks, cu_step, seq_len,
    num_seqs, segment_tokens, reverse, has_h0, for_backward, tolerance,
):  # fmt: skip
    """Call expression: the chunks to walk.

    Args:
        place: shared int32 [9], filled with the first fields of a Walk.
        scratch: shared fp32, a value per warp and two more.
        carries: `[slots, Hv, 2]`, written with transitions, read where reverse.
        m_tiles, v_tiles, width: CTAs of a transition and of b, columns of each.
        m_walks, b_walks: bounds of the segments with transitions, and with end states that anybody needs.
        has_h0, for_backward: as of `segment_ends`.
        tolerance: natural log of the norm that may be left out.
    """
    batch, num_tokens, num_v_heads = g_cumsum.shape
    return T.call_extern(
        "int32", f"flash_qla::plan_walk<{int(k.shape[-1])}>", place.access_ptr("r"), scratch.access_ptr("r"), m_tiles,
        v_tiles, width, m_walks, b_walks, T.address_of(cu[0]), cu_step, seq_len, batch, num_tokens, num_seqs,
        segment_tokens, num_v_heads, k.shape[2], reverse, has_h0, for_backward, tolerance,
        T.address_of(g_cumsum[0, 0, 0]), T.address_of(k[0, 0, 0, 0]), k.strides[0], k.strides[1], k.strides[2],
        T.address_of(beta[0, 0, 0]), beta.strides[0], beta.strides[1], beta.strides[2],
        T.address_of(carries[0, 0, 0]),
    )  # fmt: skip

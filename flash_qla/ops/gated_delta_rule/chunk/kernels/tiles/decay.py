"""How much of a segment its end state can remember: a bound on the transition's norm, from gates and keys (C5, C6).

Called by a whole CTA before its roles part; nothing is left in registers but the answer.
"""

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
// Sum of log max(1, |beta |k|^2 - 1|) over `count` rows.
template <int K, class Key, class Beta>
__device__ __forceinline__ float growth(Key const* k, long long k_stride, Beta const* beta, long long beta_stride,
                                     int count, float* scratch) {
  constexpr int LANES = K / 8;
  int lane = threadIdx.x % LANES, step = blockDim.x / LANES;
  float sum = 0.f;
#pragma unroll 4
  for (int first = 0; first < count; first += step) {
    int row = first + threadIdx.x / LANES, safe = min(row, count - 1);
    uint4 bits = *(uint4 const*)(k + safe * k_stride + lane * 8);
    float b = (float)beta[safe * beta_stride], square = 0.f;
    Key const* x = (Key const*)&bits;
#pragma unroll
    for (int i = 0; i < 8; ++i) square += (float)x[i] * (float)x[i];
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
    if (lane == 0 && row < count) sum += __logf(fmaxf(1.f, fabsf(b * square - 1.f)));
  }
  return block_sum(sum, scratch);
}
// Chunks at a segment's end (its start if reverse) that its end state depends on, to exp(tolerance); 0: all, and on
// what comes before. The gates choose a first guess, the growth of those chunks alone extends it.
template <int K, class Key, class Beta>
__device__ __forceinline__ int decay_window(float const* g, long long g_stride, Key const* k, long long k_stride,
                                         Beta const* beta, long long beta_stride, int length, int reverse,
                                         float tolerance, float* scratch) {
  int lane = threadIdx.x % 32, chunks = (length + 63) / 64, done = 0;
  float bound = 0.f, gates = 0.f;
  for (int c = lane; c < chunks; c += 32) gates += g[(min(64 * c + 64, length) - 1) * g_stride];
#pragma unroll
  for (int o = 16; o; o >>= 1) gates += __shfl_xor_sync(~0u, gates, o);
  if (!(gates <= tolerance)) return 0;
  while (done < chunks) {
    int c = reverse ? done + lane : chunks - 1 - done - lane;
    bool inside = done + lane < chunks;
    gates = inside ? g[(min(64 * c + 64, length) - 1) * g_stride] : 0.f;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      float other = __shfl_up_sync(~0u, gates, o);
      if (lane >= o) gates += other;
    }
    unsigned enough = __ballot_sync(~0u, inside && bound + gates <= tolerance);
    int count = enough ? __ffs(enough) : min(32, chunks - done);
    bound += __shfl_sync(~0u, gates, count - 1);
    int first = 64 * (reverse ? done : chunks - done - count);
    bound += growth<K>(k + first * k_stride, k_stride, beta + first * beta_stride, beta_stride,
                       min(64 * count, length - first), scratch);
    done += count;
    if (bound <= tolerance) return done;
  }
  return 0;
}
// `decay_window` of one direction (from = to), or of both: bit d set where direction d (1: reverse) needs all.
template <int K, class Key, class Beta>
__device__ __forceinline__ int decay_windows(float const* g, long long g_stride, Key const* k, long long k_stride,
                                             Beta const* beta, long long beta_stride, int length, int from, int to,
                                             float tolerance, float* scratch) {
  int answer = 0;
#pragma unroll 1
  for (int d = from; d <= to; ++d) {
    int count = decay_window<K>(g, g_stride, k, k_stride, beta, beta_stride, length, d, tolerance, scratch);
    answer = from == to ? count : answer | (count == 0) << d;
  }
  return __shfl_sync(~0u, answer, 0);  // the compiler must know that it is uniform: loops with wgmma depend on it
}
}  // namespace flash_qla
"""


def windows(g_cumsum, k, beta, batch, start, k_head, v_head, length, first, last, tolerance, scratch):
    """Call expression, for every thread of the CTA: how much of a segment has to be walked for its end state.

    Args:
        first, last: directions, 0 forward, 1 reverse. Equal: the answer is the number of chunks at that walk's end, 0
            where it is all of them and the transition carries what came before. Different: bit d of it is 1 there.
        tolerance: natural log of the norm that may be left out.
        scratch: shared fp32, a value per warp.
    """
    return T.call_extern(
        "int32", f"flash_qla::decay_windows<{int(k.shape[-1])}>",
        T.address_of(g_cumsum[batch, start, v_head]), T.cast(g_cumsum.shape[2], "int64"),
        T.address_of(k[batch, start, k_head, 0]), k.strides[1],
        T.address_of(beta[batch, start, v_head]), beta.strides[1],
        length, first, last, tolerance, scratch.access_ptr("r"),
    )  # fmt: skip

"""The recurrent state between memory and a transposed register tile: the only home of its layouts.

Host code passes states as logical `[N, Hv, K, V]` tensors with four run-time strides, so K-first and V-first memory are
the same kernel and give the same bits. An absent state is a tensor with 0 rows.
"""

import tilelang.language as T


def strided_state(name: str, dtype: str, head_dim_k: int, head_dim_v: int):
    """Kernel parameter annotation of a logical `[N, Hv, K, V]` state (or per-chunk state) with run-time strides."""
    rows, heads = T.dynamic(f"{name}_rows"), T.dynamic(f"{name}_heads")
    strides = tuple(T.dynamic(f"{name}_stride_{axis}", "int64") for axis in "nhkv")
    return T.StridedTensor((rows, heads, head_dim_k, head_dim_v), strides, dtype)


@T.macro
def load_transposed(state, source, num_rows, n, head, v_col, v_rows, head_dim_k):
    """state[jv, jk] = source[n, head, jk, v_col + jv] in fp32, zeros when source has no row n."""
    if n < num_rows:
        for jv, jk in T.Parallel(v_rows, head_dim_k):
            state[jv, jk] = T.cast(source[n, head, jk, v_col + jv], "float32")
    else:
        T.fill(state, 0.0)


@T.macro
def store_transposed(target, state, num_rows, n, head, v_col, v_rows, head_dim_k, dtype):
    """target[n, head, jk, v_col + jv] = state[jv, jk]; nothing when target has no row n."""
    if n < num_rows:
        for jv, jk in T.Parallel(v_rows, head_dim_k):
            target[n, head, jk, v_col + jv] = T.cast(state[jv, jk], dtype)


LEAN_SOURCE = r"""
namespace flash_qla {
__device__ __forceinline__ void put(float* p, float x) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
template <typename half_t>
__device__ __forceinline__ void put(half_t* p, float x) {
  half_t rounded(x);
  asm volatile("st.global.b16 [%0], %1;" ::"l"(p), "h"(*(unsigned short const*)&rounded) : "memory");
}
// target[k, v] = S[v, k]; S a 64-row accumulator per warpgroup. One pointer, moved along: no address outlives a store.
template <typename value_t>
__device__ __forceinline__ void store_state(value_t* target, long long k_stride, long long v_stride, float const* S,
                                            int columns, int first_thread) {
  int thread = (int)thread_index() - first_thread;
  target += (thread & 3) * 2 * k_stride + ((thread >> 5) * 16 + ((thread >> 2) & 7)) * v_stride;
#pragma unroll
  for (int c = 0; c < columns / 8; ++c) {
    put(target, S[4 * c]);
    put(target + 8 * v_stride, S[4 * c + 2]);
    put(target + k_stride, S[4 * c + 1]);
    put(target + k_stride + 8 * v_stride, S[4 * c + 3]);
    target += 8 * k_stride;
    asm volatile("" : "+l"(target));
  }
}
}  // namespace flash_qla
"""


def store_lean(target, state, row, head, v_col, head_dim_k, first_thread):
    """Call expression: `store_transposed` of an existing row without an address register per element.

    state: one 64-row accumulator per warpgroup from first_thread on. Needs `fragments.LEAN_SOURCE` and LEAN_SOURCE.
    """
    return T.call_extern(
        "void", "flash_qla::store_state", T.address_of(target[row, head, 0, v_col]), target.strides[2],
        target.strides[3], state.access_ptr("r"), head_dim_k, first_thread,
    )  # fmt: skip


READ_SOURCE = r"""
namespace flash_qla {
__device__ __forceinline__ float get(float const* p) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
template <typename half_t>
__device__ __forceinline__ float get(half_t const* p) {
  unsigned short x;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
  return float(*(half_t const*)&x);
}
// S[v, k] = source[k, v], the counterpart of store_state: all loads in flight at once, one pointer, moved along.
template <typename value_t>
__device__ __forceinline__ void load_state(float* S, value_t const* source, long long k_stride, long long v_stride,
                                           int columns, int first_thread) {
  int thread = (int)thread_index() - first_thread;
  source += (thread & 3) * 2 * k_stride + ((thread >> 5) * 16 + ((thread >> 2) & 7)) * v_stride;
#pragma unroll
  for (int c = 0; c < columns / 8; ++c) {
    S[4 * c] = get(source);
    S[4 * c + 2] = get(source + 8 * v_stride);
    S[4 * c + 1] = get(source + k_stride);
    S[4 * c + 3] = get(source + k_stride + 8 * v_stride);
    source += 8 * k_stride;
    asm volatile("" : "+l"(source));
  }
}
// Brings rows * columns of a state into L2, by one warp.
template <typename value_t>
__device__ __forceinline__ void prefetch_state(value_t const* first, long long k_stride, long long v_stride, int k,
                                               int v) {
  int rows = k_stride == 1 ? v : k, bytes = (k_stride == 1 ? k : v) * (int)sizeof(value_t);
#pragma unroll 1
  for (int row = thread_index() & 31; row < rows; row += 32) {
    char const* line = (char const*)(first + row * (k_stride == 1 ? v_stride : k_stride));
#pragma unroll 1
    for (int byte = 0; byte < bytes; byte += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(line + byte));
  }
}
}  // namespace flash_qla
"""


@T.macro
def load_lean(state, source, n, head, v_col, head_dim_k, first_thread):
    """`load_transposed` with few instructions and addresses: needs `fragments.LEAN_SOURCE` and READ_SOURCE."""
    if n < source.shape[0]:
        T.call_extern(
            "void", "flash_qla::load_state", state.access_ptr("w"), T.address_of(source[n, head, 0, v_col]),
            source.strides[2], source.strides[3], head_dim_k, first_thread,
        )  # fmt: skip
    else:
        T.fill(state, 0.0)


@T.macro
def load_start(state, outer, inner, n, slot, segment, head, v_col, v_rows, head_dim_k, first_thread=None):
    """state = where a segment's walk starts: outer[n] as `load_transposed` for the outermost one, else inner[slot].

    inner: fp32 `[slots, Hv, V, K]`, transposed as the registers are. segment: 0 for the outermost segment.
    first_thread: of the warpgroups that hold the state, given where `load_lean` reads it.
    """
    if segment == 0:
        if first_thread is None:
            load_transposed(state, outer, outer.shape[0], n, head, v_col, v_rows, head_dim_k)
        else:
            load_lean(state, outer, n, head, v_col, head_dim_k, first_thread)
    else:
        for jv, jk in T.Parallel(v_rows, head_dim_k):
            state[jv, jk] = inner[slot, head, v_col + jv, jk]


def prefetch(source, n, head, v_col, v_rows, head_dim_k):
    """Call expression: one warp brings a state's columns v_col on into L2; needs what `load_lean` needs."""
    return T.call_extern(
        "void", "flash_qla::prefetch_state", T.address_of(source[n, head, 0, v_col]), source.strides[2],
        source.strides[3], head_dim_k, v_rows,
    )  # fmt: skip

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

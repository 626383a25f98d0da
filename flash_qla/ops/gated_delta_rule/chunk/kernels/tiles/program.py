"""Where a CTA's work lies: sequences, chunks and slots on the device. The host half is `sequences.py`.

Kernels take `cu` (an int32 view of cu_seqlens), `cu_step` and `seq_len`:
    cu_step 1   cu_seqlens is int32
    cu_step 2   cu_seqlens is int64, viewed as int32: the low words lie two apart (offsets are below 2^31)
    cu_step 0   dense input: sequence n is batch row n, `seq_len` tokens; cu is an empty placeholder
so that dtype and density are run-time values. Offsets are clamped to the rows that exist: nobody checks their values
on the hot path, and no kernel may leave the tensors.
"""

import tilelang.language as T


def strided_rows(name: str, dims, dtype: str):
    """Kernel parameter annotation of a `[B, T, H, D]` tensor with run-time strides and a unit last one."""
    strides = tuple(T.dynamic(f"{name}_stride_{axis}", "int64") for axis in "bth")
    return T.StridedTensor(dims, (*strides, 1), dtype)


def strided_gates(name: str, dims, dtype: str):
    """Kernel parameter annotation of a `[B, T, H]` tensor with run-time strides."""
    return T.StridedTensor(dims, tuple(T.dynamic(f"{name}_stride_{axis}", "int64") for axis in "bth"), dtype)


def offset(cu, cu_step, seq_len, flat_tokens, n):
    """Expression: flat row where sequence n starts (n = N: where the last one ends)."""
    return T.if_then_else(cu_step == 0, n * seq_len, T.min(T.max(cu[n * cu_step], 0), flat_tokens))


@T.macro
def locate_sequence(cu, cu_step, seq_len, flat_tokens, n, batch: T.Ref, start: T.Ref, length: T.Ref):
    """Sets batch row, first token inside that row, and length of sequence n (0 for an empty or malformed one)."""
    start = offset(cu, cu_step, seq_len, flat_tokens, n)
    length = T.max(offset(cu, cu_step, seq_len, flat_tokens, n + 1) - start, 0)
    batch = T.if_then_else(cu_step == 0, n, 0)
    start = T.if_then_else(cu_step == 0, 0, start)


@T.macro
def sequence_of_slot(cu, cu_step, seq_len, flat_tokens, num_seqs, chunk_size, slot, n: T.Ref, chunk: T.Ref):
    """Sets the sequence that owns a chunk slot and the chunk inside it (may lie past its end: then skip the slot).

    Binary search for the last n whose first slot, start_n // C + n, is <= slot.
    """
    lo = T.alloc_var("int32")
    hi = T.alloc_var("int32")
    mid = T.alloc_var("int32")
    lo = 0
    hi = num_seqs
    while hi - lo > 1:
        mid = (lo + hi) // 2
        if offset(cu, cu_step, seq_len, flat_tokens, mid) // chunk_size + mid <= slot:
            lo = mid
        else:
            hi = mid
    n = lo
    chunk = slot - (offset(cu, cu_step, seq_len, flat_tokens, lo) // chunk_size + lo)


@T.macro
def first_chunk(cu, cu_step, seq_len, flat_tokens, chunk_size, n, first: T.Ref):
    """Sets the number of chunks before sequence n, counted over the sequences: only for outputs numbered that way."""
    first = 0
    for m in T.serial(n):
        start = offset(cu, cu_step, seq_len, flat_tokens, m)
        first = first + T.ceildiv(T.max(offset(cu, cu_step, seq_len, flat_tokens, m + 1) - start, 0), chunk_size)

"""Where a CTA's work lies: sequences, chunks and slots on the device. The host half is `sequences.py`.

Kernels take `cu` (an int32 view of cu_seqlens), `cu_step` and `seq_len`:
    cu_step 1   cu_seqlens is int32
    cu_step 2   cu_seqlens is int64, viewed as int32: the low words lie two apart (offsets are below 2^31)
    cu_step 0   dense input: sequence n is batch row n, `seq_len` tokens; cu is an empty placeholder
so that dtype and density are run-time values. Offsets are clamped to the rows that exist: nobody checks their values
on the hot path, and no kernel may leave the tensors.
"""

from dataclasses import dataclass

import tilelang.language as T

from ...constants import CHUNK_SIZE
from .state import strided_state

NO_ROW = 2**31 - 1  # above any number of rows


def strided_rows(name: str, dims, dtype: str):
    """Kernel parameter annotation of a `[B, T, H, D]` tensor with run-time strides and a unit last one."""
    strides = tuple(T.dynamic(f"{name}_stride_{axis}", "int64") for axis in "bth")
    return T.StridedTensor(dims, (*strides, 1), dtype)


def strided_gates(name: str, dims, dtype: str):
    """Kernel parameter annotation of a `[B, T, H]` tensor with run-time strides."""
    return T.StridedTensor(dims, tuple(T.dynamic(f"{name}_stride_{axis}", "int64") for axis in "bth"), dtype)


def cu_seqlens():
    """Kernel parameter annotation of `cu`."""
    return T.Tensor((T.dynamic("cu_len"),), "int32")


@dataclass(frozen=True)
class Tensors:
    """Annotations of the parameters that kernels share: run-time sizes, native head sizes, q's dtype.

    Each call makes a new one: parameters that share an annotation would be one buffer.
    """

    dtype: str
    head_dim_k: int
    head_dim_v: int
    batch: object
    num_tokens: object
    num_k_heads: object
    num_v_heads: object

    @classmethod
    def of(cls, spec) -> "Tensors":
        """The tensors of a kernel with this compile key."""
        sizes = T.dynamic("batch num_tokens num_k_heads num_v_heads")
        return cls(spec.dtype, spec.head_dim_k, spec.head_dim_v, *sizes)

    def keys(self, name: str):
        """`[B, T, Hq, K]`, run-time strides."""
        return strided_rows(name, (self.batch, self.num_tokens, self.num_k_heads, self.head_dim_k), self.dtype)

    def values(self, name: str):
        """`[B, T, Hv, V]`, run-time strides."""
        return strided_rows(name, (self.batch, self.num_tokens, self.num_v_heads, self.head_dim_v), self.dtype)

    def gates(self, name: str, dtype: str = "float32"):
        """`[B, T, Hv]`, run-time strides."""
        return strided_gates(name, (self.batch, self.num_tokens, self.num_v_heads), dtype)

    def per_head(self, *sizes, dtype: str = "float32"):
        """`[B, T, Hv, *sizes]`, contiguous."""
        return T.Tensor((self.batch, self.num_tokens, self.num_v_heads, *sizes), dtype)

    def per_key_head(self, *sizes, dtype: str = "float32"):
        """`[B, T, Hq, *sizes]`, contiguous."""
        return T.Tensor((self.batch, self.num_tokens, self.num_k_heads, *sizes), dtype)

    def inverse(self):
        """T_inv."""
        return self.per_head(CHUNK_SIZE, dtype=self.dtype)

    def state(self, name: str, dtype: str):
        """Logical `[N, Hv, K, V]`, run-time strides."""
        return strided_state(name, dtype, self.head_dim_k, self.head_dim_v)

    def states(self, num_rows, dtype: str = "float32"):
        """`[num_rows, Hv, V, K]`, contiguous: states as the registers hold them."""
        return T.Tensor((num_rows, self.num_v_heads, self.head_dim_v, self.head_dim_k), dtype)


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
def locate_segment(
    cu, cu_step, seq_len, flat_tokens, num_seqs, segment_tokens, slot,
    n: T.Ref, batch: T.Ref, start: T.Ref, length: T.Ref, segment: T.Ref, last_of: T.Ref,
):  # fmt: skip
    """Sets the rows of a segment slot: as `locate_sequence`, but of segment number `segment` of sequence n.

    Sequence n owns the slots from start_n // segment_tokens + n on, at least one. segment_tokens = 0: a slot is a
    sequence, segment 0. last_of: n in the sequence's last segment, else NO_ROW. A slot that no segment owns has no
    rows, and is not segment 0.
    """
    segment = 0
    n = slot
    if segment_tokens != 0:
        sequence_of_slot(cu, cu_step, seq_len, flat_tokens, num_seqs, segment_tokens, slot, n, segment)
    locate_sequence(cu, cu_step, seq_len, flat_tokens, n, batch, start, length)
    last_of = n
    if segment_tokens != 0:
        length = length - segment * segment_tokens
        last_of = T.if_then_else((length > 0 or segment == 0) and length <= segment_tokens, n, NO_ROW)
        length = T.max(T.min(length, segment_tokens), 0)
        start = start + segment * segment_tokens


@T.macro
def first_chunk(cu, cu_step, seq_len, flat_tokens, chunk_size, n, first: T.Ref):
    """Sets the number of chunks before sequence n, counted over the sequences: only for outputs numbered that way."""
    first = 0
    for m in T.serial(n):
        start = offset(cu, cu_step, seq_len, flat_tokens, m)
        first = first + T.ceildiv(T.max(offset(cu, cu_step, seq_len, flat_tokens, m + 1) - start, 0), chunk_size)

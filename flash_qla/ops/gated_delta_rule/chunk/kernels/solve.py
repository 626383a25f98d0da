"""Solve: the cumulative gate and the inverse T of every chunk's gated triangular matrix, in one launch.

    g_cumsum = cumsum(max(g, GATE_FLOOR))                                     F0, F1
    T_inv = (I + L)^-1,  L_ij = beta_i exp(g_i - g_j) (k_i . k_j), i > j      F2

One CTA per (chunk slot, key head, four of its value heads), heads fastest: neighbours share the gates' cache lines.
K Kᵀ is made once by the whole warpgroup; then every warp inverts for a value head of its own without another barrier.
A key head with more than four value heads makes K Kᵀ once per four: cheaper than a loop, whose invariants spill.

    role            threads  computes
    warp 0          32       loads the keys (TMA)
    warp 1          32       meanwhile: the four heads' cumulative gates, g_cumsum to memory
    warp 2          32       meanwhile: the four heads' beta
    warpgroup       128      K Kᵀ (wgmma) into keys
    warp w          32       value head w: zeros in rows of no sequence, the inverse (tiles/inverse.py), its store

    barrier         signalled by   waited by   guards
    ready           TMA            all         k_smem
    __syncthreads   all            all         k_smem, before keys take its place
    __syncthreads   all            all         keys, gate and beta rows

    shared memory   bytes            holds
    k_smem          64 K x 2         the chunk's keys, 128-byte swizzle
    keys            10 KB            lower blocks of K Kᵀ, fp32; in k_smem where they fit
    rows_smem       4 x 1.5 KB       per warp: gate, beta and decay factors of the rows
    scratch         4 x 8 KB         per warp: diagonal blocks, then the finished tile of T; aligned to 1 KB for TMA

Grid: slots x key heads x ceil(group / 4). 120 registers and 55 KB: four CTAs a multiprocessor, which is what hides the
loads' and the substitution's latency.
"""

from dataclasses import dataclass

import tilelang.language as T
import torch
from tilelang import tvm

from flash_qla import arch as arch_table

from ..constants import CHUNK_SIZE
from ..sequences import Sequences
from .build import ROLE_PASS_CONFIGS, build
from .launch import DTYPE_NAMES, cu_arguments, tma_ready
from .tiles.gate import LOG2E, STEPS, clamped_cumsum, load_rows, store_rows
from .tiles.inverse import BETA, GATE, KEYS_WORDS, ROWS_WORDS, SCRATCH, WarpSolve, invert, keys_offset
from .tiles.layouts import swizzled
from .tiles.program import locate_sequence, offset, sequence_of_slot, strided_rows

tirx = tvm.tirx
WARPS = 4
THREADS = 32 * WARPS
MIN_CTAS = 4  # per multiprocessor: what shared memory allows, hence at most 128 registers
WORDS = CHUNK_SIZE // 2  # T's rows, as 32-bit words
TMA_FLOAT32, TMA_SWIZZLE_128, TMA_L2_256 = 7, 3, 2  # CUtensorMap enumerators
# Warps run heads of their own: automatic barriers would be reached by some of them only. All are written by hand.
# Every row is checked against the chunk's own rows, so the bounds checks of plain accesses stay out as well.
PASS_CONFIGS = {
    **ROLE_PASS_CONFIGS,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_safe_memory_legalize": True,
}


@dataclass(frozen=True)
class Spec:
    """Compile key."""

    dtype: str = "bfloat16"
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"
    head_dim_k: int = 128


def alloc_keys(k_smem, spec):
    """K Kᵀ takes the place of K where it fits: four CTAs a multiprocessor instead of three."""
    words = CHUNK_SIZE * spec.head_dim_k // 2
    if words >= KEYS_WORDS:
        return T.view(k_smem, (words,), "float32")
    return T.alloc_shared((KEYS_WORDS,), "float32")


@T.macro
def load_keys_product(k, k_smem, keys, ready, batch, start, rows, k_head, spec):
    """keys = K Kᵀ, rows past the chunk's end zero."""
    product = T.alloc_fragment((CHUNK_SIZE, CHUNK_SIZE), "float32")
    tx = T.get_thread_binding()
    if tx < 32:
        T.tma_copy(k[batch, start : start + CHUNK_SIZE, k_head, 0 : spec.head_dim_k], k_smem, barrier=ready)
        if T.shuffle_elect(32):
            T.barrier_arrive(ready)
    T.barrier_wait(ready, 0)
    if rows < CHUNK_SIZE:
        for i, d in T.Parallel(CHUNK_SIZE, spec.head_dim_k):
            if i >= rows:
                k_smem[i, d] = T.cast(0.0, spec.dtype)
        T.fence_proxy_async()
        T.sync_threads()
    T.gemm(k_smem, k_smem, product, transpose_B=True, clear_accum=True)
    T.sync_threads()
    for i, j in T.Parallel(CHUNK_SIZE, CHUNK_SIZE):
        if j // 16 <= i // 16:
            keys[keys_offset(i, j)] = product[i, j]


@T.macro
def stage_rows(rows_smem, g, beta, g_cumsum, batch, start, rows, first_head, heads, warp, lane):
    """Four heads' GATE by warp 1, which also stores g_cumsum, and BETA by warp 2, while warp 0 loads the keys."""
    values = T.alloc_local((STEPS,), "float32")
    if warp == 1:
        load_rows(values, g, batch, start, first_head, heads, rows, lane)
        clamped_cumsum(values, lane)
        store_rows(g_cumsum, values, batch, start, first_head, heads, rows, lane)
        for i in T.unroll(STEPS):
            rows_smem[lane % 4 * ROWS_WORDS + GATE + 8 * i + lane // 4] = values[i] * LOG2E
    if warp == 2:
        load_rows(values, beta, batch, start, first_head, heads, rows, lane)
        for i in T.unroll(STEPS):
            rows_smem[lane % 4 * ROWS_WORDS + BETA + 8 * i + lane // 4] = -values[i]


@T.macro
def store_tile(T_inv, scratch, base, batch, start, rows, head, lane, shape):
    """The finished tile to memory: by TMA when the chunk is full, else row by row, 16 bytes a lane."""
    if rows == CHUNK_SIZE:
        T.fence_proxy_async()
        T.sync_warp()
        if T.shuffle_elect(32):
            tma_store_words(T_inv, shape, scratch, base, batch, start, head)
            T.tma_store_arrive()
    else:
        T.sync_warp()
        for step in T.serial(T.ceildiv(rows, 4)):
            row = step * 4 + lane // 8
            if row < rows:
                for v in T.vectorized(4):
                    T_inv[batch, start + row, head, lane % 8 * 4 + v] = scratch[
                        base + row * WORDS + ((lane % 8) ^ (row % 8)) * 4 + v
                    ]


def tma_store_words(target, shape, tile, base, batch, start, head):
    """One TMA store of a 64 x 32-word tile under the 128-byte swizzle to target[batch, start:start + 64, head, :].

    `T.tma_copy` cannot do it: its source must be a whole buffer, here it is a slice that depends on the warp.
    """
    batch_size, num_tokens, num_v_heads = shape
    head_bytes = T.cast(4 * WORDS, "int64")
    token_bytes = T.cast(num_v_heads, "int64") * head_bytes
    descriptor = T.create_tma_descriptor(
        TMA_FLOAT32, 4, target.data,
        WORDS, num_tokens, num_v_heads, batch_size,
        4, token_bytes, head_bytes, T.cast(num_tokens, "int64") * token_bytes,
        WORDS, CHUNK_SIZE, 1, 1,
        1, 1, 1, 1,
        0, TMA_SWIZZLE_128, TMA_L2_256, 0,
    )  # fmt: skip
    store = tirx.op.Op.get("tl.tma_store")
    T.evaluate(tirx.call_intrin("handle", store, descriptor, T.address_of(tile[base]), 0, start, head, batch, 0, 0))


@T.macro
def zero_rows(g_cumsum, T_inv, first, end, slot, slots, first_head, heads):
    """Zeros in the rows of no sequence; packed inputs only, whose batch is 1. A warp a head, 32 words a row."""
    warp = T.get_thread_binding() // 32
    lane = T.get_thread_binding() % 32
    row = T.alloc_var("int32")
    row = first + slot
    while row < end:
        if warp < heads:
            T_inv[0, row, first_head + warp, lane] = 0.0
            if lane == 0:
                g_cumsum[0, row, first_head + warp] = 0.0
        row = row + slots


def make(spec: Spec):
    batch_size, num_tokens, num_k_heads, num_v_heads, cu_size = T.dynamic("B T Hq Hv cu_size")
    # A row and a head stride fit 32 bits (less address arithmetic); the indices are 64-bit all the same.
    g_strides = (T.dynamic("g_stride_b", "int64"), *T.dynamic("g_stride_t g_stride_h"))
    beta_strides = (T.dynamic("beta_stride_b", "int64"), *T.dynamic("beta_stride_t beta_stride_h"))
    per_head = (batch_size, num_tokens, num_v_heads)
    f32 = "float32"

    @T.prim_func
    def solve_sm90(
        k: strided_rows("k", (batch_size, num_tokens, num_k_heads, spec.head_dim_k), spec.dtype),
        g: T.StridedTensor(per_head, g_strides, spec.gate_dtype),
        beta: T.StridedTensor(per_head, beta_strides, spec.beta_dtype),
        cu: T.Tensor((cu_size,), "int32"),
        g_cumsum: T.Tensor(per_head, f32),
        T_inv: T.Tensor((*per_head, WORDS), f32),
        cu_step: T.int32,
        seq_len: T.int32,
        num_seqs: T.int32,
        slots: T.int32,
        quads: T.int32,
    ):
        with T.Kernel(slots * num_k_heads * quads, threads=THREADS) as (block,):
            k_smem = T.alloc_shared((CHUNK_SIZE, spec.head_dim_k), spec.dtype)
            keys = alloc_keys(k_smem, spec)
            scratch = T.alloc_shared((WARPS * SCRATCH,), f32)
            rows_smem = T.alloc_shared((WARPS * ROWS_WORDS,), f32)
            T.annotate_layout(swizzled(k_smem))
            T.annotate_min_blocks_per_sm(MIN_CTAS)
            ready = T.alloc_barrier(1)
            tx = T.get_thread_binding()
            slot, k_head, quad, first_head, heads, head = (T.alloc_var("int32") for _ in range(6))
            slot = T.truncdiv(block, num_k_heads * quads)
            k_head = block - slot * num_k_heads * quads
            quad = 0
            if quads > 1:
                quad = T.truncmod(k_head, quads)
                k_head = T.truncdiv(k_head, quads)
            first_head = k_head * T.truncdiv(num_v_heads, num_k_heads) + quad * WARPS
            heads = T.min(T.truncdiv(num_v_heads, num_k_heads) - quad * WARPS, WARPS)
            warp, lane = tx // 32, tx % 32
            n, chunk, batch, start, length = (T.alloc_var("int32") for _ in range(5))
            flat_tokens = batch_size * num_tokens
            sequence_of_slot(cu, cu_step, seq_len, flat_tokens, num_seqs, CHUNK_SIZE, slot, n, chunk)
            locate_sequence(cu, cu_step, seq_len, flat_tokens, n, batch, start, length)
            start = start + chunk * CHUNK_SIZE
            length = T.min(length - chunk * CHUNK_SIZE, CHUNK_SIZE)
            if cu_step != 0:
                zero_rows(
                    g_cumsum, T_inv, offset(cu, cu_step, seq_len, flat_tokens, num_seqs), num_tokens,
                    slot, slots, first_head, heads,
                )  # fmt: skip
            if length > 0:
                stage_rows(rows_smem, g, beta, g_cumsum, batch, start, length, first_head, heads, warp, lane)
                load_keys_product(k, k_smem, keys, ready, batch, start, length, k_head, spec)
                T.sync_threads()
                head = warp
                while head < heads:
                    invert(WarpSolve(scratch, warp * SCRATCH, keys, rows_smem, warp * ROWS_WORDS), lane, spec.dtype)
                    store_tile(T_inv, scratch, warp * SCRATCH, batch, start, length, first_head + head, lane, per_head)
                    head = WARPS
                T.tma_store_wait(0)

    return solve_sm90


def specs(dtype="bfloat16", gate_dtype="float32", beta_dtype="float32", head_dim_k=128) -> list[Spec]:
    """Every Spec that calls with these dtypes and this native head size need."""
    return [Spec(dtype, gate_dtype, beta_dtype, head_dim_k)]


def solve(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, seqs: Sequences):
    """Sums the gates and inverts the chunks' triangular matrices. Equations: F0, F1, F2.

    Args:
        k: bf16 or fp16 `[B, T, Hq, K]`, K 64 or 128, any strides with unit last one.
        g: fp32, bf16 or fp16 `[B, T, Hv]` raw natural-log gate, any strides.
        beta: fp32, bf16 or fp16 `[B, T, Hv]`, any strides.
        seqs: the sequences, at least one, inside at least one row.

    Returns:
        g_cumsum fp32 `[B, T, Hv]` and T_inv `[B, T, Hv, 64]` in k's dtype, as `reference.solve`.
    """
    g_cumsum = torch.empty(g.shape, dtype=torch.float32, device=k.device)
    T_inv = torch.empty((*g.shape, CHUNK_SIZE), dtype=k.dtype, device=k.device)
    spec = Spec(DTYPE_NAMES[k.dtype], DTYPE_NAMES[g.dtype], DTYPE_NAMES[beta.dtype], k.shape[-1])
    kernel = build(make, spec, arch_table.of_device(k.device), PASS_CONFIGS)
    cu, cu_step, seq_len = cu_arguments(seqs, k.device)
    quads = -(-(g.shape[2] // k.shape[2]) // WARPS)
    kernel(
        tma_ready(k), g, beta, cu, g_cumsum, T_inv.view(torch.float32),
        cu_step, seq_len, seqs.num_seqs, seqs.max_slots, quads,
    )  # fmt: skip
    return g_cumsum, T_inv

"""Solve: the cumulative gate and the inverse T of every chunk's gated triangular matrix, in one launch.

    g_cumsum = cumsum(max(g, GATE_FLOOR))                                     F0, F1
    T_inv = (I + L)^-1,  L_ij = beta_i exp(g_i - g_j) (k_i . k_j), i > j      F2

Persistent CTAs. A task is a chunk slot and four neighbouring value heads (a "quad") with one, two or four key heads
among them; tasks are dealt out round robin, quads fastest: neighbours share the gates' cache lines; last chunks first:
the walk that comes next finds its first ones in the L2 cache. The load warp runs one task ahead of the warpgroup: keys
and gates of the next task arrive while this one's matrices are inverted.

    role            threads  computes
    warps 0 to 3    128      K Kᵀ of each key head (wgmma) into keys; then warp w inverts for value head w by itself
                             (tiles/inverse.py), and stores its tile (TMA); at the end zeros in rows of no sequence
    load, warp 4    32       finds the chunk, loads keys (TMA) and gates, sums the gates, g_cumsum to memory

    barrier         signalled by     waited by    guards
    k_ready         TMA              warps 0-3    a slot of k
    k_free          warps 0-3        load         the slot, after its product
    ready           load             warps 0-3    gates and the task's words
    free            warps 0-3        load         gates, read no more after the first part of the inverse; the words of
                                                  the task before (two slots)
    named 1         warps 0-3        warps 0-3    keys: every warp is done with the last ones; all are written

    shared memory   bytes             holds
    k               slots x 64 K x 2  keys, 128-byte swizzle
    keys            products x 10 KB  lower blocks of K Kᵀ, fp32
    scratch         4 x 8 KB          per warp: diagonal blocks, then the finished tile of T; aligned to 1 KB for TMA
    rows            4 x 1.2 KB        per head: pairs of cumulative gate and -beta; decay factors of the rows

Grid: as many CTAs as fit the device at once (three a multiprocessor; two where several key heads meet in a quad).
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
from .tiles import fragments, gate, pipeline
from .tiles import rows as row_tiles
from .tiles.gate import LOG2E, clamped_cumsum, load_rows, store_rows
from .tiles.inverse import (
    FACTORS_WORDS,
    GATES_WORDS,
    KEYS_WORDS,
    SCRATCH,
    UPPER_ZEROS,
    WarpSolve,
    finish,
    keys_offset,
    prepare,
    store_zeros,
)  # fmt: skip
from .tiles.program import locate_sequence, offset, sequence_of_slot_by_warp, strided_rows

tirx = tvm.tirx
WARPS = 4  # that invert, each for a value head of the quad
THREADS = 32 * (WARPS + 1)
WARPGROUP_BARRIER = 1
CTAS = {1: 3, 2: 2, 4: 2}  # products -> CTAs a multiprocessor
KEY_SLOTS = {1: 1, 2: 2, 4: 2}  # products -> slots of k; for two products a third CTA is worth less than a second slot
# A task's words; LEFT: first_head's place in its group.
BATCH, START, ROWS, FIRST_HEAD, HEADS, PRODUCTS, LEFT = range(7)
TASK = 8
WORDS = CHUNK_SIZE // 2  # T's rows, as 32-bit words
HALF_CHUNK, HALF_TILE = CHUNK_SIZE // 2, CHUNK_SIZE // 2 * WORDS
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
    """Compile key.

    Attributes:
        dtype: of k and T_inv.
        gate_dtype, beta_dtype: of g and beta.
        head_dim_k: 64 or 128.
        products: the most key heads that four neighbouring value heads can have, 1, 2 or 4 (`products_of`).
    """

    dtype: str = "bfloat16"
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"
    head_dim_k: int = 128
    products: int = 1


@dataclass
class Smem:
    """Shared memory and barriers of a CTA."""

    k: object
    keys: object
    scratch: object
    rows: object
    task: object
    k_ready: object
    k_free: object
    ready: object
    free: object


@dataclass
class Problem:
    """What the load warp reads, and where the sequences lie."""

    k: object
    g: object
    beta: object
    g_cumsum: object
    head_strides: tuple
    heads: tuple  # key heads, value heads
    cu: tuple  # what the macros of tiles/program.py take first


@dataclass
class Tasks:
    """The CTA's share of the tasks: first, first + ctas, …"""

    first: object
    count: object
    quads: object
    ctas: object


def products_of(group: int) -> int:
    """Returns the most key heads among four neighbouring value heads, rounded up to what is compiled."""
    if group == 1:
        return 4
    return 1 if group % WARPS == 0 else 2


def allocate(spec: Spec) -> Smem:
    """Allocates a CTA's shared memory and makes the barriers."""
    slots = KEY_SLOTS[spec.products]
    return Smem(
        k=T.alloc_shared((slots, CHUNK_SIZE, spec.head_dim_k), spec.dtype),
        keys=T.alloc_shared((spec.products * KEYS_WORDS,), "float32"),
        scratch=T.alloc_shared((WARPS * SCRATCH,), "float32"),
        rows=T.alloc_shared((WARPS * (GATES_WORDS + FACTORS_WORDS),), "float32"),
        task=T.alloc_shared((2 * TASK,), "int32"),
        k_ready=T.alloc_barrier([1] * slots),
        k_free=T.alloc_barrier([WARPS] * slots),
        ready=T.alloc_barrier([1]),
        free=T.alloc_barrier([WARPS]),
    )


@T.macro
def next_chunk(tasks: Tasks, problem: Problem, task: T.Ref, batch: T.Ref, start: T.Ref, rows: T.Ref, first_head: T.Ref):
    """Goes on to the first of the CTA's tasks from `task` on that has a chunk. rows = 0: there is none."""
    slot, n, chunk = (T.alloc_var("int32") for _ in range(3))
    rows = 0
    while (rows <= 0) & (task < tasks.count):
        slot = T.truncdiv(task, tasks.quads)
        first_head = (task - slot * tasks.quads) * WARPS  # noqa: F841, the caller's
        slot = T.truncdiv(tasks.count, tasks.quads) - 1 - slot
        sequence_of_slot_by_warp(*problem.cu, CHUNK_SIZE, slot, n, chunk)
        locate_sequence(*problem.cu[:-1], n, batch, start, rows)
        start = start + chunk * CHUNK_SIZE
        rows = T.min(rows - chunk * CHUNK_SIZE, CHUNK_SIZE)
        task = task + tasks.ctas
    rows = T.max(rows, 0)


@T.macro
def load_gates(problem: Problem, gates, betas, batch, start, rows, first_head):
    """Issues the loads of a task's gates and betas."""
    heads = T.min(problem.heads[1] - first_head, WARPS)
    if rows > 0:
        load_rows(gates, problem.g, batch, start, first_head, heads, rows, problem.head_strides[0])
        load_rows(betas, problem.beta, batch, start, first_head, heads, rows, problem.head_strides[1])


@T.macro
def load_keys(spec: Spec, m: Smem, k, batch, start, head, loaded: T.Ref):
    """Brings the next tile of keys."""
    slots = KEY_SLOTS[spec.products]
    slot = loaded % slots
    T.barrier_wait(m.k_free[slot], (loaded // slots + 1) % 2)
    T.tma_copy(
        k[batch, start : start + CHUNK_SIZE, head, 0 : spec.head_dim_k], m.k[slot, :, :], barrier=m.k_ready[slot]
    )
    if T.shuffle_elect(32):
        T.barrier_arrive(m.k_ready[slot])
    loaded = loaded + 1


@T.macro
def stage_gates(m: Smem, gates, betas, rows, count):
    """Sums the gates; writes pairs (gate as log2, -beta)."""
    lane = T.get_thread_binding() % 32
    pairs = T.alloc_local((4,), "float32")
    clamped_cumsum(gates, rows)
    T.barrier_wait(m.free[0], (count + 1) % 2)
    for h in T.unroll(WARPS):
        for r in T.unroll(2):
            pairs[2 * r] = gates[4 * r + h] * LOG2E
            pairs[2 * r + 1] = T.if_then_else(2 * lane + r < rows, -betas[4 * r + h], 0.0)
        for v in T.vectorized(4):
            m.rows[h * GATES_WORDS + 4 * lane + v] = pairs[v]


@T.macro
def publish(m: Smem, words, count):
    """The warp's arrival at `ready` with a task's words."""
    T.sync_warp()
    if T.get_thread_binding() % 32 == 0:
        for i, word in enumerate(words):
            m.task[count % 2 * TASK + i] = word
        T.barrier_arrive(m.ready[0])


@T.macro
def load_role(spec: Spec, m: Smem, problem: Problem, tasks: Tasks):
    gates, betas = T.alloc_local((8,), "float32"), T.alloc_local((8,), "float32")
    task, batch, start, rows, first_head = (T.alloc_var("int32") for _ in range(5))
    heads, first_key, products, group, count, loaded, key = (T.alloc_var("int32") for _ in range(7))
    group = T.truncdiv(problem.heads[1], problem.heads[0])
    count = 0
    loaded = 0
    task = tasks.first
    next_chunk(tasks, problem, task, batch, start, rows, first_head)
    load_gates(problem, gates, betas, batch, start, rows, first_head)
    while rows > 0:
        heads = T.min(problem.heads[1] - first_head, WARPS)
        first_key = T.truncdiv(first_head, group)
        products = 1 if spec.products == 1 else T.truncdiv(first_head + heads - 1, group) - first_key + 1
        load_keys(spec, m, problem.k, batch, start, first_key, loaded)
        stage_gates(m, gates, betas, rows, count)
        publish(m, (batch, start, rows, first_head, heads, products, first_head - first_key * group), count)
        store_rows(problem.g_cumsum, gates, batch, start, first_head, heads, rows)
        count = count + 1
        if spec.products > 1:
            key = first_key + 1
            while key < first_key + products:
                load_keys(spec, m, problem.k, batch, start, key, loaded)
                key = key + 1
        next_chunk(tasks, problem, task, batch, start, rows, first_head)
        load_gates(problem, gates, betas, batch, start, rows, first_head)
    T.barrier_wait(m.free[0], (count + 1) % 2)
    publish(m, (0, 0, 0), count)


@T.macro
def make_keys(spec: Spec, m: Smem, number, used: T.Ref, rows):
    """keys[number] = K Kᵀ of the next tile, rows past the chunk's end zero."""
    slots = KEY_SLOTS[spec.products]
    slot = used % slots
    product = T.alloc_fragment((CHUNK_SIZE, CHUNK_SIZE), "float32")
    T.barrier_wait(m.k_ready[slot], used // slots % 2)
    if rows < CHUNK_SIZE:
        row_tiles.zero_stage_from(m.k, slot, rows, spec.head_dim_k)
        T.fence_proxy_async()
        T.sync_threads(WARPGROUP_BARRIER, 32 * WARPS)
    T.wgmma_gemm(m.k[slot, :, :], m.k[slot, :, :], product, transpose_B=True, clear_accum=True)
    T.wait_wgmma(0)
    pipeline.settle(product)
    pipeline.arrive(m.k_free, slot)
    for i, j in T.Parallel(CHUNK_SIZE, CHUNK_SIZE):
        if j // 16 <= i // 16:
            m.keys[number * KEYS_WORDS + keys_offset(i, j)] = product[i, j]
    used = used + 1


@T.macro
def make_all_keys(spec: Spec, m: Smem, task, used: T.Ref, rows):
    """keys of the task's key heads, between the warps' last use of the old ones and their first of these."""
    T.sync_threads(WARPGROUP_BARRIER, 32 * WARPS)
    if spec.products == 1:
        make_keys(spec, m, 0, used, rows)
    else:
        number = T.alloc_var("int32")
        number = 0
        while number < m.task[task + PRODUCTS]:
            make_keys(spec, m, number, used, rows)
            number = number + 1
    T.sync_threads(WARPGROUP_BARRIER, 32 * WARPS)


@T.macro
def store_tile(T_inv, scratch, base, batch, start, rows, head, lane, shape, whole):
    """The finished tile to memory: by TMA when the chunk is full, else row by row, 16 bytes a lane.

    whole = 0: without the upper right quarter, which is zero and whose reader knows it.
    """
    if rows == CHUNK_SIZE:
        T.fence_proxy_async()
        T.sync_warp()
        if T.shuffle_elect(32):
            tma_store_words(T_inv, shape, scratch, base + HALF_TILE, batch, start + HALF_CHUNK, head)
            if whole != 0:
                tma_store_words(T_inv, shape, scratch, base, batch, start, head)
            T.tma_store_arrive()
        if whole == 0:
            for step in T.serial(HALF_CHUNK // 8):
                copy_words(T_inv, scratch, base, batch, start, head, step * 8 + lane // 4, lane % 4)
    else:
        T.sync_warp()
        for step in T.serial(T.ceildiv(rows, 4)):
            row = step * 4 + lane // 8
            if row < rows:
                copy_words(T_inv, scratch, base, batch, start, head, row, lane % 8)


@T.macro
def copy_words(T_inv, scratch, base, batch, start, head, row, group):
    """Four words of a row of the tile."""
    for v in T.vectorized(4):
        T_inv[batch, start + row, head, group * 4 + v] = scratch[base + row * WORDS + (group ^ (row % 8)) * 4 + v]


def tma_store_words(target, shape, tile, base, batch, start, head):
    """TMA store of half a tile (32 x 32 words, 128-byte swizzle) to target[batch, start:start + 32, head, :].

    `T.tma_copy` cannot do it: its source must be a whole buffer, here it is a slice that depends on the warp.
    """
    batch_size, num_tokens, num_v_heads = shape
    head_bytes = T.cast(4 * WORDS, "int64")
    token_bytes = T.cast(num_v_heads, "int64") * head_bytes
    descriptor = T.create_tma_descriptor(
        TMA_FLOAT32, 4, target.data,
        WORDS, num_tokens, num_v_heads, batch_size,
        4, token_bytes, head_bytes, T.cast(num_tokens, "int64") * token_bytes,
        WORDS, HALF_CHUNK, 1, 1,
        1, 1, 1, 1,
        0, TMA_SWIZZLE_128, TMA_L2_256, 0,
    )  # fmt: skip
    store = tirx.op.Op.get("tl.tma_store")
    T.evaluate(tirx.call_intrin("handle", store, descriptor, T.address_of(tile[base]), 0, start, head, batch, 0, 0))


def warp_solve(spec: Spec, m: Smem, warp, key) -> WarpSolve:
    """What `warp` inverts from and in; key: number of its key head in the task."""
    return WarpSolve(
        scratch=m.scratch,
        base=warp * SCRATCH,
        keys=m.keys,
        first_key=key * KEYS_WORDS,
        gates=m.rows,
        first_gate=warp * GATES_WORDS,
        factors=m.rows,
        first_factor=WARPS * GATES_WORDS + warp * FACTORS_WORDS,
    )


@T.macro
def invert_role(spec: Spec, m: Smem, T_inv, group, shape, whole):
    count, used, task, rows, head, heads, key, thread = (T.alloc_var("int32") for _ in range(8))
    n10 = T.alloc_local((8,), "float32")
    tx = T.get_thread_binding()
    store_zeros(warp_solve(spec, m, tx // 32, 0), spec.dtype, tx % 32, UPPER_ZEROS)
    count = 0
    used = 0
    T.barrier_wait(m.ready[0], 0)
    rows = m.task[ROWS]
    while rows > 0:
        task = count % 2 * TASK
        make_all_keys(spec, m, task, used, rows)
        thread = T.call_extern("int32", "(int)flash_qla::thread_index")  # read again: no address outlives the loop
        warp, lane = (thread >> 5) & 3, thread & 31
        head = warp
        heads = m.task[task + HEADS]
        while head < heads:  # once; an `if` of this size takes minutes to lower
            key = key_of_warp(spec, m.task[task + LEFT], warp, group)
            T.tma_store_wait(0)
            T.sync_warp()
            w = warp_solve(spec, m, warp, key if spec.products == 2 else key_of_warp(spec, 0, warp, group))
            prepare(w, n10, lane)
            pipeline.arrive(m.free, 0)
            finish(w, n10, lane, spec.dtype)
            store_tile(
                T_inv, m.scratch, warp * SCRATCH, m.task[task + BATCH], m.task[task + START], rows,
                m.task[task + FIRST_HEAD] + warp, lane, shape, whole,
            )  # fmt: skip
            head = WARPS
        if warp >= heads:
            pipeline.arrive(m.free, 0)
        count = count + 1
        T.barrier_wait(m.ready[0], count % 2)
        rows = m.task[count % 2 * TASK + ROWS]


def key_of_warp(spec: Spec, left, warp, group):
    """Expression: which of the task's key heads warp's value head belongs to."""
    if spec.products == 2:
        return T.if_then_else(left + warp >= group, 1, 0)
    return warp if spec.products == 4 else 0


@T.macro
def zero_rows(g_cumsum, T_inv, first, end, tasks: Tasks, num_v_heads):
    """Zeros in the rows of no sequence; packed inputs only, whose batch is 1. A warp a head, 32 words a row."""
    warp = T.get_thread_binding() // 32
    lane = T.get_thread_binding() % 32
    row, head = T.alloc_var("int32"), T.alloc_var("int32")
    row = first + tasks.first
    while row < end:
        head = warp
        while head < num_v_heads:
            T_inv[0, row, head, lane] = 0.0
            if lane == 0:
                g_cumsum[0, row, head] = 0.0
            head = head + WARPS
        row = row + tasks.ctas


def make(spec: Spec):
    """Returns the prim_func of a specification."""
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
        num_tasks: T.int32,
        quads: T.int32,
        ctas: T.int32,
        whole: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS) as (block,):
            T.import_source(fragments.LEAN_SOURCE + gate.SOURCE)
            T.pdl_trigger()  # all CTAs are resident: the next kernel's may come as soon as these go
            m = allocate(spec)
            T.annotate_min_blocks_per_sm(CTAS[spec.products])
            tasks = Tasks(block, num_tasks, quads, ctas)
            flat_tokens = batch_size * num_tokens
            if T.get_thread_binding() < 32 * WARPS:
                invert_role(spec, m, T_inv, T.truncdiv(num_v_heads, num_k_heads), per_head, whole)
                if cu_step != 0:
                    zero_rows(
                        g_cumsum, T_inv, offset(cu, cu_step, seq_len, flat_tokens, num_seqs), num_tokens, tasks,
                        num_v_heads,
                    )  # fmt: skip
                T.tma_store_wait(0)
            else:
                problem = Problem(
                    k, g, beta, g_cumsum, (g_strides[2], beta_strides[2]), (num_k_heads, num_v_heads),
                    (cu, cu_step, seq_len, flat_tokens, num_seqs),
                )  # fmt: skip
                load_role(spec, m, problem, tasks)

    return solve_sm90


def specs(dtype="bfloat16", gate_dtype="float32", beta_dtype="float32", head_dim_k=128, group=None) -> list[Spec]:
    """Every Spec that calls with these dtypes, this native head size and Hv / Hq (None: any) need."""
    wanted = CTAS if group is None else [products_of(group)]
    return [Spec(dtype, gate_dtype, beta_dtype, head_dim_k, products) for products in wanted]


def solve(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, seqs: Sequences, whole: bool = True):
    """Sums the gates and inverts the chunks' triangular matrices. Equations: F0, F1, F2.

    Args:
        k: bf16 or fp16 `[B, T, Hq, K]`, K 64 or 128, any strides with unit last one.
        g: fp32, bf16 or fp16 `[B, T, Hv]` raw natural-log gate, any strides.
        beta: fp32, bf16 or fp16 `[B, T, Hv]`, any strides.
        seqs: the sequences, at least one, inside at least one row.
        whole: write T_inv's upper right quarter too, which is zero (the fused forward does not read it).

    Returns:
        g_cumsum fp32 `[B, T, Hv]` and T_inv `[B, T, Hv, 64]` in k's dtype, as `reference.solve`.
    """
    g_cumsum = torch.empty(g.shape, dtype=torch.float32, device=k.device)
    T_inv = torch.empty((*g.shape, CHUNK_SIZE), dtype=k.dtype, device=k.device)
    products = products_of(g.shape[2] // k.shape[2])
    spec = Spec(DTYPE_NAMES[k.dtype], DTYPE_NAMES[g.dtype], DTYPE_NAMES[beta.dtype], k.shape[-1], products)
    kernel = build(make, spec, arch_table.of_device(k.device))
    cu, cu_step, seq_len = cu_arguments(seqs, k.device)
    quads = -(-g.shape[2] // WARPS)
    tasks = seqs.max_slots * quads
    ctas = min(tasks, CTAS[products] * arch_table.num_sms(k.device))
    kernel(
        tma_ready(k), g, beta, cu, g_cumsum, T_inv.view(torch.float32),
        cu_step, seq_len, seqs.num_seqs, tasks, quads, ctas, int(whole),
    )  # fmt: skip
    return g_cumsum, T_inv

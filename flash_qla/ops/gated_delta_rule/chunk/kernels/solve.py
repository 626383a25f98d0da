"""Solve: the cumulative gate and the inverse T of every chunk's gated triangular matrix, in one launch.

    g_cumsum = cumsum(max(g, GATE_FLOOR))                                     F0, F1
    T_inv = (I + L)^-1,  L_ij = beta_i exp(g_i - g_j) (k_i . k_j), i > j      F2

Persistent CTAs of four warps. A task is a chunk slot and four neighbouring value heads (a "quad") with one, two or four
key heads among them; tasks are dealt out round robin, quads fastest: neighbours share the gates' cache lines; last
chunks first: the walk that comes next finds its first ones in the L2 cache. For a task:

    together        K Kᵀ of each key head (wgmma), into keys
    every warp      under the first of these: a barrier of the CTA, then the sums of its head's gates (tiles/gate.py)
    warp 0          looks for the next task
    (barrier)
    every warp      stores g_cumsum and starts to load the next task's gates (cp.async), warp 0 its keys (TMA)
    every warp      inverts for its value head (tiles/inverse.py), and stores its tile (TMA)

A slot of k is loaded again as soon as its product is done: from L2, where the other key heads of the next task are
brought while this one is inverted, and while the warps sum gates.

At the end, zeros in rows of no sequence. T's upper right quarter is zero; `whole` = 0 leaves it unwritten. `ready` = 1:
instead of T, what the forward walk multiplies with (tiles/inverse.py): -T beta, and in chunks whose |g_cumsum| nowhere
exceeds MILD[dtype] -exp(-g_cumsum_i) T_ij beta_j exp(g_cumsum_j), which needs no gate at all.

    barrier     signalled by     waited by    guards
    k_ready     TMA              all          a slot of k
    k_free      all              warp 0       the slot, after its product (where a task may have several key heads)

    shared memory   bytes                holds
    k               slots x 64 K x 2     keys, 128-byte swizzle
    keys            products x 9 KB      lower blocks of K Kᵀ
    scratch         4 x 6 KB             per warp: diagonal blocks, then the finished tile of T; aligned to 1 KB for TMA
    rows            4 x 0.9 KB + 2 KB    per head: pairs of cumulative gate and -beta, decay factors; then the raw gates
    zeros           2 KB                 for T's upper right quarter
    task            96                   words of two tasks and of the cursor

Grid: as many CTAs as fit the device at once (CTAS a multiprocessor).
"""

from dataclasses import dataclass

import tilelang.language as T
import torch
from tilelang import tvm

from flash_qla import arch as arch_table

from ..constants import CHUNK_SIZE, MILD
from ..sequences import Sequences
from .build import ROLE_PASS_CONFIGS, build
from .launch import DTYPE_NAMES, cu_arguments, tma_ready
from .tiles import fragments, gate, inverse_source, pipeline, prefetch
from .tiles import rows as row_tiles
from .tiles.gate import BATCH, FIRST_HEAD, FIRST_KEY, GROUP, HEADS, LEFT, PRODUCTS, ROWS, START, TASK_WORDS
from .tiles.inverse import (
    FACTORS_WORDS,
    GATES_WORDS,
    KEYS_WORDS,
    SCRATCH,
    UPPER,
    UPPER_ZEROS,
    WarpSolve,
    finish,
    minus_one,
    prepare,
    store_keys,
    store_zeros,
)  # fmt: skip
from .tiles.program import offset, strided_rows

tirx = tvm.tirx
WARPS = 4  # each for a value head of the quad
THREADS = 32 * WARPS
CTA_BARRIER = 1
CTAS = {1: 3, 2: 3, 4: 2}  # products -> CTAs a multiprocessor
KEY_SLOTS = {1: 1, 2: 1, 4: 2}  # products -> slots of k
CURSOR = 2 * TASK_WORDS  # behind the two tasks
RAW = WARPS * (GATES_WORDS + FACTORS_WORDS)  # where the raw gates lie in rows
ZEROS = CHUNK_SIZE // 2 * CHUNK_SIZE // 4  # words of T's upper right quarter
WORDS = CHUNK_SIZE // 2  # T's rows, as 32-bit words
TMA_FLOAT32, TMA_SWIZZLE_64, TMA_SWIZZLE_128, TMA_L2_64, TMA_L2_128 = 7, 2, 3, 1, 2  # CUtensorMap enumerators
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
    zeros: object
    task: object
    k_ready: object
    k_free: object


@dataclass
class Problem:
    """What a CTA reads, and where the sequences lie."""

    k: object
    g: object
    beta: object
    g_cumsum: object
    strides: tuple  # of g and beta
    heads: tuple  # key heads, value heads
    cu: tuple  # what the macros of tiles/program.py take first


@dataclass
class Tasks:
    """The chunk slots, the quads of heads of each, and how far a CTA's next task lies behind its last one."""

    slots: object
    quads: object
    steps: tuple


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
        rows=T.alloc_shared((RAW + gate.raw_words(spec.gate_dtype, spec.beta_dtype),), "float32"),
        zeros=T.alloc_shared((ZEROS,), "float32"),
        task=T.alloc_shared((3 * TASK_WORDS,), "int32", scope="shared"),  # static, beside the barriers
        k_ready=T.alloc_barrier([1] * slots),
        k_free=T.alloc_barrier([WARPS] * slots),
    )


# ---- tasks and their loads


@T.macro
def load_keys(spec: Spec, m: Smem, k, batch, start, head, loaded: T.Ref):
    """Brings the next tile of keys."""
    slots = KEY_SLOTS[spec.products]
    slot = loaded % slots
    if spec.products > 1:
        T.barrier_wait(m.k_free[slot], (loaded // slots + 1) % 2)
    T.tma_copy(
        k[batch, start : start + CHUNK_SIZE, head, 0 : spec.head_dim_k], m.k[slot, :, :], barrier=m.k_ready[slot]
    )
    if T.shuffle_elect(32):
        T.barrier_arrive(m.k_ready[slot])
    loaded = loaded + 1


def find_task(m: Smem, problem: Problem, tasks: Tasks, count):
    """Call expression: writes the CTA's task number `count`; by one warp."""
    task = count % 2 * TASK_WORDS
    return gate.find(m.task, task, CURSOR, problem.cu, tasks.slots, tasks.quads, tasks.steps, problem.heads[1])


@T.macro
def fetch(spec: Spec, m: Smem, problem: Problem, task, loaded: T.Ref):
    """Starts the loads of the task with these words: gates by all warps, its first keys by one."""
    if m.task[task + ROWS] > 0:
        gate.fetch(m.rows, RAW, m.task, task, problem.g, problem.strides[0], problem.beta, problem.strides[1])
        if T.get_thread_binding() < 32:
            batch, start, key = m.task[task + BATCH], m.task[task + START], m.task[task + FIRST_KEY]
            load_keys(spec, m, problem.k, batch, start, key, loaded)
            if spec.products > 1:
                prefetch_keys(spec, m, problem, task, loaded, batch, start, key)


@T.macro
def prefetch_keys(spec: Spec, m: Smem, problem: Problem, task, loaded: T.Ref, batch, start, key):
    """The task's other key heads: into their slot if there is one, else into L2."""
    last = T.alloc_var("int32")
    last = key + m.task[task + PRODUCTS]
    if KEY_SLOTS[spec.products] > 1:
        if key + 1 < last:
            load_keys(spec, m, problem.k, batch, start, key + 1, loaded)
    for i in tuple(range(KEY_SLOTS[spec.products], spec.products)):
        if key + i < last:
            if T.shuffle_elect(32):
                prefetch.tile(problem.k, batch, start, key + i)


# ---- keys, inverses, results


@T.macro
def start_keys(spec: Spec, m: Smem, product, slot, round, rows):
    """Issues K Kᵀ of the next tile, rows past the chunk's end zero."""
    T.barrier_wait(m.k_ready[slot], round % 2)
    if rows < CHUNK_SIZE:
        row_tiles.zero_stage_from(m.k, slot, rows, spec.head_dim_k)
        T.fence_proxy_async()
        T.sync_threads(CTA_BARRIER, 32 * WARPS)
    T.wgmma_gemm(m.k[slot, :, :], m.k[slot, :, :], product, transpose_B=True, clear_accum=True)


@T.macro
def finish_keys(spec: Spec, m: Smem, problem: Problem, product, task, loaded: T.Ref, number, slot, minus):
    """keys[number] = the product; its slot to the next key head that has none."""
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(product, num_regs=CHUNK_SIZE * CHUNK_SIZE // 128)
    if spec.products > 1:
        pipeline.arrive(m.k_free, slot)
        following = number + KEY_SLOTS[spec.products]
        if (T.get_thread_binding() < 32) & (following < m.task[task + PRODUCTS]):
            load_keys(
                spec, m, problem.k, m.task[task + BATCH], m.task[task + START],
                m.task[task + FIRST_KEY] + following, loaded,
            )  # fmt: skip
    store_keys(m.keys, number * KEYS_WORDS, product, minus)


@T.macro
def make_all_keys(
    spec: Spec, m: Smem, problem: Problem, tasks: Tasks, task, count, used: T.Ref, loaded: T.Ref, rows, minus, warp,
    mild: T.Ref, limit,
):  # fmt: skip
    """keys of the task's key heads and the sums of its gates; the next task is looked for."""
    slots = KEY_SLOTS[spec.products]
    product = T.alloc_fragment((CHUNK_SIZE, CHUNK_SIZE), "float32")
    if spec.products == 1:
        start_keys(spec, m, product, 0, count, rows)
        gate.wait()
        T.sync_threads(CTA_BARRIER, THREADS)  # the gates are there, and nobody needs the old keys
        mild = gate.sum_rows(m.rows, RAW, m.rows, warp * GATES_WORDS, rows, limit, problem.g, problem.beta)
        finish_keys(spec, m, problem, product, task, loaded, 0, 0, minus)
        if T.get_thread_binding() < 32:
            find_task(m, problem, tasks, count + 1)
    else:
        number = T.alloc_var("int32")
        start_keys(spec, m, product, used % slots, used // slots, rows)
        gate.wait()
        T.sync_threads(CTA_BARRIER, THREADS)
        finish_keys(spec, m, problem, product, task, loaded, 0, used % slots, minus)
        mild = gate.sum_rows(m.rows, RAW, m.rows, warp * GATES_WORDS, rows, limit, problem.g, problem.beta)
        if T.get_thread_binding() < 32:
            find_task(m, problem, tasks, count + 1)
        used = used + 1
        number = 1
        while number < m.task[task + PRODUCTS]:
            start_keys(spec, m, product, used % slots, used // slots, rows)
            finish_keys(spec, m, problem, product, task, loaded, number, used % slots, minus)
            used = used + 1
            number = number + 1


@T.macro
def store_tile(m: Smem, T_inv, w, batch, start, rows, head, lane, whole, shape):
    """The finished tile to memory: by TMA when the chunk is full, else row by row, 16 bytes a lane.

    whole = 0 leaves out the zeros right of column 32 in the chunk's first 32 rows.
    """
    if rows == CHUNK_SIZE:
        T.fence_proxy_async()
        T.sync_warp()
        if T.shuffle_elect(32):
            half = WORDS // 2
            tma_store_words(T_inv, shape, w.scratch, w.base + UPPER, half, 0, batch, start, head)
            if whole != 0:
                tma_store_words(T_inv, shape, m.zeros, 0, half, half, batch, start, head)
            tma_store_words(T_inv, shape, w.scratch, w.base, WORDS, 0, batch, start + CHUNK_SIZE // 2, head)
            T.tma_store_arrive()
    else:
        T.sync_warp()
        T.call_extern(
            "handle", "flash_qla::store_rows", T.address_of(T_inv[batch, start, head, 0]), shape[2] * WORDS,
            T.address_of(w.scratch[w.base]), rows, whole,
        )  # fmt: skip


def tma_store_words(target, shape, tile, base, words, first_word, batch, start, head):
    """One TMA store of a 32 x `words` tile, swizzled by its width, to target[batch, start:, head, first_word:].

    `T.tma_copy` cannot do it: its source must be a whole buffer, here it is a slice that depends on the warp.
    """
    batch_size, num_tokens, num_v_heads = shape
    head_bytes = T.cast(4 * WORDS, "int64")
    token_bytes = T.cast(num_v_heads, "int64") * head_bytes
    swizzle, promotion = (TMA_SWIZZLE_128, TMA_L2_128) if words == WORDS else (TMA_SWIZZLE_64, TMA_L2_64)
    descriptor = T.create_tma_descriptor(
        TMA_FLOAT32, 4, target.data,
        WORDS, num_tokens, num_v_heads, batch_size,
        4, token_bytes, head_bytes, T.cast(num_tokens, "int64") * token_bytes,
        words, CHUNK_SIZE // 2, 1, 1,
        1, 1, 1, 1,
        0, swizzle, promotion, 0,
    )  # fmt: skip
    store = tirx.op.Op.get("tl.tma_store")
    T.evaluate(
        tirx.call_intrin("handle", store, descriptor, T.address_of(tile[base]), first_word, start, head, batch, 0, 0)
    )


def warp_solve(spec: Spec, m: Smem, warp, key, minus, plain=False, ready=0) -> WarpSolve:
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
        minus=minus,
        plain=plain,
        ready=ready,
    )


@T.macro
def invert(spec: Spec, m: Smem, task, warp, lane, minus, plain, ready, T_inv, rows, whole, shape):
    """The warp's value head: inverse and store."""
    n10 = T.alloc_local((8,), "float32")
    key = T.alloc_var("int32")
    key = key_of_warp(spec, m, task, warp)
    T.tma_store_wait(0)
    T.sync_warp()
    w = warp_solve(
        spec, m, warp, key if spec.products == 2 else key_of_warp(spec, m, task, warp), minus, plain, ready
    )  # fmt: skip
    prepare(w, n10, lane)
    finish(w, n10, lane, spec.dtype)
    store_tile(
        m, T_inv, w, m.task[task + BATCH], m.task[task + START], rows, m.task[task + FIRST_HEAD] + warp, lane,
        whole, shape,
    )  # fmt: skip


@T.macro
def solve_role(spec: Spec, m: Smem, problem: Problem, tasks: Tasks, first, T_inv, whole, ready, shape):
    count, used, loaded, task, rows, head, heads, thread, minus, mild = (T.alloc_var("int32") for _ in range(10))
    tx = T.get_thread_binding()
    minus = minus_one()
    store_zeros(warp_solve(spec, m, tx // 32, 0, minus), tx % 32, UPPER_ZEROS)
    count = 0
    used = 0
    loaded = 0
    for i in T.unroll(ZEROS // THREADS):
        m.zeros[i * THREADS + tx] = 0.0
    T.fence_proxy_async()
    if tx < 32:
        words = gate.first_cursor(first, tasks.quads, T.truncdiv(problem.heads[1], problem.heads[0]))
        for i, word in enumerate(words):
            m.task[CURSOR + i] = word
        T.sync_warp()
        find_task(m, problem, tasks, 0)
    T.sync_threads(CTA_BARRIER, THREADS)
    fetch(spec, m, problem, 0, loaded)
    rows = m.task[ROWS]
    while rows > 0:
        task = count % 2 * TASK_WORDS
        thread = T.call_extern("int32", "(int)flash_qla::thread_index")  # read again: no address outlives the loop
        warp, lane = (thread >> 5) & 3, thread & 31
        heads = m.task[task + HEADS]
        make_all_keys(
            spec, m, problem, tasks, task, count, used, loaded, rows, minus, warp, mild,
            T.if_then_else(ready != 0, T.float32(MILD[spec.dtype]), T.float32(-1.0)),
        )  # fmt: skip
        T.sync_threads(CTA_BARRIER, THREADS)
        gate.store(problem.g_cumsum, shape[1], shape[2], m.rows, RAW, m.task, task)
        fetch(spec, m, problem, (count + 1) % 2 * TASK_WORDS, loaded)
        head = T.if_then_else(warp < heads, mild, -1)
        while head > 0:  # once; an `if` of this size takes minutes to lower
            invert(spec, m, task, warp, lane, minus, True, ready, T_inv, rows, whole, shape)
            head = -1
        while head == 0:
            invert(spec, m, task, warp, lane, minus, False, ready, T_inv, rows, whole, shape)
            head = -1
        count = count + 1
        rows = m.task[count % 2 * TASK_WORDS + ROWS]


def key_of_warp(spec: Spec, m: Smem, task, warp):
    """Expression: which of the task's key heads warp's value head belongs to."""
    if spec.products == 2:
        return T.if_then_else(m.task[task + LEFT] + warp >= m.task[CURSOR + GROUP], 1, 0)
    return warp if spec.products == 4 else 0


@T.macro
def zero_rows(g_cumsum, T_inv, first, end, block, ctas, num_v_heads):
    """Zeros in the rows of no sequence; packed inputs only, whose batch is 1. A warp a head, 32 words a row."""
    warp = T.get_thread_binding() // 32
    lane = T.get_thread_binding() % 32
    row, head = T.alloc_var("int32"), T.alloc_var("int32")
    row = first + block
    while row < end:
        head = warp
        while head < num_v_heads:
            T_inv[0, row, head, lane] = 0.0
            if lane == 0:
                g_cumsum[0, row, head] = 0.0
            head = head + WARPS
        row = row + ctas


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
        num_slots: T.int32,
        quads: T.int32,
        step_slots: T.int32,
        step_quads: T.int32,
        ctas: T.int32,
        whole: T.int32,
        ready: T.int32,
    ):
        with T.Kernel(ctas, threads=THREADS) as (block,):
            T.import_source(fragments.LEAN_SOURCE + gate.SOURCE + inverse_source.SOURCE + prefetch.SOURCE)
            T.pdl_trigger()  # all CTAs are resident: the next kernel's may come as soon as these go
            m = allocate(spec)
            T.annotate_min_blocks_per_sm(CTAS[spec.products])
            tasks = Tasks(num_slots, quads, (step_slots, step_quads))
            flat_tokens = batch_size * num_tokens
            problem = Problem(
                k, g, beta, g_cumsum, (g_strides, beta_strides), (num_k_heads, num_v_heads),
                (cu, cu_step, seq_len, flat_tokens, num_seqs),
            )  # fmt: skip
            solve_role(spec, m, problem, tasks, block, T_inv, whole, ready, per_head)
            if cu_step != 0:
                zero_rows(
                    g_cumsum, T_inv, offset(cu, cu_step, seq_len, flat_tokens, num_seqs), num_tokens, block,
                    ctas, num_v_heads,
                )  # fmt: skip
            T.tma_store_wait(0)

    return solve_sm90


def specs(dtype="bfloat16", gate_dtype="float32", beta_dtype="float32", head_dim_k=128, group=None) -> list[Spec]:
    """Every Spec that calls with these dtypes, this native head size and Hv / Hq (None: any) need."""
    wanted = CTAS if group is None else [products_of(group)]
    return [Spec(dtype, gate_dtype, beta_dtype, head_dim_k, products) for products in wanted]


def solve(k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, seqs: Sequences, ready: bool = False):
    """Sums the gates and inverts the chunks' triangular matrices. Equations: F0, F1, F2.

    Args:
        k: bf16 or fp16 `[B, T, Hq, K]`, K 64 or 128, any strides with unit last one.
        g: fp32, bf16 or fp16 `[B, T, Hv]` raw natural-log gate, any strides.
        beta: fp32, bf16 or fp16 `[B, T, Hv]`, any strides.
        seqs: the sequences, at least one, inside at least one row.
        ready: T_inv holds what the forward walk multiplies with (module docstring) instead; of a chunk's upper 32 rows
            only the first 32 columns are written, the others can only be zero.

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
        cu_step, seq_len, seqs.num_seqs, seqs.max_slots, quads, ctas // quads, ctas % quads, ctas,
        int(not ready), int(ready),
    )  # fmt: skip
    return g_cumsum, T_inv

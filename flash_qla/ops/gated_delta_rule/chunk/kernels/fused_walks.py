"""Fused forward with persistent CTAs: one a multiprocessor, each takes walks until none is left (`tiles/walks.py`).

The chunk is fused_fwd.py's; here are the roles around it. A CTA's first loads and state come in a burst of all CTAs
(16,000 cycles, five chunks' time, until the first U), its last state leaves while nothing is computed. Here load, gate
and scores run ahead into the next walk, whose state is in L2 before it is needed and loaded while this walk's is
stored. Chunks, stages and phases are counted over all walks of the CTA. A chunk takes about 1 % longer, so long walks
have CTAs of their own (`launch.has_persistent_walks`).

Roles, barriers and shared memory are fused_fwd.py's, and
    barrier   signalled by   waited by    guards
    placed    load           all others   a walk's place in shared memory
    left      all others     load         the same, read
"""

import tilelang.language as T

from . import fused_fwd
from .fused_fwd import (
    FIRST_GATE_THREAD,
    FIRST_VALUE_THREAD,
    LOG2E,
    MILD_LOG2,
    PREFETCH_CHUNKS,
    REGISTERS,
    RENORM,
    SCORES_BARRIER,
    STRONG,
    UNROLL,
    V_TILE,
    C,
    Smem,
    Spec,
    Tiles,
    allocate,
    allocate_tiles,
    gate_of,
    last_chunk,
    next_chunk,
    prefetch_gates,
    read_state,
    stage_of,
    turn_of,
    wait_state,
    zero_past_end,
)  # fmt: skip
from .tiles import fragments, pipeline, program, rows, scores, state, walks
from .tiles.walks import Walk


@T.macro
def load_role(spec: Spec, m: Smem, walk: Walk, q, k, v, T_inv, g_cumsum, beta):
    start, batch, k_head, v_head, v_col = (T.alloc_var("int32") for _ in range(5))
    for number in T.serial(walk.chunks):
        i = walk.base + number
        stage = stage_of(m, i)
        start = walk.start  # all read before the wait
        batch = walk.batch
        k_head = walk.k_head
        v_head = walk.v_head
        v_col = walk.v_col
        left = start + number * C
        right = left + C
        T.barrier_wait(m.freed[stage], (turn_of(m, i) + 1) % 2)
        if i == 1:  # all CTAs load at once: first what their first chunks wait for
            T.barrier_wait(m.loaded[0], 0)
        T.tma_copy(k[batch, left:right, k_head, 0 : spec.head_dim_k], m.k[stage, :, :], barrier=m.loaded[stage])
        for w in tuple(range(spec.value_warpgroups)):
            col = v_col + w * V_TILE
            T.tma_copy(
                v[batch, left:right, v_head, col : col + V_TILE],
                m.v[stage * spec.value_warpgroups + w, :, :],
                barrier=m.loaded[stage],
            )
        T.tma_copy(q[batch, left:right, k_head, 0 : spec.head_dim_k], m.q[stage, :, :], barrier=m.loaded[stage])
        if i == 0:
            T.pdl_sync()
        T.tma_copy(T_inv[batch, left:right, v_head, 0:C], m.t[stage, :, :], barrier=m.loaded[stage])
        if T.shuffle_elect(32):
            T.barrier_arrive(m.loaded[stage])
        prefetch_gates(walk, number + PREFETCH_CHUNKS, g_cumsum, beta)


@T.macro
def store_role(m: Smem, walk: Walk, o):
    for i in T.serial(walk.chunks):
        left = walk.start + i * C
        T.barrier_wait(m.o_ready[0], (walk.base + i) % 2)
        if walk.length - i * C >= C:
            T.copy(m.o, o[walk.batch, left : left + C, walk.v_head, walk.v_col : walk.v_col + m.width])
        else:
            rows.store_rows(o, m.o, walk.batch, left, walk.v_head, walk.v_col, walk.length - i * C, m.width)
        pipeline.arrive(m.o_free, 0)


@T.macro
def gate_role(spec: Spec, m: Smem, walk: Walk, g_cumsum, beta, scale):
    """One token a lane of two warps; both see the whole chunk's gates, so both decide alike."""
    row = T.get_thread_binding() - FIRST_GATE_THREAD
    last = T.alloc_var("int32")
    g = T.alloc_var("float32")
    g_last = T.alloc_var("float32")
    span = T.alloc_var("float32")
    b = T.alloc_var("float32")
    mode = T.alloc_var("int32")
    pending = T.alloc_var("float32")  # log2 of the true state over the registers' state
    pending = 0.0
    for i in T.serial(walk.chunks):
        c = walk.base + i
        stage = stage_of(m, c)
        gate = gate_of(m, c)
        left = walk.start + i * C
        last = T.min(walk.length - i * C, C) - 1
        g_last = g_cumsum[walk.batch, left + last, walk.v_head] * LOG2E
        g = g_cumsum[walk.batch, left + T.min(row, last), walk.v_head] * LOG2E
        span = g_cumsum[walk.batch, left + T.min((row + 32) % C, last), walk.v_head] * LOG2E
        b = T.cast(beta[walk.batch, left + T.min(row, last), walk.v_head], "float32")
        b = T.if_then_else(row <= last, b, 0.0)
        span = T.max(T.abs(pending + g), T.abs(pending + span))
        mode = T.any_sync(T.cast(span > MILD_LOG2[spec.dtype], "int32"))
        T.barrier_wait(m.freed[stage], (turn_of(m, c) + 1) % 2)
        m.g[gate, row] = g
        m.beta[gate, row] = b
        m.pre[gate, row] = -T.exp2(pending + g)
        m.row[gate, row] = T.exp2(T.if_then_else(mode != 0, 0.0, -pending - g))
        m.inv[gate, row] = T.exp2(T.if_then_else(mode != 0, g_last - g, 0.0))
        m.post[gate, row] = scale * T.exp2(T.if_then_else(mode != 0, 0.0, pending + g))
        pending = pending + g_last
        if row == 0:
            m.total[gate] = T.exp2(pending)
        if mode != 0:
            mode = STRONG
            pending = 0.0
        else:
            if spec.store_h or T.abs(pending) > MILD_LOG2[spec.dtype] * 0.5 or i == walk.chunks - 1:
                mode = RENORM
                pending = 0.0
        if row == 0:
            m.mode[gate] = mode
        pipeline.arrive(m.loaded, stage)


@T.macro
def scores_role(spec: Spec, m: Smem, base, length, chunks):
    """T scaled in its place, then P."""
    P = T.alloc_fragment((C, C), "float32")
    for i in T.serial(chunks):
        c = base + i
        stage = stage_of(m, c)
        gate = gate_of(m, c)
        T.barrier_wait(m.loaded[stage], turn_of(m, c) % 2)
        strong = m.mode[gate] == STRONG
        T.wgmma_gemm(m.q[stage, :, :], m.k[stage, :, :], P, transpose_B=True, clear_accum=True)
        if length - i * C < C:
            T.wait_wgmma(0)
            zero_past_end(spec, m, stage, length - i * C)
            T.sync_threads(SCORES_BARRIER, 128)
        scores.scale_inverse(m.t, stage, m.row, m.beta, gate)
        pipeline.publish(m.solved, stage)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(P, num_regs=C * C // 128)
        T.barrier_wait(m.used[stage], (turn_of(m, c) + 1) % 2)
        scores.store(m.p, stage, P, m.g, gate, strong)  # F6
        pipeline.publish(m.scored, stage)


@T.macro
def value_role(spec: Spec, m: Smem, walk: Walk, chunks, f: Tiles, mode: T.Ref, h):
    """A walk, from its first state in S to its last."""
    # keeps S in one place: bf16 states spilled without
    T.warpgroup_fence_operand(f.S, num_regs=m.width * spec.head_dim_k // (128 * (m.width // V_TILE)))
    if chunks > 0:
        T.copy(f.S, f.S_op)
        T.barrier_wait(m.solved[stage_of(m, walk.base)], turn_of(m, walk.base) % 2)
        mode = m.mode[gate_of(m, walk.base)]
        read_state(m, f, walk.base)
        wait_state(spec, m, f, walk.base)
        for number in T.serial(chunks - 1):
            i = walk.base + number
            if mode == STRONG:
                next_chunk(spec, m, walk, f, i, mode, True, h, None)
            else:
                next_chunk(spec, m, walk, f, i, mode, False, h, None)
        last = walk.base + chunks - 1
        if mode == STRONG:
            last_chunk(spec, m, walk, f, last, mode, True)
        else:
            last_chunk(spec, m, walk, f, last, mode, False)


def store_state(spec: Spec, f: Tiles, target, row, walk: Walk):
    return state.store_lean(target, f.S, row, walk.v_head, walk.v_col, spec.head_dim_k, FIRST_VALUE_THREAD)


@T.macro
def load_start(spec: Spec, m: Smem, S, walk: Walk, h0, starts):
    state.load_lean(
        S, h0, starts, walk.n, walk.slot, walk.segment, walk.v_head, walk.v_col, m.width, spec.head_dim_k,
        FIRST_VALUE_THREAD,
    )  # fmt: skip


@T.macro
def take_walks(spec: Spec, m: Smem, walk: Walk, chunks: T.Ref, number: T.Ref, base: T.Ref, h0, starts, ht, h):
    """The value role of a persistent CTA: the next walk's state is loaded while this one's is stored."""
    f = allocate_tiles(spec)
    mode = T.alloc_var("int32")
    walks.wait(m.walks, 0)
    load_start(spec, m, f.S, walk, h0, starts)
    while walk.some != 0:
        chunks = walk.chunks
        value_role(spec, m, walk, chunks, f, mode, h)
        walks.wait(m.walks, number + 1)
        load_start(spec, m, f.S_next, walks.at(m.walks, number + 1), h0, starts)
        if walk.ht_row < ht.shape[0]:
            store_state(spec, f, ht, walk.ht_row, walk)
        walks.leave(m.walks, number, base)
        T.copy(f.S_next, f.S)


@T.macro
def find_walk(spec: Spec, m: Smem, number, lengths, grid, h0):
    """The load warp finds a walk and brings its first state, unless that is needed at once, into L2."""
    walks.find(m.walks, number, lengths, grid, spec.head_dim_v // m.width, m.width)
    walk = walks.at(m.walks, walks.found(m.walks))
    if walks.found(m.walks) > 0 and walk.segment == 0:
        if walk.n < h0.shape[0]:
            state.prefetch(h0, walk.n, walk.v_head, walk.v_col, m.width, spec.head_dim_k)


def sources(spec: Spec) -> str:
    """CUDA functions that the kernel calls."""
    text = fragments.LEAN_SOURCE + rows.SOURCE + state.LEAN_SOURCE
    text += state.READ_SOURCE + walks.SOURCE
    return text + scores.source(spec.dtype, UNROLL[spec.value_warpgroups])


def make(spec: Spec):
    """Returns the prim_func of a specification."""
    K, V, wgs = spec.head_dim_k, spec.head_dim_v, spec.value_warpgroups
    load_regs, scores_regs, value_regs = REGISTERS[wgs]
    batch, num_tokens, num_k_heads, num_v_heads = T.dynamic("batch num_tokens num_k_heads num_v_heads")
    cu_len, start_slots = T.dynamic("cu_len start_slots")

    def strided(name, heads, dim, dtype):
        return program.strided_rows(name, (batch, num_tokens, heads, dim), dtype)

    beta_type = program.strided_gates("beta", (batch, num_tokens, num_v_heads), spec.beta_dtype)

    g_cumsum_type = program.strided_gates("g_cumsum", (batch, num_tokens, num_v_heads), "float32")

    @T.prim_func
    def fused_forward(
        q: strided("q", num_k_heads, K, spec.dtype),
        k: strided("k", num_k_heads, K, spec.dtype),
        v: strided("v", num_v_heads, V, spec.dtype),
        T_inv: T.Tensor((batch, num_tokens, num_v_heads, C), spec.dtype),
        g_cumsum: g_cumsum_type,
        beta: beta_type,
        h0: state.strided_state("h0", spec.h0_dtype, K, V),
        starts: T.Tensor((start_slots, num_v_heads, V, K), "float32"),
        cu: T.Tensor((cu_len,), "int32"),
        o: strided("o", num_v_heads, V, spec.dtype),
        ht: state.strided_state("ht", spec.ht_dtype, K, V),
        h: state.strided_state("h", spec.dtype, K, V),
        scale: T.float32,
        num_seqs: T.int32,
        cu_step: T.int32,
        seq_len: T.int32,
        segment_tokens: T.int32,
        num_slots: T.int32,
        follows_solve: T.int32,
        num_ctas: T.int32,
    ):
        with T.Kernel(num_ctas, threads=128 * (2 + wgs)) as (block,):
            T.import_source(sources(spec))
            if follows_solve == 0:
                T.pdl_sync()
            m = allocate(spec)
            tx = T.get_thread_binding()
            number, base, chunks, length = (T.alloc_var("int32") for _ in range(4))
            number = 0
            base = 0
            walk = walks.at(m.walks, number, base)
            lengths = (cu, cu_step, seq_len, batch * num_tokens, num_seqs)
            grid = (block, num_ctas, segment_tokens, num_slots, num_k_heads, num_v_heads)
            if tx < 128:
                T.set_max_nreg(load_regs, 0)
                if tx < 32:
                    loading = walks.at(m.walks, walks.found(m.walks), base)
                    find_walk(spec, m, 0, lengths, grid, h0)
                    while loading.some != 0:
                        load_role(spec, m, loading, q, k, v, T_inv, g_cumsum, beta)
                        base = base + loading.chunks
                        find_walk(spec, m, walks.found(m.walks) + 1, lengths, grid, h0)
                elif tx < 64:
                    rows.zero_whole_tail(o, *lengths, block, num_ctas, num_v_heads, V)
                    walks.wait(m.walks, 0)
                    while walk.some != 0:
                        store_role(m, walk, o)
                        walks.leave(m.walks, number, base)
                else:
                    T.pdl_sync()  # without a chunk, too: this launch must not end before the one that it follows
                    walks.wait(m.walks, 0)
                    while walk.some != 0:
                        gate_role(spec, m, walk, g_cumsum, beta, scale)
                        walks.leave(m.walks, number, base)
            elif tx < 256:
                T.set_max_nreg(scores_regs, 0)
                walks.wait(m.walks, 0)
                while walk.some != 0:
                    length = walk.length
                    scores_role(spec, m, base, length, T.ceildiv(length, C))
                    walks.leave(m.walks, number, base)
            else:
                T.set_max_nreg(value_regs, 1)
                take_walks(spec, m, walk, chunks, number, base, h0, starts, ht, h)

    return fused_forward


fused_fwd.persistent_forms[:] = [make]

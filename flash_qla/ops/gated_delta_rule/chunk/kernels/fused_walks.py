"""Fused forward with persistent CTAs: one a multiprocessor, each takes walks until none is left (`tiles/walks.py`).

The roles are fused_roles.py's; here is what they do from walk to walk. A CTA's first loads and state come in a burst of
all CTAs (16,000 cycles, five chunks' time, until the first U), its last state leaves while nothing is computed. Here
load, gate and scores run ahead into the next walk, whose state is in L2 before it is needed and loaded while this
walk's is stored. Chunks, stages and phases are counted over all walks of the CTA. A chunk takes about 1 % longer, so
long walks have CTAs of their own (`launch.has_persistent_walks`).

Barriers and shared memory are fused_roles.py's, and
    barrier   signalled by   waited by    guards
    placed    load           all others   a walk's place in shared memory
    left      all others     load         the same, read
"""

from dataclasses import replace

import tilelang.language as T

from ..constants import CHUNK_SIZE as C
from . import fused_roles as roles
from .fused_roles import Smem, Spec, Tiles
from .tiles import fragments, pipeline, program, rows, scores, state, walks
from .tiles.walks import Walk


@T.macro
def load_role(spec: Spec, m: Smem, walk: Walk, q, k, v, T_inv, g_cumsum, beta):
    start, batch, k_head, v_head, v_col = (T.alloc_var("int32") for _ in range(5))
    for number in T.serial(walk.chunks):
        i = walk.base + number
        stage = roles.stage_of(m, i)
        start = walk.start  # all read before the wait
        batch = walk.batch
        k_head = walk.k_head
        v_head = walk.v_head
        v_col = walk.v_col
        left = start + number * C
        right = left + C
        T.barrier_wait(m.freed[stage], (roles.turn_of(m, i) + 1) % 2)
        if i == 1:  # all CTAs load at once: first what their first chunks wait for
            T.barrier_wait(m.loaded[0], 0)
        here = replace(walk, batch=batch, k_head=k_head, v_head=v_head, v_col=v_col)
        roles.load_chunk(spec, m, here, i, stage, left, right, q, k, v, T_inv)
        roles.prefetch_gates(walk, number + roles.PREFETCH_CHUNKS, g_cumsum, beta)


@T.macro
def score_walk(spec: Spec, m: Smem, walk: Walk, base, length, chunks, ready):
    """The scores role's walk, its numbers kept: the loop reads them often."""
    roles.scores_role(spec, m, replace(walk, base=base, length=length, chunks=chunks), ready)


@T.macro
def value_role(spec: Spec, m: Smem, walk: Walk, chunks, f: Tiles, mode: T.Ref, h):
    """A walk, from its first state in S to its last."""
    pipeline.settle(f.S)  # keeps S in one place: bf16 states spilled without
    if chunks > 0:
        roles.start_walk(spec, m, walk, f, mode)
        for number in T.serial(chunks - 1):
            i = walk.base + number
            roles.next_chunk(spec, m, walk, f, i, mode, h, None)
        last = walk.base + chunks - 1
        roles.last_chunk(spec, m, walk, f, last, mode)


@T.macro
def load_start(spec: Spec, m: Smem, S, walk: Walk, h0, starts):
    state.load_start(
        S, h0, starts, walk.n, walk.slot, walk.segment, walk.v_head, walk.v_col, m.width, spec.head_dim_k,
        roles.FIRST_VALUE_THREAD,
    )  # fmt: skip


@T.macro
def take_walks(spec: Spec, m: Smem, walk: Walk, chunks: T.Ref, number: T.Ref, base: T.Ref, h0, starts, ht, h):
    """The value role of a persistent CTA: the next walk's state is loaded while this one's is stored."""
    f = roles.allocate_tiles(spec)
    mode = T.alloc_var("int32")
    walks.wait(m.walks, 0)
    load_start(spec, m, f.S, walk, h0, starts)
    while walk.some != 0:
        chunks = walk.chunks
        value_role(spec, m, walk, chunks, f, mode, h)
        walks.wait(m.walks, number + 1)
        load_start(spec, m, f.S_next, walks.at(m.walks, number + 1), h0, starts)
        if walk.ht_row < ht.shape[0]:
            roles.store_state(spec, f, ht, walk.ht_row, walk)
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
    tiles = fragments.LEAN_SOURCE + rows.SOURCE + state.LEAN_SOURCE + state.READ_SOURCE + walks.SOURCE
    return tiles + scores.source(spec.dtype, roles.UNROLL[spec.value_warpgroups])


def make(spec: Spec):
    """Returns the prim_func of a specification."""
    wgs = spec.value_warpgroups
    threads = 128 * (2 + wgs)
    load_regs, scores_regs, value_regs = roles.REGISTERS[wgs]
    t = program.Tensors.of(spec)
    heads = (t.num_k_heads, t.num_v_heads)
    start_slots = T.dynamic("start_slots")

    @T.prim_func
    def fused_forward(
        q: t.keys("q"), k: t.keys("k"), v: t.values("v"), T_inv: t.inverse(), g_cumsum: t.gates("g_cumsum"),
        beta: t.gates("beta", spec.beta_dtype), h0: t.state("h0", spec.h0_dtype), starts: t.states(start_slots),
        cu: program.cu_seqlens(), o: t.values("o"), ht: t.state("ht", spec.ht_dtype), h: t.state("h", spec.dtype),
        scale: T.float32, num_seqs: T.int32, cu_step: T.int32, seq_len: T.int32, segment_tokens: T.int32,
        num_slots: T.int32, follows_solve: T.int32, ready: T.int32, num_ctas: T.int32,
    ):  # fmt: skip
        with T.Kernel(num_ctas, threads=threads) as (block,):
            T.import_source(sources(spec))
            if follows_solve == 0:
                T.pdl_sync()
            m = roles.allocate(spec)
            tx = T.get_thread_binding()
            number, base, chunks, length = (T.alloc_var("int32") for _ in range(4))
            number = 0
            base = 0
            walk = walks.at(m.walks, number, base)
            lengths = (cu, cu_step, seq_len, t.batch * t.num_tokens, num_seqs)
            grid = (block, num_ctas, segment_tokens, num_slots, *heads)
            if tx < 128:
                pipeline.set_registers(load_regs, threads)
                if tx < 32:
                    loading = walks.at(m.walks, walks.found(m.walks), base)
                    find_walk(spec, m, 0, lengths, grid, h0)
                    while loading.some != 0:
                        load_role(spec, m, loading, q, k, v, T_inv, g_cumsum, beta)
                        base = base + loading.chunks
                        find_walk(spec, m, walks.found(m.walks) + 1, lengths, grid, h0)
                elif tx < 64:
                    rows.zero_whole_tail(o, *lengths, block, num_ctas, t.num_v_heads, spec.head_dim_v)
                    walks.wait(m.walks, 0)
                    while walk.some != 0:
                        roles.store_role(m, walk, o)
                        walks.leave(m.walks, number, base)
                else:
                    T.pdl_sync()  # without a chunk, too: this launch must not end before the one that it follows
                    walks.wait(m.walks, 0)
                    while walk.some != 0:
                        roles.gate_role(spec, m, walk, g_cumsum, beta, scale)
                        walks.leave(m.walks, number, base)
            elif tx < 256:
                pipeline.set_registers(scores_regs, threads)
                walks.wait(m.walks, 0)
                while walk.some != 0:
                    length = walk.length
                    score_walk(spec, m, walk, base, length, T.ceildiv(length, C), ready)
                    walks.leave(m.walks, number, base)
            else:
                pipeline.set_registers(value_regs, threads)
                take_walks(spec, m, walk, chunks, number, base, h0, starts, ht, h)

    return fused_forward

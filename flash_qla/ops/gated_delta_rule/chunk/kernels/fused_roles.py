"""Roles of the fused forward (Hopper): a sequence's chunks with the transposed state in registers. Equations F3 to F8.

    Uᵀ = Sᵀ Kᵀ    Wᵀ = (Vᵀ − Uᵀ Γ) β    Vdᵀ = Wᵀ Tᵀ    Oᵀ = s Sᵀ Qᵀ Γ + Vdᵀ Pᵀ    S'ᵀ = e^{g_C} Sᵀ + (e Vd)ᵀ K

Every product has V as M and its left operand in registers; an accumulator, cast, is the next left operand.

The state is scaled lazily. Registers hold S~ = 2^-R S with a running log2 scale R that the gate warps carry. As long as
|R + g_j| (log2) stays below MILD_LOG2, far inside the exponent range of bfloat16, with c = 2^R Γ a chunk is
    Vd / c = T~ (U − V / c),  T~ = −c^-1 T β c    O = s c (Q S~ + tril(Q Kᵀ) (Vd / c))    S~' = S~ + Kᵀ (Vd / c)
T~ has no gate left in it: solve makes it (`ready`), else T's rows and columns are scaled off the chain. Vd / c is cast
and used as it leaves the tensor cores; P has no gate and S no factor. When R has drifted by half of MILD_LOG2 the state
is multiplied out after the chunk (mode RENORM; always after the last chunk). A chunk is strong (mode STRONG) where its
own |g| exceeds MILD, which solve decides alike: there T~ = −T β, Vd = T~ (c U − V), P is gated per element, O gets its
factor before P Vd, S its factor before Kᵀ (e Vd), and R restarts at 0. Factors (row and beta: of T, where not ready):
              row    beta   pre    inv   post   P                   product with P
    mild      −1/c   β c    −1/c   –     s c    tril(Q Kᵀ)          Vd / c
    strong    −1     β      c      e     s      tril(D ∘ Q Kᵀ)      Vd

Roles (W value warpgroups, 64 columns of V each, one branch for both: two copies would overflow instruction caches):
    role      threads       registers (W = 1, 2)   computes
    load      warp 0        40, 32                 TMA of K, V, Q, T; prefetch of gates
    store     warp 1        40, 32                 TMA of O; a ragged chunk's rows one by one; zeros after the end
    gate      warps 2, 3    40, 32                 the chunk's row factors, R and mode
    scores    128           104, 64                T~ in T's place; P; zeroes rows past the sequence's end in K, V and T
    value     128 W         240, 208               U, W, Vd, O, S

Barriers (arrivals count warps; rings of STAGES):
    name      signalled by               waited by       guards
    loaded    load (TMA bytes), gate     scores          k, q, v, t, row factors
    solved    scores                     value           what loaded guards, t scaled, rows past the end zero
    scored    scores                     value           p
    freed     value (S' complete)        load, gate      k, q, v, t; a slot later: row factors
    used      value (O complete)         scores          p
    o_ready   value                      store           o
    o_free    store                      value           o

The value role's loop starts where U is complete: nothing is in flight across its back edge (else ptxas serialises all
products), and strong chunks have a body of their own, since a branch in the middle of products in flight does the same.
U is issued whole before O of the chunk before is scaled: `arrive` between them holds ptxas' scheduler off.

Shared memory, K = V = 128: a stage is k 16 + q 16 + v 8 W + t 8 + p 8 KB; o 8 W KB; 4 slots of 1.75 KB of row factors.
"""

from dataclasses import dataclass

import tilelang.language as T

from ..constants import CHUNK_SIZE as C
from ..constants import MILD, MILD_LOG2
from .tiles import layouts, pipeline, rows, scores, state, walks
from .tiles.gate import LOG2E
from .tiles.pipeline import ROWS
from .tiles.walks import Walk

V_TILE = 64
STAGES = 3
GATE_SLOTS = STAGES + 1
PREFETCH_CHUNKS = 2
STRONG, RENORM = 1, 2  # modes of a chunk; 0: mild, and the state stays scaled
# By value warpgroups: registers of load, store and gate, of scores, of value.
REGISTERS = {1: (40, 104, 240), 2: (32, 64, 208)}
LATE = {1: True, 2: False}  # O leaves under the products of the next chunk, where registers allow
UNROLL = {1: 4, 2: 2}  # of T's scaling: scores has fewer registers beside two value warpgroups
FIRST_GATE_THREAD, FIRST_VALUE_THREAD = 64, 256
STORE_AND_GATE_WARPS = 3
SCORES_BARRIER = 15


@dataclass(frozen=True)
class Spec:
    """Compile key.

    Attributes:
        dtype: of q, k, v, T_inv, o and h.
        beta_dtype, h0_dtype, ht_dtype: of those tensors.
        head_dim_k, head_dim_v: 64 or 128.
        value_warpgroups: 64-column slices of V per CTA.
        store_h: whether the state entering each chunk is written.
        persistent: whether CTAs take walks until none is left (fused_walks.py); not with store_h.
    """

    dtype: str
    beta_dtype: str = "float32"
    h0_dtype: str = "float32"
    ht_dtype: str = "float32"
    head_dim_k: int = 128
    head_dim_v: int = 128
    value_warpgroups: int = 1
    store_h: bool = False
    persistent: bool = False


@dataclass
class Smem:
    """Shared memory and barriers of a CTA; rings have a leading stage."""

    width: int
    k: object
    q: object
    t: object
    p: object
    v: object
    o: object
    g: object
    beta: object
    inv: object
    pre: object
    post: object
    total: object
    mode: object
    loaded: object
    solved: object
    scored: object
    freed: object
    used: object
    o_ready: object
    o_free: object
    walks: object
    persistent: bool


def allocate(spec: Spec) -> Smem:
    """Allocates a CTA's shared memory, annotates its swizzles and makes the barriers."""
    wgs, ring = spec.value_warpgroups, (STAGES, C)
    warps = pipeline.WARPS_PER_WARPGROUP
    m = Smem(
        width=V_TILE * wgs,
        k=T.alloc_shared((*ring, spec.head_dim_k), spec.dtype),
        q=T.alloc_shared((*ring, spec.head_dim_k), spec.dtype),
        t=T.alloc_shared((*ring, C), spec.dtype),
        p=T.alloc_shared((*ring, C), spec.dtype),
        v=T.alloc_shared((STAGES * wgs, C, V_TILE), spec.dtype),
        o=T.alloc_shared((C, V_TILE * wgs), spec.dtype),
        g=T.alloc_shared((GATE_SLOTS, C), "float32"),
        beta=T.alloc_shared((GATE_SLOTS, C), "float32"),
        inv=T.alloc_shared((GATE_SLOTS, C), "float32"),
        pre=T.alloc_shared((GATE_SLOTS, C), "float32"),
        post=T.alloc_shared((GATE_SLOTS, C), "float32"),
        total=T.alloc_shared((GATE_SLOTS,), "float32"),
        mode=T.alloc_shared((GATE_SLOTS,), "int32"),
        loaded=T.alloc_barrier([3] * STAGES),
        solved=T.alloc_barrier([warps] * STAGES),
        scored=T.alloc_barrier([warps] * STAGES),
        freed=T.alloc_barrier([warps * wgs] * STAGES),
        used=T.alloc_barrier([warps * wgs] * STAGES),
        o_ready=T.alloc_barrier([warps * wgs]),
        o_free=T.alloc_barrier([1]),
        walks=walks.allocate(STORE_AND_GATE_WARPS + warps + warps * wgs) if spec.persistent else None,
        persistent=spec.persistent,
    )
    T.annotate_layout(layouts.swizzled(m.v, m.o))
    return m


def count(m: Smem, i):
    """A number of chunks: persistent CTAs know it as not negative only so, and signed division costs more."""
    return T.cast(i, "uint32") if m.persistent else i


def as_index(m: Smem, x):
    return T.cast(x, "int32") if m.persistent else x


def stage_of(m: Smem, i):
    return as_index(m, count(m, i) % STAGES)


def turn_of(m: Smem, i):
    """How often the ring went round before chunk i."""
    return as_index(m, count(m, i) // STAGES)


def gate_of(m: Smem, i):
    return as_index(m, count(m, i) % GATE_SLOTS)


@T.macro
def prefetch_gates(walk: Walk, i, g_cumsum, beta):
    """Brings chunk i's gates and betas closer to the gate warps, whose registers could not hold them."""
    for half in T.unroll(2, unroll_factor=1):
        row = walk.start + T.min(i * C + T.get_thread_binding() % 32 + 32 * half, walk.length - 1)
        rows.prefetch(g_cumsum[walk.batch, row, walk.v_head])
        rows.prefetch(beta[walk.batch, row, walk.v_head])


@T.macro
def load_chunk(spec: Spec, m: Smem, walk: Walk, i, stage, left, right, q, k, v, T_inv):
    """Issues the copies of rows left to right, the CTA's chunk i, in the order in which the roles need them."""
    T.tma_copy(k[walk.batch, left:right, walk.k_head, 0 : spec.head_dim_k], m.k[stage, :, :], barrier=m.loaded[stage])
    for w in tuple(range(spec.value_warpgroups)):
        col = walk.v_col + w * V_TILE
        T.tma_copy(
            v[walk.batch, left:right, walk.v_head, col : col + V_TILE],
            m.v[stage * spec.value_warpgroups + w, :, :],
            barrier=m.loaded[stage],
        )
    T.tma_copy(q[walk.batch, left:right, walk.k_head, 0 : spec.head_dim_k], m.q[stage, :, :], barrier=m.loaded[stage])
    if i == 0:
        T.pdl_sync()
    T.tma_copy(T_inv[walk.batch, left:right, walk.v_head, 0:C], m.t[stage, :, :], barrier=m.loaded[stage])
    if T.shuffle_elect(32):
        T.barrier_arrive(m.loaded[stage])


@T.macro
def store_role(m: Smem, walk: Walk, o):
    for i in T.serial(walk.chunks):
        left = walk.start + i * C
        T.barrier_wait(m.o_ready[0], (walk.base + i) % 2)
        T.fence_proxy_async()  # in the value warps it would wait for their products in flight
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
    g, g_last, span = (T.alloc_var("float32") for _ in range(3))
    x = T.alloc_local((4,), "float32")
    mode = T.alloc_var("int32")
    pending = T.alloc_var("float32")  # log2 of the true state over the registers' state
    pending = 0.0
    if not m.persistent:
        T.pdl_sync()  # without a chunk, too: this launch must not end before the one that it follows
    for i in T.serial(walk.chunks):
        chunk = walks.chunk(walk, i)
        stage = stage_of(m, chunk.number)
        gate = gate_of(m, chunk.number)
        left = walk.start + i * C
        last = T.min(walk.length - i * C, C) - 1
        scores.load_gates(x, g_cumsum, beta, walk.batch, left, walk.v_head, row, last)
        g = x[0]
        span = T.max(T.abs(g), T.abs(x[1]))
        g_last = x[2] * LOG2E
        mode = T.any_sync(T.cast(span > MILD[spec.dtype], "int32"))
        g = g * LOG2E
        T.barrier_wait(m.freed[stage], (turn_of(m, chunk.number) + 1) % 2)
        m.g[gate, row] = g
        span = T.exp2(pending + g)
        m.beta[gate, row] = x[3] * T.if_then_else(mode != 0, 1.0, span)
        m.pre[gate, row] = T.if_then_else(mode != 0, span, -T.exp2(-pending - g))
        m.inv[gate, row] = T.exp2(g_last - g)
        m.post[gate, row] = scale * T.if_then_else(mode != 0, 1.0, span)
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
def zero_past_end(spec: Spec, m: Smem, stage, length):
    """Overwrites what TMA brought from past the sequence's end: in K, T and V nothing of it may meet a product."""
    rows.zero_stage_from(m.k, stage, length, spec.head_dim_k)
    rows.zero_stage_from(m.t, stage, length, C)
    for w in tuple(range(spec.value_warpgroups)):
        rows.zero_stage_from(m.v, stage * spec.value_warpgroups + w, length, V_TILE)


@T.macro
def scores_role(spec: Spec, m: Smem, walk: Walk, ready):
    """T~ in T's place, then P."""
    P = T.alloc_fragment((C, C), "float32")
    for i in T.serial(walk.chunks):
        chunk = walks.chunk(walk, i)
        stage = stage_of(m, chunk.number)
        gate = gate_of(m, chunk.number)
        T.barrier_wait(m.loaded[stage], turn_of(m, chunk.number) % 2)
        strong = m.mode[gate] == STRONG
        T.wgmma_gemm(m.q[stage, :, :], m.k[stage, :, :], P, transpose_B=True, clear_accum=True)
        if walk.length - i * C < C:
            T.wait_wgmma(0)
            zero_past_end(spec, m, stage, walk.length - i * C)
            T.sync_threads(SCORES_BARRIER, 128)
        if ready != 0:
            scores.zero_quarter(m.t, stage)
        else:
            scores.scale_inverse(m.t, stage, m.pre, m.beta, gate, strong)
        pipeline.publish(m.solved, stage)
        T.wait_wgmma(0)
        pipeline.settle(P)
        T.barrier_wait(m.used[stage], (turn_of(m, chunk.number) + 1) % 2)
        scores.store(m.p, stage, P, m.g, gate, strong)  # F6
        pipeline.publish(m.scored, stage)


@dataclass
class Tiles:
    """Fragments of a value warpgroup; rows are columns of V."""

    S: object
    S_next: object
    S_op: object
    U: object
    W_op: object
    Vd_op: object
    O: object
    O_out: object
    pre: object


def allocate_tiles(spec: Spec) -> Tiles:
    width = V_TILE * spec.value_warpgroups
    f = Tiles(
        S=T.alloc_fragment((width, spec.head_dim_k), "float32"),
        S_next=T.alloc_fragment((width, spec.head_dim_k), "float32") if spec.persistent else None,
        S_op=T.alloc_fragment((width, spec.head_dim_k), spec.dtype),
        U=T.alloc_fragment((width, C), "float32"),
        W_op=T.alloc_fragment((width, C), spec.dtype),
        Vd_op=T.alloc_fragment((width, C), spec.dtype),
        O=T.alloc_fragment((width, C), "float32"),
        O_out=T.alloc_fragment((width, C), spec.dtype),
        pre=T.alloc_local((16,), "float32"),
    )
    return f


def load_values(spec: Spec, m: Smem, f: Tiles, i):
    """Call expression: W_op = chunk i's V, transposed, this warpgroup's 64 columns."""
    part = (T.get_thread_binding() - FIRST_VALUE_THREAD) // 128
    tile = m.v.access_ptr("r", offset=(stage_of(m, i) * spec.value_warpgroups + part) * (C * V_TILE))
    return T.call_extern("void", "flash_qla::load_transposed", f.W_op.access_ptr("w"), tile)


@T.macro
def read_state(m: Smem, f: Tiles, i):
    """Issues chunk i's U."""
    T.wgmma_gemm(f.S_op, m.k[stage_of(m, i), :, :], f.U, transpose_B=True, clear_accum=True, policy=ROWS)  # F3


@T.macro
def wait_state(m: Smem, f: Tiles, i):
    """Waits for U, the next step's factors in the meantime."""
    scores.load_factors(f.pre, m.pre, gate_of(m, i))
    T.wait_wgmma(0)
    pipeline.settle(f.U)


@T.macro
def start_walk(spec: Spec, m: Smem, walk: Walk, f: Tiles, mode: T.Ref):
    """From the state in S to the first chunk's U."""
    T.copy(f.S, f.S_op)
    T.barrier_wait(m.solved[stage_of(m, walk.base)], turn_of(m, walk.base) % 2)
    mode = m.mode[gate_of(m, walk.base)]
    read_state(m, f, walk.base)
    load_values(spec, m, f, walk.base)
    wait_state(m, f, walk.base)


@T.macro
def solve_chunk(spec: Spec, m: Smem, f: Tiles, i, first, strong):
    """Completes chunk i's Vd and issues S Q."""
    scores.make_writes(f.W_op, f.U, f.pre, strong)  # F4, without beta, negative
    T.wgmma_gemm(f.W_op, m.t[stage_of(m, i), :, :], f.U, transpose_B=True, clear_accum=True, policy=ROWS)  # F5
    T.wgmma_gemm(f.S_op, m.q[stage_of(m, i), :, :], f.O, transpose_B=True, clear_accum=True, policy=ROWS)
    if LATE[spec.value_warpgroups]:
        if i > first:
            send_output(m, f, i - 1)
    T.barrier_wait(m.scored[stage_of(m, i)], turn_of(m, i) % 2)
    if strong:
        T.wait_wgmma(0)
        pipeline.settle(f.O)
    else:
        T.wait_wgmma(1)
    pipeline.settle(f.U)


@T.macro
def scale_state(spec: Spec, m: Smem, f: Tiles, gate):
    for jv, jk in T.Parallel(m.width, spec.head_dim_k):
        f.S[jv, jk] *= m.total[gate]


@T.macro
def write_state(m: Smem, f: Tiles, i):
    """Issues S += (e Vd) K."""
    T.wgmma_gemm(f.Vd_op, m.k[stage_of(m, i), :, :], f.S, clear_accum=False, policy=ROWS)  # F8


@T.macro
def read_writes(m: Smem, f: Tiles, i):
    """Issues O += Vd P."""
    T.wgmma_gemm(f.Vd_op, m.p[stage_of(m, i), :, :], f.O, transpose_B=True, clear_accum=False, policy=ROWS)  # F7


@T.macro
def apply_chunk(spec: Spec, m: Smem, f: Tiles, i, strong):
    """Issues S(i + 1) = e^{g_C} S + (e Vd) K, then O(i) += Vd P."""
    gate = gate_of(m, i)
    if strong:
        scale_state(spec, m, f, gate)
        for jv, j in T.Parallel(m.width, C):
            f.O[jv, j] *= m.pre[gate, j]
        for jv, j in T.Parallel(m.width, C):
            f.Vd_op[jv, j] = T.cast(f.U[jv, j] * m.inv[gate, j], spec.dtype)
        write_state(m, f, i)
        T.wait_wgmma(0)
        T.copy(f.U, f.Vd_op)
    else:
        T.copy(f.U, f.Vd_op)
        write_state(m, f, i)
    read_writes(m, f, i)


@T.macro
def next_chunk(spec: Spec, m: Smem, walk: Walk, f: Tiles, i, mode: T.Ref, h, first_chunk):
    """Chunk i from its U on, to the next chunk's U. Nothing is in flight before or after."""
    if mode == STRONG:
        next_chunk_of(spec, m, walk, f, i, mode, True, h, first_chunk)
    else:
        next_chunk_of(spec, m, walk, f, i, mode, False, h, first_chunk)


@T.macro
def next_chunk_of(spec: Spec, m: Smem, walk: Walk, f: Tiles, i, mode: T.Ref, strong, h, first_chunk):
    """`next_chunk` for one mode, strong or not."""
    solve_chunk(spec, m, f, i, walk.base, strong)
    apply_chunk(spec, m, f, i, strong)
    T.barrier_wait(m.solved[stage_of(m, i + 1)], turn_of(m, i + 1) % 2)  # which waited for loaded
    T.wait_wgmma(1)
    pipeline.settle(f.S)
    pipeline.arrive(m.freed, stage_of(m, i))
    if not strong:
        if mode == RENORM:
            scale_state(spec, m, f, gate_of(m, i))
    if spec.store_h:
        store_entering(spec, m, f, walk, h, first_chunk, i + 1)
    T.copy(f.S, f.S_op)
    T.wait_wgmma(0)  # U takes Vd's place
    read_state(m, f, i + 1)
    pipeline.arrive(m.used, stage_of(m, i))
    mode = m.mode[gate_of(m, i + 1)]
    load_values(spec, m, f, i + 1)  # here: behind O's stores its latency would be in the open
    scale_output(m, f, i, spec.dtype)
    if not LATE[spec.value_warpgroups]:
        send_output(m, f, i)
    wait_state(m, f, i + 1)


@T.macro
def last_chunk(spec: Spec, m: Smem, walk: Walk, f: Tiles, i, mode: T.Ref):
    """Chunk i from its U on."""
    if mode == STRONG:
        last_chunk_of(spec, m, walk, f, i, mode, True)
    else:
        last_chunk_of(spec, m, walk, f, i, mode, False)


@T.macro
def last_chunk_of(spec: Spec, m: Smem, walk: Walk, f: Tiles, i, mode, strong):
    """`last_chunk` for one mode, strong or not."""
    solve_chunk(spec, m, f, i, walk.base, strong)
    apply_chunk(spec, m, f, i, strong)
    T.wait_wgmma(0)
    pipeline.settle(f.S)
    if spec.persistent:
        pipeline.arrive(m.freed, stage_of(m, i))
        pipeline.arrive(m.used, stage_of(m, i))
    if not strong:
        if mode == RENORM:
            scale_state(spec, m, f, gate_of(m, i))
    scale_output(m, f, i, spec.dtype)
    send_output(m, f, i)


@T.macro
def scale_output(m: Smem, f: Tiles, i, dtype):
    pipeline.settle(f.O)
    for jv, j in T.Parallel(m.width, C):
        f.O_out[jv, j] = T.cast(f.O[jv, j] * m.post[gate_of(m, i), j], dtype)


@T.macro
def send_output(m: Smem, f: Tiles, i):
    T.barrier_wait(m.o_free[0], (i + 1) % 2)
    scores.store_transposed(m.o, (T.get_thread_binding() - FIRST_VALUE_THREAD) // 128, f.O_out)
    pipeline.arrive(m.o_ready, 0)  # the store warp fences


def store_state(spec: Spec, f: Tiles, target, row, walk: Walk):
    """Call expression: target's existing row = the state."""
    return state.store_lean(target, f.S, row, walk.v_head, walk.v_col, spec.head_dim_k, FIRST_VALUE_THREAD)


@T.macro
def store_entering(spec: Spec, m: Smem, f: Tiles, walk: Walk, h, first_chunk, i):
    if first_chunk + i < h.shape[0]:
        store_state(spec, f, h, first_chunk + i, walk)

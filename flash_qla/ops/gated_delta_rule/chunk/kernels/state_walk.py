"""Roles that walk the state over a sequence's chunks, or backwards its cotangent; for states.py and ends.py.

Equations F3 to F5 and F8 (forward walk), B1, B2 and B4 (reverse walk), with the state held transposed in registers.
Everything of a chunk that does not depend on the state is folded into operand tiles by a warpgroup that runs ahead:

    forward   acc^T = V^T (T beta)^T + S^T w^T   w = -(T beta Gamma) K      S^T <- e^gC S^T + (acc e)^T K
    reverse   acc^T = dO^T B1 + dS^T w^T         w = T^T e K        B1 = P T
              dS^T <- e^gC dS^T + dO^T (s Gamma Q) - (acc^T beta Gamma) K

so the serial chain of a chunk is two products and two roundings; acc is Vd (forward) or X (reverse). Emulated
against float64 the error is that of the unfolded chain (3.7e-3 against 3.5e-3 without decay, equal with decay).
Every exponent is <= 0 by construction (as gates are) or selected away. The last step of the forward walk, and of the
reverse one when nobody wants dh0, only stores the state. `stage_state` and `store_role` alone decide what is stored.

Roles (W value warpgroups, 64 rows of the transposed state each):
    role        threads     registers (W = 1, 2)   computes
    load        warp 0      40, 32                 TMA of K, Q (reverse), V or dO, T
    store       warps 1..W  40, 32                 TMA of the rounded states
    gate        warp 3      40, 32                 row factors, a ring ahead
    operands    256, 128    128, 128               w, B1 (forward: T beta); zeroes the rows past the sequence's end
    value       128 W       216, 176               the recurrence

One operands warpgroup cannot keep up with a single value warpgroup: two take chunks by turns. Shared memory is what a
reverse walk is short of (70 to 75 % busy): x^T comes from registers where there is room for it, which also frees its
place before the chunk's turn.

Barriers (arrivals count warps; rings of `Spec.stages`, `X_SLOTS`, `W_SLOTS`; `loaded`, `decayed`: `Spec.ring`):
    name        signalled by        waited by        guards
    loaded      load (TMA bytes)    operands         k, q, t (value sees them through made)
    x_loaded    load (TMA bytes)    value            x (operands too, at a sequence's end)
    decayed     gate                operands         row factors (value sees them through made)
    made        operands            value            t (now B1 or T beta), w, zeroed rows, row factors
    w_free      value               operands         w
    x_free      value               load             x
    freed       value               load, gate       k, q, t, row factors
    staged      value w             store w          out[w]
    sent        store w             value w          out[w]

Row factors: t_factor and x_factor are 16 bits and multiply 16-bit operands in pairs (x_factor beside float16
and acc_factor: fp32).
    factor       forward              reverse
    t_factor     -beta Gamma, of T    e, of T^T
    x_factor     beta, of T           s Gamma, of dO
    acc_factor   e                    -beta Gamma

ptxas (13.0) puts waits into the forward walk when the value role is the last branch of the kernel: it comes first.

Shared memory, K = V = 128, in KB: a stage is k 16 + q 16 + t 8 (W = 1: 4, W = 2: 3 of them); x 8 W (2); w 16 (2);
out 16 W. Row factors 2.3 KB, static: TileLang rounds each dynamic array up to 1 KB, and W = 1 has 3 KB left.
"""

from dataclasses import dataclass

import tilelang.language as T

from ..constants import CHUNK_SIZE as C
from .tiles import fragments, layouts, pairs, pipeline, rows, state
from .tiles.gate import LOG2E
from .tiles.pipeline import ROWS

V_TILE = 64
FACTORS = 3  # slots of the row factors
X_SLOTS = 2
W_SLOTS = 2
PREFETCH_CHUNKS = 2
REGISTERS = {1: (40, 128, 216), 2: (32, 128, 176)}  # load, operands, value; by value warpgroups
FIRST_VALUE_THREAD = 256
OPERANDS_BARRIER = 15  # named barrier inside the first operands warpgroup, 14: the second


def sources(dtype: str) -> str:
    """The CUDA functions that the roles call."""
    tiles = fragments.LEAN_SOURCE + fragments.COLUMNS_SOURCE + fragments.STORE_SOURCE + fragments.READ_SOURCE
    return tiles + rows.SOURCE + pairs.source(dtype)


@dataclass(frozen=True)
class Spec:
    """Compile key.

    Attributes:
        dtype: of q, k, v, do, T_inv and the stored states.
        head_dim_k, head_dim_v: 64 or 128.
        beta_dtype, h0_dtype, dht_dtype: of those tensors (dh0 has h0's).
        value_warpgroups: 64-row slices of the transposed state per CTA.
        ends_only: walk backwards from zero for the cotangent at the end, and store no other (`ends.py`).
    """

    dtype: str
    head_dim_k: int = 128
    head_dim_v: int = 128
    beta_dtype: str = "float32"
    h0_dtype: str = "float32"
    dht_dtype: str = "float32"
    value_warpgroups: int = 2
    ends_only: bool = False

    @property
    def operands_warpgroups(self) -> int:
        """They take chunks by turns. The register file has room for two beside one value warpgroup."""
        return 2 if self.value_warpgroups == 1 else 1

    @property
    def ring(self) -> int:
        """Barriers of `loaded` and `decayed`: an operands warpgroup sees every phase of those that it waits for."""
        return self.stages * self.operands_warpgroups

    @property
    def stages(self) -> int:
        """Of k, q and t. The fourth hides a load's latency, where there is room for it: 4 % of a launch (H200)."""
        return 4 if self.value_warpgroups == 1 else 3

    @property
    def x_factor_dtype(self) -> str:
        """s Gamma alone, without dO, would leave float16's range early."""
        return "float32" if self.dtype == "float16" else self.dtype

    @property
    def threads(self) -> int:
        return 128 * (1 + self.operands_warpgroups + self.value_warpgroups)

    @property
    def width(self) -> int:
        return V_TILE * self.value_warpgroups

    @property
    def v_tiles(self) -> int:
        return self.head_dim_v // (V_TILE * self.value_warpgroups)


@dataclass
class Smem:
    """Shared memory and barriers of a CTA; rings have a leading stage or slot."""

    k: object
    q: object
    t: object
    x: object
    w: object
    out: object
    g: object
    t_factor: object
    x_factor: object
    acc_factor: object
    total: object
    loaded: object
    x_loaded: object
    decayed: object
    made: object
    w_free: object
    x_free: object
    freed: object
    staged: object
    sent: object


@dataclass
class Walk:
    """Where a CTA walks, and which way.

    Attributes:
        n, slot: the sequence, the segment's slot.
        inner: 0 where the walk starts at the sequence's own end, else it starts from its slot's state.
        last_row: row of the last state: n where the walk reaches the sequence's other end, out of range elsewhere.
        updates: chunks whose update of the state anybody needs.
    """

    reverse: bool
    n: object
    slot: object
    inner: object
    last_row: object
    batch: object
    start: object
    length: object
    chunks: object
    updates: object
    first_slot: object
    k_head: object
    v_head: object
    v_col: object

    def chunk(self, step):
        return self.chunks - 1 - step if self.reverse else step


@T.macro
def prefetch_gates(walk: Walk, i, g_cumsum, beta):
    """Brings the gates and betas of step i closer: their loads' latency would be the gate warp's time per chunk."""
    for half in T.unroll(2, unroll_factor=1):
        row = walk.chunk(i) * C + T.get_thread_binding() % 32 + 32 * half
        row = walk.start + T.max(T.min(row, walk.length - 1), 0)
        rows.prefetch(g_cumsum[walk.batch, row, walk.v_head])
        rows.prefetch(beta[walk.batch, row, walk.v_head])


@T.macro
def load_role(spec: Spec, m: Smem, walk: Walk, q, k, x, T_inv, g_cumsum, beta):
    K = spec.head_dim_k
    for i in T.serial(walk.updates):
        stage = i % spec.stages
        slot = i % X_SLOTS
        left = walk.start + walk.chunk(i) * C
        right = left + C
        T.barrier_wait(m.freed[stage], (i // spec.stages + 1) % 2)
        T.tma_copy(k[walk.batch, left:right, walk.k_head, 0:K], m.k[stage, :, :], barrier=m.loaded[i % spec.ring])
        if walk.reverse:
            T.tma_copy(q[walk.batch, left:right, walk.k_head, 0:K], m.q[stage, :, :], barrier=m.loaded[i % spec.ring])
        T.tma_copy(T_inv[walk.batch, left:right, walk.v_head, 0:C], m.t[stage, :, :], barrier=m.loaded[i % spec.ring])
        if T.shuffle_elect(32):
            T.barrier_arrive(m.loaded[i % spec.ring])
        prefetch_gates(walk, i + PREFETCH_CHUNKS, g_cumsum, beta)
        T.barrier_wait(m.x_free[slot], (i // X_SLOTS + 1) % 2)
        T.tma_copy(
            x[walk.batch, left:right, walk.v_head, walk.v_col : walk.v_col + spec.width],
            m.x[slot, :, :],
            barrier=m.x_loaded[slot],
        )
        if T.shuffle_elect(32):
            T.barrier_arrive(m.x_loaded[slot])


@dataclass
class Halves:
    """Where the forward walk's states go where V has two tiles: the second one of a whole chunk lies in dv's rows.

    dv is written last of all, by gradients, which has read the state of the same chunk and head before.

    Attributes:
        S: `[slots + N, Hv, 64, K]`: first tiles; then, by sequence, the second tile of its last chunk if that is short.
        dv: `[B, T, Hv, V]`: rows of a whole chunk hold its second tile's rows.
        tail: slot of the sequence's last chunk's second tile.
    """

    S: object
    dv: object
    tail: object


@T.macro
def store_role(spec: Spec, m: Smem, walk: Walk, w, states):
    v_col = walk.v_col + w * V_TILE
    for i in T.serial(walk.chunks):
        T.barrier_wait(m.staged[w], i % 2)
        T.fence_proxy_async()  # here, not where the state is written: it would wait for products in flight
        if isinstance(states, Halves):
            store_half(spec, m, walk, w, v_col, walk.chunk(i), states)
        else:
            T.copy(
                m.out[w, :, :],
                states[walk.first_slot + walk.chunk(i), walk.v_head, v_col : v_col + V_TILE, 0 : spec.head_dim_k],
            )
        pipeline.arrive(m.sent, w)


@T.macro
def store_half(spec: Spec, m: Smem, walk: Walk, w, v_col, chunk, states: Halves):
    left = walk.start + chunk * C
    if v_col != 0 and walk.length - chunk * C >= C:
        T.copy(m.out[w, :, :], states.dv[walk.batch, left : left + C, walk.v_head, 0 : spec.head_dim_k])
    else:
        slot = T.if_then_else(v_col == 0, walk.first_slot + chunk, states.tail)
        T.copy(m.out[w, :, :], states.S[slot, walk.v_head, 0:V_TILE, 0 : spec.head_dim_k])


@T.macro
def load_gates(walk, left, last, lane, g_cumsum, beta, g_last: T.Ref, g, b):
    """Two tokens a lane of the chunk at `left`, and its last one's g. Past the end: the last token's g, beta 0."""
    g_last = g_cumsum[walk.batch, left + last, walk.v_head] * LOG2E
    for half in T.unroll(2):
        g[half] = g_cumsum[walk.batch, left + T.min(lane + 32 * half, last), walk.v_head] * LOG2E
        b[half] = T.if_then_else(
            lane + 32 * half <= last,
            T.cast(beta[walk.batch, left + T.min(lane + 32 * half, last), walk.v_head], "float32"),
            0.0,
        )


@T.macro
def gate_role(spec: Spec, m: Smem, walk: Walk, g_cumsum, beta, scale):
    """Row factors; loads before the wait."""
    lane = T.get_thread_binding() % 32
    g_last = T.alloc_var("float32")
    g = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    for i in T.serial(walk.updates):
        slot = i % FACTORS
        left = walk.start + walk.chunk(i) * C
        last = T.min(walk.length - walk.chunk(i) * C, C) - 1
        load_gates(walk, left, last, lane, g_cumsum, beta, g_last, g, b)
        if i >= FACTORS:
            T.barrier_wait(m.freed[(i - FACTORS) % spec.stages], ((i - FACTORS) // spec.stages) % 2)
        for half in T.unroll(2):
            row = lane + 32 * half
            if walk.reverse:
                m.g[slot, row] = g[half]
                m.t_factor[slot, row] = T.exp2(g_last - g[half])
                m.x_factor[slot, row] = scale * T.exp2(g[half])
                m.acc_factor[slot, row] = -b[half] * T.exp2(g[half])
            else:
                m.t_factor[slot, row] = -b[half] * T.exp2(g[half])
                m.x_factor[slot, row] = b[half]
                m.acc_factor[slot, row] = T.exp2(g_last - g[half])
        if lane == 0:
            m.total[slot] = T.exp2(g_last)
        pipeline.arrive(m.decayed, i % spec.ring)


@T.macro
def zero_past_end(spec: Spec, m: Smem, walk: Walk, i, valid, barrier):
    """For the calling operands warpgroup, and through `made` for the value warpgroups."""
    stage = i % spec.stages
    slot = i % X_SLOTS
    rows.zero_stage_from(m.k, stage, valid, spec.head_dim_k)
    rows.zero_stage_from(m.t, stage, valid, C)
    if walk.reverse:
        rows.zero_stage_from(m.q, stage, valid, spec.head_dim_k)
    T.barrier_wait(m.x_loaded[slot], (i // X_SLOTS) % 2)
    rows.zero_stage_from(m.x, slot, valid, spec.width)
    T.fence_proxy_async()
    T.sync_threads(barrier, 128)


@T.macro
def forward_products(spec: Spec, m: Smem, stage, factor, barrier, T_op, B1_op, acc, P):
    """Issues w's products; T beta takes T's place. T_op = -T beta Gamma is w's left operand."""
    fragments.load_tile_unfenced(T_op, m.t, stage)
    for i, j in T.Parallel(C, C):
        B1_op[i, j] = T_op[i, j] * m.x_factor[factor, j]
    for i, j in T.Parallel(C, C):
        T_op[i, j] = T_op[i, j] * m.t_factor[factor, j]
    T.wgmma_gemm(T_op, m.k[stage, :, 0:64], acc, clear_accum=True)
    if spec.head_dim_k > 64:
        T.wgmma_gemm(T_op, m.k[stage, :, 64:128], P, clear_accum=True)
    T.sync_threads(barrier, 128)  # every warp has read T
    fragments.store_tile_unfenced(m.t, stage, B1_op)


@T.macro
def reverse_products(spec: Spec, m: Smem, stage, factor, scale, T_op, B1_op, acc, P):
    """Issues Q K^T, w's first product (T_op = T^T e is its left operand) and P T."""
    T.wgmma_gemm(m.q[stage, :, :], m.k[stage, :, :], P, transpose_B=True, clear_accum=True)
    fragments.load_tile_transposed(T_op, m.t, stage)
    for t, i in T.Parallel(C, C):
        T_op[t, i] = T_op[t, i] * m.t_factor[factor, i]
    T.wgmma_gemm(T_op, m.k[stage, :, 0:64], acc, clear_accum=True)
    T.wait_wgmma(1)
    pipeline.settle(P)
    pairs.gate_pairs(B1_op, P, m.g, factor, T.log2(T.abs(scale)), T.cast(scale < 0.0, "int32"))
    T.wgmma_gemm(B1_op, m.t[stage, :, :], P, clear_accum=True)


@T.macro
def operands_role(spec: Spec, m: Smem, walk: Walk, first, scale):
    """Every operands warpgroup's own chunks, from step `first` on."""
    T_op = T.alloc_fragment((C, C), spec.dtype)
    B1_op = T.alloc_fragment((C, C), spec.dtype)
    acc = T.alloc_fragment((C, C), "float32")
    P = T.alloc_fragment((C, C), "float32")
    wide = spec.head_dim_k > 64
    barrier = OPERANDS_BARRIER - first
    turns = spec.operands_warpgroups
    for turn in T.serial((walk.updates - first + turns - 1) // turns):
        i = turn * turns + first
        stage = i % spec.stages
        slot = i % W_SLOTS
        factor = i % FACTORS
        T.barrier_wait(m.loaded[i % spec.ring], (i // spec.ring) % 2)
        T.barrier_wait(m.decayed[i % spec.ring], (i // spec.ring) % 2)
        valid = walk.length - walk.chunk(i) * C
        if valid < C:
            zero_past_end(spec, m, walk, i, valid, barrier)
        if walk.reverse:
            reverse_products(spec, m, stage, factor, scale, T_op, B1_op, acc, P)
        else:
            forward_products(spec, m, stage, factor, barrier, T_op, B1_op, acc, P)
        T.barrier_wait(m.w_free[slot], (i // W_SLOTS + 1) % 2)
        T.wait_wgmma(1 if walk.reverse or wide else 0)
        pipeline.settle(acc)
        pairs.store_rounded(m.w, slot, acc)
        if walk.reverse:
            if wide:
                T.wgmma_gemm(T_op, m.k[stage, :, 64:128], acc, clear_accum=True)
            T.wait_wgmma(1 if wide else 0)
            pipeline.settle(P)
            T.sync_threads(barrier, 128)  # every warp is done with T
            pairs.store_rounded(m.t, stage, P)
        if wide:
            T.wait_wgmma(0)
            if walk.reverse:
                pipeline.settle(acc)
                pairs.store_rounded(m.w, slot, acc, 64)
            else:
                pipeline.settle(P)
                pairs.store_rounded(m.w, slot, P, 64)
        pipeline.publish(m.made, stage)


def warpgroup():
    """Number of this thread's value warpgroup."""
    return (T.get_thread_binding() - FIRST_VALUE_THREAD) // 128


@T.macro
def stage_state(spec: Spec, m: Smem, i, S_op):
    """Writes the rounded state of step i for the store warp, which fences."""
    T.barrier_wait(m.sent[warpgroup()], (i + 1) % 2)
    for part in tuple(range(spec.head_dim_k // 64)):
        fragments.store_ring_columns(m.out, warpgroup(), S_op, part)


def keeps_x(spec: Spec, walk: Walk) -> bool:
    """Whether x^T is an operand in registers. A forward walk of two value warpgroups has no room for it (C7512)."""
    return walk.reverse or spec.value_warpgroups == 1


@T.macro
def start_chunk(spec: Spec, m: Smem, walk: Walk, i, x_op, acc, is_first_time):
    """Issues acc = x^T B1 of step i (forward: V^T (T beta)^T), which needs no state."""
    stage = i % spec.stages
    slot = i % X_SLOTS
    T.barrier_wait(m.x_loaded[slot], (i // X_SLOTS) % 2)
    T.barrier_wait(m.made[stage], (i // spec.stages) % 2)  # which waited for loaded and decayed
    if keeps_x(spec, walk):
        tile = m.x.access_ptr("r", offset=slot * (C * spec.width) + warpgroup() * V_TILE)
        T.call_extern("void", "flash_qla::load_transposed", x_op.access_ptr("w"), tile)
        T.wgmma_gemm(x_op, m.t[stage, :, :], acc, transpose_B=not walk.reverse, clear_accum=True, policy=ROWS)
        pipeline.arrive_if(is_first_time, m.x_free, slot)  # the product has taken x_op: its ldmatrix is over
    else:
        T.wgmma_gemm(
            m.x[slot, :, :], m.t[stage, :, :], acc, transpose_A=True, transpose_B=True, clear_accum=True, policy=ROWS
        )


@T.macro
def value_role(spec: Spec, m: Smem, walk: Walk, first_state, starts, last_state):
    """The recurrence of the CTA's rows of the transposed state, from its start to last_state (None: not kept).

    first_state, starts: where the walk starts; with ends only nobody reads them, and last_state is an `Ends`.
    """
    K, width, v_col = spec.head_dim_k, spec.width, walk.v_col
    S = T.alloc_fragment((width, K), "float32")
    S_op = T.alloc_fragment((width, K), spec.dtype)
    x_op = T.alloc_fragment((width, C), spec.dtype)
    acc_factor = T.alloc_fragment((C,), "float32")
    acc = T.alloc_fragment((width, C), "float32")
    acc_op = T.alloc_fragment((width, C), spec.dtype)
    total = T.alloc_var("float32")
    if spec.ends_only:
        T.fill(S, 0.0)
    else:
        state.load_start(S, first_state, starts, walk.n, walk.slot, walk.inner, walk.v_head, v_col, width, K)
    pipeline.settle(S)  # keeps S in one place: bf16 states spilled without
    if walk.updates > 0:
        start_chunk(spec, m, walk, 0, x_op, acc, True)
    for i in T.serial(walk.updates):
        stage = i % spec.stages
        factor = i % FACTORS
        T.copy(S, S_op)
        T.wgmma_gemm(S_op, m.w[i % W_SLOTS, :, :], acc, transpose_B=True, policy=ROWS)
        T.copy(m.acc_factor[factor, :], acc_factor)
        total = m.total[factor]
        for jv, jk in T.Parallel(width, K):
            S[jv, jk] *= total
        if walk.reverse:
            T.wait_wgmma(1)  # long over; without it ptxas serialises (C7514)
            for jv, j in T.Parallel(width, C):
                x_op[jv, j] = x_op[jv, j] * m.x_factor[factor, j]
            T.wgmma_gemm(x_op, m.q[stage, :, :], S, policy=ROWS)
        if not spec.ends_only:
            stage_state(spec, m, i, S_op)
            pipeline.arrive(m.staged, warpgroup())
        T.wait_wgmma(1 if walk.reverse else 0)
        pipeline.settle(acc)
        pipeline.arrive(m.w_free, i % W_SLOTS)
        if not keeps_x(spec, walk):
            pipeline.arrive(m.x_free, i % X_SLOTS)
        for jv, j in T.Parallel(width, C):
            acc_op[jv, j] = acc[jv, j] * acc_factor[j]
        T.wgmma_gemm(acc_op, m.k[stage, :, :], S, policy=ROWS)
        if walk.reverse:
            T.wait_wgmma(1)  # x_op's product with q is over
        # The last step starts its own chunk once more: nobody reads the result, and no branch cuts the pipeline.
        start_chunk(spec, m, walk, T.min(i + 1, walk.updates - 1), x_op, acc, i + 1 < walk.updates)
        T.wait_wgmma(1)
        pipeline.settle(S)
        pipeline.arrive(m.freed, stage)
    T.wait_wgmma(0)
    if spec.ends_only:
        last_state.store(S, S_op, walk, v_col, width, K)
    else:
        if walk.updates < walk.chunks:
            T.copy(S, S_op)
            stage_state(spec, m, walk.updates, S_op)
            pipeline.arrive(m.staged, warpgroup())
        if last_state is not None:
            state.store_transposed(
                last_state, S, last_state.shape[0], walk.last_row, walk.v_head, v_col, width, K, spec.h0_dtype
            )


def allocate(spec: Spec) -> Smem:
    """Allocates a CTA's shared memory, annotates its swizzles and makes the barriers."""
    wgs, ring, factors, K = spec.value_warpgroups, (spec.stages, C), (FACTORS, C), spec.head_dim_k
    warps = pipeline.WARPS_PER_WARPGROUP
    m = Smem(
        k=T.alloc_shared((*ring, K), spec.dtype),
        q=T.alloc_shared((*ring, K), spec.dtype),
        t=T.alloc_shared((*ring, C), spec.dtype),
        x=T.alloc_shared((X_SLOTS, C, spec.width), spec.dtype),
        w=T.alloc_shared((W_SLOTS, C, K), spec.dtype),
        out=T.alloc_shared((wgs, V_TILE, K), spec.dtype),
        g=T.alloc_shared(factors, "float32", scope="shared"),
        t_factor=T.alloc_shared(factors, spec.dtype, scope="shared"),
        x_factor=T.alloc_shared(factors, spec.x_factor_dtype, scope="shared"),
        acc_factor=T.alloc_shared(factors, "float32", scope="shared"),
        total=T.alloc_shared((FACTORS,), "float32", scope="shared"),
        loaded=T.alloc_barrier([1] * spec.ring),
        x_loaded=T.alloc_barrier([1] * X_SLOTS),
        decayed=T.alloc_barrier([1] * spec.ring),
        made=T.alloc_barrier([warps] * spec.stages),
        w_free=T.alloc_barrier([warps * wgs] * W_SLOTS),
        x_free=T.alloc_barrier([warps * wgs] * X_SLOTS),
        freed=T.alloc_barrier([warps * wgs] * spec.stages),
        staged=T.alloc_barrier([warps] * wgs),
        sent=T.alloc_barrier([1] * wgs),
    )
    T.annotate_layout(layouts.swizzled(m.x, m.out))
    return m


@T.macro
def run_roles(
    spec: Spec, m: Smem, walk: Walk, q, k, x, T_inv, g_cumsum, beta, scale, states, first_state, starts, last_state
):  # fmt: skip
    """One direction. The register budget is per role, so both directions share it."""
    load_regs, operands_regs, value_regs = REGISTERS[spec.value_warpgroups]
    first_second = FIRST_VALUE_THREAD + 128 * spec.value_warpgroups  # of a second operands warpgroup
    tx = T.get_thread_binding()
    if tx >= FIRST_VALUE_THREAD:
        if tx < first_second:
            pipeline.set_registers(value_regs, spec.threads)
            value_role(spec, m, walk, first_state, starts, last_state)
        else:
            if spec.operands_warpgroups == 2:
                pipeline.set_registers(operands_regs, spec.threads)
                operands_role(spec, m, walk, 1, scale)
    elif tx >= 128:
        pipeline.set_registers(operands_regs, spec.threads)
        operands_role(spec, m, walk, 0, scale)
    else:
        pipeline.set_registers(load_regs, spec.threads)
        if tx < 32:
            load_role(spec, m, walk, q, k, x, T_inv, g_cumsum, beta)
        elif tx < 64:
            if not spec.ends_only:
                store_role(spec, m, walk, 0, states)
        elif tx < 96:
            if spec.value_warpgroups == 2 and not spec.ends_only:
                store_role(spec, m, walk, 1, states)
        else:
            gate_role(spec, m, walk, g_cumsum, beta, scale)

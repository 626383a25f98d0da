"""Ends of segments (context parallelism inside one card): what a walk from zero over each segment leaves behind.

Equations C1, C2 and C6 forward, C4 reverse; a launch goes one way:

    segment_ends           b_j: the state after segment j from zero, and where the segment's gates and keys do not bound
                           the transition below the tolerance, M_j from the identity
    segment_ends_reverse   c_j: the state cotangent before segment j from zero

b_j is written where S_(j+1) belongs (slot j + 1; reverse: c_j at slot j - 1), so heads that do not carry are done after
this launch, which walks only their last (first) few chunks. Every CTA finds out by itself what it walks, and most end
at once (`tiles/decay.py`). M is kept as two bfloat16 tensors: their sum is right to 16 bits.

The forward walk holds the state transposed in registers, like `state_walk.py`, and makes a chunk's rows of V ready for
the product before the state is, without the value warpgroups' help:

    acc^T = V^T T~^T + S^T w^T    T~ = T beta    w = -(T beta Gamma) K        S^T <- e^gC S^T + (acc e)^T K

T~ takes T's place in shared memory, V is an operand as TMA delivers it; nothing is in flight across chunks. A walk of M
has S = I and V = 0. The reverse walk is that of `state_walk.py` without its store warps.

A ready T (`EndsSpec.ready`) is Z = -T beta, in mild chunks Z = -Gamma^-1 T beta Gamma (solve.py; the same rule decides
here). Beta is in it, so one of T~ and w needs no scaling; acc keeps a sign or a gate too many until it is cast:

              T~                 w                acc               factor of acc
    plain     T beta             -(T~ Gamma) K    Vd                e
    mild      Z (-Gamma^-1)      Z K              Gamma^-1 Vd       e Gamma = e^gC
    strong    Z                  Z (-Gamma) K     -Vd               -e

Grid: (kind of walk, segment, value head, tile of columns); kinds in `tiles/decay.py`. Segments are numbered without
those that hand nothing on, but with transitions for the backward by their slots.

Roles of segment_ends (W value warpgroups, 64 columns of V or K each):
    role       threads     registers (W = 1, 2)   computes
    value      128 W       216, 184               the recurrence
    operands   256, 128    128, 104               w, T~ (two warpgroups: by turns); zeroes rows past the sequence's end
    load       a warp      40                     TMA of K, V, T
    gate       3 warps     40                     row factors, a ring ahead

Barriers (arrivals count warps; rings of the spec's `stages` and `ring`, and of `W_SLOTS`):
    name       signalled by       waited by     guards
    loaded     load (TMA bytes)   operands      k, x, t (value sees them through t_ready)
    decayed    gate               operands      row factors (value sees them through t_ready)
    t_ready    operands           value         t (now T~), zeroed rows
    w_ready    operands           value         w
    w_free     value              operands      w
    freed      value              load, gate    k, x, t, row factors

Shared memory, K = 128: a stage is k 16 + x 8 W + t 8 KB + 0.8 KB of row factors (3, ready 4); w 16 (2).
"""

from dataclasses import dataclass

import tilelang.language as T

from flash_qla import arch as archs

from ..constants import CHUNK_SIZE as C
from ..constants import MILD
from ..sequences import Sequences
from ..split import Split
from . import launch, state_walk
from .build import BARE_PASS_CONFIGS, build
from .state_walk import V_TILE, Spec
from .tiles import decay, fragments, pipeline, program, ready, rows
from .tiles.gate import LOG2E
from .tiles.pipeline import ROWS

GATE_WARPS = 3
W_SLOTS = 2
# By value warpgroups: registers of load and gate, operands, value.
REGISTERS = {1: (40, 128, 216), 2: (40, 104, 184)}
M_DTYPE = "bfloat16"
HALVES = 2  # M = high + low
PASS_CONFIGS = BARE_PASS_CONFIGS

SOURCES = "".join(
    (fragments.SOURCE, fragments.LEAN_SOURCE, fragments.COLUMNS_SOURCE, fragments.STORE_SOURCE, fragments.READ_SOURCE,
     rows.SOURCE)
)  # fmt: skip
START_SOURCE = r"""
namespace flash_qla {
// S = rows first_row... of the identity, or zeros; S: a wgmma accumulator, 64 rows to a warpgroup.
template <int COLUMNS>
__device__ __forceinline__ void start_walk(float* S, int identity, int first_row) {
  int lane = threadIdx.x % 32, above = first_row + threadIdx.x / 32 * 16 + lane / 4 - lane % 4 * 2;
  if (!identity) above = -1000;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) S[i] = above == i / 4 * 8 + i % 2 - i / 2 % 2 * 8 ? 1.f : 0.f;
}
}  // namespace flash_qla
"""


@dataclass(frozen=True)
class EndsSpec(Spec):
    """Compile key of segment_ends.

    Attributes:
        ready: T_inv is what `solve` makes with `ready`.
    """

    ends_only: bool = True
    ready: bool = False

    @property
    def stages(self) -> int:
        return 4 if self.ready else GATE_WARPS

    @property
    def ring(self) -> int:
        """Warpgroups that take chunks by turns must see every phase of `loaded` and `decayed` that they wait for, or
        the phase before last, late, would look like the awaited one.
        """
        return 2 * self.stages


@dataclass
class Smem:
    """Shared memory and barriers of a CTA; a leading stage or slot.

    Row factors: e, of acc; beta and minus_beta_gamma of a plain T, column_factor of a ready one, for w where strong.
    """

    k: object
    t: object
    x: object
    w: object
    e: object
    beta: object
    minus_beta_gamma: object
    column_factor: object
    strong: object
    total: object
    loaded: object
    decayed: object
    t_ready: object
    w_ready: object
    w_free: object
    freed: object


def allocate(spec: EndsSpec) -> Smem:
    """Allocates a CTA's shared memory and makes the barriers."""
    wgs, ring, K, warps = spec.value_warpgroups, (spec.stages, C), spec.head_dim_k, pipeline.WARPS_PER_WARPGROUP
    return Smem(
        k=T.alloc_shared((*ring, K), spec.dtype),
        t=T.alloc_shared((*ring, C), spec.dtype),
        x=T.alloc_shared((*ring, V_TILE * wgs), spec.dtype),
        w=T.alloc_shared((W_SLOTS, C, K), spec.dtype),
        e=T.alloc_shared(ring, "float32"),
        beta=None if spec.ready else T.alloc_shared(ring, "float32"),
        minus_beta_gamma=None if spec.ready else T.alloc_shared(ring, "float32"),
        column_factor=T.alloc_shared(ring, "float32") if spec.ready else None,
        strong=T.alloc_shared((spec.stages,), "int32") if spec.ready else None,
        total=T.alloc_shared((spec.stages,), "float32"),
        loaded=T.alloc_barrier([1] * spec.ring),
        decayed=T.alloc_barrier([1] * spec.ring),
        t_ready=T.alloc_barrier([warps] * spec.stages),
        w_ready=T.alloc_barrier([warps] * W_SLOTS),
        w_free=T.alloc_barrier([warps * wgs] * W_SLOTS),
        freed=T.alloc_barrier([warps * wgs] * spec.stages),
    )


@T.macro
def load_role(spec: EndsSpec, m: Smem, walk: decay.Walk, k, x, T_inv, g_cumsum, beta):
    K, width = spec.head_dim_k, spec.width
    for i in T.serial(walk.chunks):
        stage = i % spec.stages
        left = walk.start + i * C
        T.barrier_wait(m.freed[stage], (i // spec.stages + 1) % 2)
        T.tma_copy(k[walk.batch, left : left + C, walk.k_head, 0:K], m.k[stage, :, :], barrier=m.loaded[i % spec.ring])
        if walk.is_transition == 0:
            T.tma_copy(
                x[walk.batch, left : left + C, walk.v_head, walk.v_col : walk.v_col + width],
                m.x[stage, :, :],
                barrier=m.loaded[i % spec.ring],
            )
        T.tma_copy(
            T_inv[walk.batch, left : left + C, walk.v_head, 0:C], m.t[stage, :, :], barrier=m.loaded[i % spec.ring]
        )
        if T.shuffle_elect(32):
            T.barrier_arrive(m.loaded[i % spec.ring])
        for half in T.unroll(2, unroll_factor=1):
            row = (i + state_walk.PREFETCH_CHUNKS) * C + T.get_thread_binding() % 32 + 32 * half
            row = walk.start + T.min(row, walk.length - 1)
            rows.prefetch(g_cumsum[walk.batch, row, walk.v_head])
            if not spec.ready:
                rows.prefetch(beta[walk.batch, row, walk.v_head])


@T.macro
def gate_role(spec: EndsSpec, m: Smem, walk: decay.Walk, g_cumsum, beta, stage):
    """Row factors; loads before the wait. A warp has a stage of its own: their latency is longer than a chunk."""
    lane = T.get_thread_binding() % 32
    g_last = T.alloc_var("float32")
    g = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    for j in T.serial((walk.chunks + GATE_WARPS - 1 - stage) // GATE_WARPS):
        i = stage + j * GATE_WARPS
        left = walk.start + i * C
        last = T.min(walk.length - i * C, C) - 1
        state_walk.load_gates(walk, left, last, lane, g_cumsum, beta, g_last, g, b)
        T.barrier_wait(m.freed[stage], (j + 1) % 2)
        for half in T.unroll(2):
            m.minus_beta_gamma[stage, lane + 32 * half] = -b[half] * T.exp2(g[half])
            m.e[stage, lane + 32 * half] = T.exp2(g_last - g[half])
            m.beta[stage, lane + 32 * half] = b[half]
        if lane == 0:
            m.total[stage] = T.exp2(g_last)
        pipeline.arrive(m.decayed, i % spec.ring)


@T.macro
def ready_gate_role(spec: EndsSpec, m: Smem, walk: decay.Walk, g_cumsum, first):
    """`gate_role` for a ready T: the chunks first, first + GATE_WARPS, ..."""
    lane = T.get_thread_binding() % 32
    g_last, strong = T.alloc_var("float32"), T.alloc_var("int32")
    g = T.alloc_local((2,), "float32")
    for j in T.serial((walk.chunks + GATE_WARPS - 1 - first) // GATE_WARPS):
        i = first + j * GATE_WARPS
        stage = i % spec.stages
        left = walk.start + i * C
        last = T.min(walk.length - i * C, C) - 1
        for half in T.unroll(2):
            g[half] = g_cumsum[walk.batch, left + T.min(lane + 32 * half, last), walk.v_head]
        g_last = g_cumsum[walk.batch, left + last, walk.v_head] * LOG2E
        # As solve and the fused walk decide: from natural logarithms, before any rounding.
        strong = T.any_sync(T.cast(T.max(T.abs(g[0]), T.abs(g[1])) > MILD[spec.dtype], "int32"))
        T.barrier_wait(m.freed[stage], (i // spec.stages + 1) % 2)
        for half in T.unroll(2):
            g[half] *= LOG2E
            m.column_factor[stage, lane + 32 * half] = -T.exp2(T.if_then_else(strong != 0, g[half], -g[half]))
            m.e[stage, lane + 32 * half] = T.if_then_else(strong != 0, -T.exp2(g_last - g[half]), T.exp2(g_last))
        if lane == 0:
            m.total[stage] = T.exp2(g_last)
            m.strong[stage] = strong
        pipeline.arrive(m.decayed, i % spec.ring)


@T.macro
def operands_role(spec: EndsSpec, m: Smem, walk: decay.Walk, first, step):
    """w, and T~ in T's place, of the chunks first, first + step, ..."""
    width = spec.width
    t = None if spec.ready else T.alloc_fragment((C, C), spec.dtype)
    T_op = T.alloc_fragment((C, C), spec.dtype)
    part = T.alloc_fragment((C, C), spec.dtype)
    acc = T.alloc_fragment((C, C), "float32")
    if first == 0 and walk.is_transition != 0:
        for stage in T.unroll(spec.stages, unroll_factor=1):
            rows.zero_stage_from(m.x, stage, 0, width)
    for j in T.serial((walk.chunks + step - 1 - first) // step):
        i = first + j * step
        stage = i % spec.stages
        T.barrier_wait(m.loaded[i % spec.ring], (i // spec.ring) % 2)
        T.barrier_wait(m.decayed[i % spec.ring], (i // spec.ring) % 2)
        valid = walk.length - i * C
        if valid < C:
            rows.zero_stage_from(m.k, stage, valid, spec.head_dim_k)
            rows.zero_stage_from(m.t, stage, valid, C)
            rows.zero_stage_from(m.x, stage, valid, width)
            T.fence_proxy_async()
            T.sync_threads(state_walk.OPERANDS_BARRIER - first, 128)
        if spec.ready:
            ready.split(T_op, m.t, stage, m.column_factor, m.strong[stage])
        else:
            fragments.load_tile_unfenced(t, m.t, stage)
            for r, c in T.Parallel(C, C):
                T_op[r, c] = T.cast(t[r, c], "float32") * m.minus_beta_gamma[stage, c]
        T.wgmma_gemm(T_op, m.k[stage, :, 0:64], acc, clear_accum=True)
        if not spec.ready:
            for r, c in T.Parallel(C, C):
                t[r, c] = T.cast(t[r, c], "float32") * m.beta[stage, c]
            fragments.store_tile_unfenced(m.t, stage, t)  # each warp's own rows: nobody else has read them
        pipeline.publish(m.t_ready, stage)
        T.barrier_wait(m.w_free[i % W_SLOTS], (i // W_SLOTS + 1) % 2)
        for col in tuple(range(0, spec.head_dim_k, 64)):
            T.wait_wgmma(0)
            pipeline.settle(acc)
            T.copy(acc, part)
            if col + 64 < spec.head_dim_k:
                T.wgmma_gemm(T_op, m.k[stage, :, col + 64 : col + 128], acc, clear_accum=True)
            fragments.store_panel_unfenced(m.w, i % W_SLOTS, part, col)
        pipeline.publish(m.w_ready, i % W_SLOTS)


@T.macro
def value_role(spec: EndsSpec, m: Smem, walk: decay.Walk, inner, transitions):
    """The recurrence, and where its last state goes."""
    K, width = spec.head_dim_k, spec.width
    S = T.alloc_fragment((width, K), "float32")
    S_op = T.alloc_fragment((width, K), spec.dtype)
    acc = T.alloc_fragment((width, C), "float32")
    acc_op = T.alloc_fragment((width, C), spec.dtype)
    e = T.alloc_fragment((C,), "float32")
    total = T.alloc_var("float32")
    T.clear(S)
    T.call_extern("void", f"flash_qla::start_walk<{K}>", S.access_ptr("w"), walk.is_transition, walk.v_col)
    pipeline.settle(S)
    for i in T.serial(walk.chunks):
        stage = i % spec.stages
        T.barrier_wait(m.t_ready[stage], (i // spec.stages) % 2)
        T.wgmma_gemm(
            m.x[stage, :, :],
            m.t[stage, :, :],
            acc,
            transpose_A=True,
            transpose_B=True,
            clear_accum=True,
            policy=ROWS,
        )
        T.copy(S, S_op)
        T.barrier_wait(m.w_ready[i % W_SLOTS], (i // W_SLOTS) % 2)
        T.wgmma_gemm(S_op, m.w[i % W_SLOTS, :, :], acc, transpose_B=True, policy=ROWS)
        total = m.total[stage]
        for jv, jk in T.Parallel(width, K):
            S[jv, jk] *= total
        T.copy(m.e[stage, :], e)
        T.wait_wgmma(0)
        pipeline.settle(acc)
        pipeline.arrive(m.w_free, i % W_SLOTS)
        for jv, j in T.Parallel(width, C):
            acc_op[jv, j] = acc[jv, j] * e[j]
        T.wgmma_gemm(acc_op, m.k[stage, :, :], S, policy=ROWS)
        T.wait_wgmma(0)
        pipeline.settle(S)
        pipeline.arrive(m.freed, stage)
    if walk.is_transition == 0:
        for jv, jk in T.Parallel(width, K):
            inner[walk.row, walk.v_head, walk.v_col + jv, jk] = S[jv, jk]
    else:
        for jv, jk in T.Parallel(width, K):
            transitions[-1 - walk.row, walk.v_head, 0, walk.v_col + jv, jk] = T.cast(S[jv, jk], M_DTYPE)
        for jv, jk in T.Parallel(width, K):
            S[jv, jk] = S[jv, jk] - T.cast(T.cast(S[jv, jk], M_DTYPE), "float32")
        for jv, jk in T.Parallel(width, K):
            transitions[-1 - walk.row, walk.v_head, 1, walk.v_col + jv, jk] = T.cast(S[jv, jk], M_DTYPE)


@T.macro
def helper_roles(spec: EndsSpec, m: Smem, walk: decay.Walk, k, x, T_inv, g_cumsum, beta, registers, first):
    """Load and gate, in the warpgroup from thread `first` on."""
    pipeline.set_registers(registers, spec.threads)
    tx = T.get_thread_binding()
    if tx < first + 32:
        load_role(spec, m, walk, k, x, T_inv, g_cumsum, beta)
    else:
        if spec.ready:
            ready_gate_role(spec, m, walk, g_cumsum, (tx - first) // 32 - 1)
        else:
            gate_role(spec, m, walk, g_cumsum, beta, (tx - first) // 32 - 1)


@T.macro
def run_roles(spec: EndsSpec, m: Smem, walk: decay.Walk, k, x, T_inv, g_cumsum, beta, inner, transitions):
    wgs, makers = spec.value_warpgroups, spec.operands_warpgroups
    few, operands, value = REGISTERS[wgs]
    tx = T.get_thread_binding()
    if tx < 128 * wgs:
        pipeline.set_registers(value, spec.threads)
        value_role(spec, m, walk, inner, transitions)
    elif tx < 128 * (1 + wgs):
        pipeline.set_registers(operands, spec.threads)
        operands_role(spec, m, walk, 0, makers)
    elif tx < 128 * (2 + wgs):
        if makers == 2:
            pipeline.set_registers(operands, spec.threads)
            operands_role(spec, m, walk, 1, makers)
        else:
            helper_roles(spec, m, walk, k, x, T_inv, g_cumsum, beta, few, 128 * (1 + wgs))
    else:
        if makers == 2:
            helper_roles(spec, m, walk, k, x, T_inv, g_cumsum, beta, few, 128 * (2 + wgs))


def make(spec: EndsSpec):
    """Returns the prim_func of segment_ends."""
    K = spec.head_dim_k
    v_tiles, m_tiles = spec.v_tiles, K // spec.width
    t = program.Tensors.of(spec)
    num_v_heads = t.num_v_heads
    slots, m_slots = T.dynamic("slots m_slots")

    @T.prim_func
    def segment_ends(
        k: t.keys("k"), x: t.values("x"), T_inv: t.inverse(), g_cumsum: t.per_head(),
        beta: t.gates("beta", spec.beta_dtype), cu: program.cu_seqlens(), inner: t.states(slots),
        transitions: T.Tensor((m_slots, num_v_heads, HALVES, K, K), M_DTYPE),
        carries: T.Tensor((m_slots, num_v_heads, 2), "int32"), tolerance: T.float32, num_seqs: T.int32,
        cu_step: T.int32, seq_len: T.int32, segment_tokens: T.int32, m_walks: T.int32, b_walks: T.int32,
        has_h0: T.int32, for_backward: T.int32,
    ):  # fmt: skip
        with T.Kernel(num_v_heads * (m_walks * m_tiles + 2 * b_walks * v_tiles), threads=spec.threads) as (block,):
            T.import_source(SOURCES + START_SOURCE + decay.SOURCE + (ready.source(spec.dtype) if spec.ready else ""))
            m = allocate(spec)
            sizes = dict(
                m_tiles=m_tiles, v_tiles=v_tiles, width=spec.width, m_walks=m_walks, b_walks=b_walks, cu_step=cu_step,
                seq_len=seq_len, num_seqs=num_seqs, segment_tokens=segment_tokens, reverse=0, has_h0=has_h0,
                for_backward=for_backward, tolerance=tolerance,
            )  # fmt: skip
            walk = decay.plan_walk(spec.threads, (k, g_cumsum, beta, carries, cu), sizes)
            run_roles(spec, m, walk, k, x, T_inv, g_cumsum, beta, inner, transitions)

    return segment_ends


@dataclass
class Ends:
    """Where a reverse walk of `state_walk.py` leaves its last state."""

    states: object

    def store(self, S, S_op, walk, v_col, rows, cols):
        return store_end(self.states, S, walk, v_col, rows, cols)


@T.macro
def store_end(target, S, walk: state_walk.Walk, v_col, rows, cols):
    if walk.last_row < target.shape[0]:
        for jv, jk in T.Parallel(rows, cols):
            target[walk.last_row, walk.v_head, v_col + jv, jk] = S[jv, jk]


def make_reverse(spec: Spec):
    """Returns the prim_func of segment_ends_reverse."""
    v_tiles = spec.v_tiles
    t = program.Tensors.of(spec)
    num_v_heads = t.num_v_heads
    slots, m_slots = T.dynamic("slots m_slots")

    @T.prim_func
    def segment_ends_reverse(
        q: t.keys("q"), k: t.keys("k"), x: t.values("x"), T_inv: t.inverse(), g_cumsum: t.per_head(),
        beta: t.gates("beta", spec.beta_dtype), cu: program.cu_seqlens(), inner: t.states(slots),
        carries: T.Tensor((m_slots, num_v_heads, 2), "int32"), scale: T.float32, tolerance: T.float32,
        num_seqs: T.int32, cu_step: T.int32, seq_len: T.int32, segment_tokens: T.int32, b_walks: T.int32,
    ):  # fmt: skip
        with T.Kernel(num_v_heads * (2 * b_walks * v_tiles), threads=spec.threads) as (block,):
            T.import_source(state_walk.sources(spec.dtype) + decay.SOURCE)
            m = state_walk.allocate(spec)
            sizes = dict(
                m_tiles=0, v_tiles=v_tiles, width=spec.width, m_walks=0, b_walks=b_walks, cu_step=cu_step,
                seq_len=seq_len, num_seqs=num_seqs, segment_tokens=segment_tokens, reverse=1, has_h0=0,
                for_backward=0, tolerance=tolerance,
            )  # fmt: skip
            at = decay.plan_walk(spec.threads, (k, g_cumsum, beta, carries, cu), sizes)
            walk = state_walk.Walk(
                True, n=0, slot=0, inner=0, last_row=at.row, batch=at.batch, start=at.start, length=at.length,
                chunks=at.chunks, updates=at.chunks, first_slot=0, k_head=at.k_head, v_head=at.v_head, v_col=at.v_col,
            )  # fmt: skip
            inputs = (q, k, x, T_inv, g_cumsum, beta, scale)
            state_walk.run_roles(spec, m, walk, *inputs, None, None, None, Ends(inner))

    return segment_ends_reverse


def specs(dtype, head_dim_k=128, head_dim_v=128, beta_dtype="float32", *, backward=True):
    """Every (make, Spec) that a configuration can ask for."""
    counts = (1,) if V_TILE in (head_dim_k, head_dim_v) else (1, 2)
    sizes = dtype, head_dim_k, head_dim_v, beta_dtype
    found = [(make, EndsSpec(*sizes, value_warpgroups=n, ready=ready)) for n in counts for ready in (False, True)]
    if backward:
        found += [(make_reverse, Spec(*sizes, value_warpgroups=n, ends_only=True)) for n in counts]
    return found


def segment_ends(
    inner, transitions, carries, k, x, T_inv, g_cumsum, beta, seqs: Sequences, split: Split, *, q=None, scale=1.0,
    has_h0=False, for_backward=False, ready=False,
):  # fmt: skip
    """Launches the walks of segment_ends. Equations: C1, C2 and C6; with q C4.

    Args:
        inner: `[slots, Hv, V, K]` fp32 destination of b_j at slot j + 1; with q of c_j at slot j - 1.
        transitions: `[slots, Hv, 2, K, K]` bfloat16, carries: `[slots, Hv, 2]` int32 (forward, reverse): destinations;
            with q carries is read.
        x: v, or do with q.
        q, scale: given, the walks go backwards.
        has_h0: whether a state other than zero enters the first segment.
        for_backward: also what only the reverse chain needs of transitions and carries.
        ready: T_inv is what `solve` makes with `ready`; not with q.
    """
    device, (K, V, Hv) = k.device, (k.shape[-1], x.shape[-1], x.shape[2])
    names = launch.DTYPE_NAMES
    pairs = launch.num_walks(seqs, split=split) * Hv
    wgs = launch.num_end_warpgroups(pairs, K, V, archs.num_sms(device), split.segment_chunks, q is not None)
    sizes = names[k.dtype], K, V, names[beta.dtype]
    k, x = launch.tma_ready(k), launch.tma_ready(x)
    b_walks = (seqs.flat_tokens - 1) // (split.segment_chunks * C)  # segments that hand something on, at most
    if b_walks == 0 and not for_backward:
        return
    cu, cu_step, seq_len = launch.cu_arguments(seqs, device)
    arch, tensors = archs.of_device(device), (k, x, T_inv, g_cumsum, beta, cu, inner)
    where = (split.tolerance, seqs.num_seqs, cu_step, seq_len, split.segment_chunks * C)
    if q is not None:
        spec = Spec(*sizes, value_warpgroups=wgs, ends_only=True)
        build(make_reverse, spec, arch)(launch.tma_ready(q), *tensors, carries, float(scale), *where, b_walks)
        return
    m_walks = launch.num_segment_slots(seqs, split.segment_chunks) if for_backward else b_walks
    build(make, EndsSpec(*sizes, value_warpgroups=wgs, ready=ready), arch)(
        *tensors, transitions, carries, *where, m_walks, b_walks, int(has_h0), int(for_backward)
    )  # fmt: skip

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

Grid: (kind of walk, segment, value head, tile of columns); kinds in `tiles/decay.py`. Segments are numbered without
those that hand nothing on, but with transitions for the backward by their slots.

Roles of segment_ends (W value warpgroups, 64 columns of V or K each):
    role       threads     registers (W = 1, 2)   computes
    value      128 W       216, 184               the recurrence
    operands   256, 128    128, 104               w, T~ (two warpgroups: by turns); zeroes rows past the sequence's end
    load       a warp      40                     TMA of K, V, T
    gate       3 warps     40                     row factors, a ring ahead

Barriers (arrivals count warps; rings of `STAGES`, `RING` and `W_SLOTS`):
    name       signalled by       waited by     guards
    loaded     load (TMA bytes)   operands      k, x, t (value sees them through t_ready)
    decayed    gate               operands      row factors (value sees them through t_ready)
    t_ready    operands           value         t (now T~), zeroed rows
    w_ready    operands           value         w
    w_free     value              operands      w
    freed      value              load, gate    k, x, t, row factors

Shared memory, K = 128: a stage is k 16 + x 8 W + t 8 KB + 0.8 KB of row factors (3); w 16 (2).
"""

from dataclasses import dataclass

import tilelang.language as T

from flash_qla import arch as archs

from ..constants import CHUNK_SIZE as C
from ..sequences import Sequences
from ..split import Split
from . import launch, state_walk
from .build import BARE_PASS_CONFIGS, build
from .state_walk import V_TILE, Spec
from .tiles import decay, fragments, pipeline, program, rows
from .tiles.pipeline import ROWS

STAGES = 3
# Barriers of loaded and decayed: warpgroups that take chunks by turns must see every phase of those that they wait for,
# or the phase before last, late, would look like the awaited one.
RING = 2 * STAGES
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


@dataclass
class Smem:
    """Shared memory and barriers of a CTA; a leading stage or slot."""

    k: object
    t: object
    x: object
    w: object
    e: object
    beta: object
    minus_beta_gamma: object
    total: object
    loaded: object
    decayed: object
    t_ready: object
    w_ready: object
    w_free: object
    freed: object


def allocate(spec: Spec) -> Smem:
    """Allocates a CTA's shared memory and makes the barriers."""
    wgs, ring, K, warps = spec.value_warpgroups, (STAGES, C), spec.head_dim_k, pipeline.WARPS_PER_WARPGROUP
    return Smem(
        k=T.alloc_shared((*ring, K), spec.dtype),
        t=T.alloc_shared((*ring, C), spec.dtype),
        x=T.alloc_shared((*ring, V_TILE * wgs), spec.dtype),
        w=T.alloc_shared((W_SLOTS, C, K), spec.dtype),
        e=T.alloc_shared(ring, "float32"),
        beta=T.alloc_shared(ring, "float32"),
        minus_beta_gamma=T.alloc_shared(ring, "float32"),
        total=T.alloc_shared((STAGES,), "float32"),
        loaded=T.alloc_barrier([1] * RING),
        decayed=T.alloc_barrier([1] * RING),
        t_ready=T.alloc_barrier([warps] * STAGES),
        w_ready=T.alloc_barrier([warps] * W_SLOTS),
        w_free=T.alloc_barrier([warps * wgs] * W_SLOTS),
        freed=T.alloc_barrier([warps * wgs] * STAGES),
    )


@T.macro
def load_role(spec: Spec, m: Smem, walk: decay.Walk, k, x, T_inv, g_cumsum, beta):
    K, width = spec.head_dim_k, spec.width
    for i in T.serial(walk.chunks):
        stage = i % STAGES
        left = walk.start + i * C
        T.barrier_wait(m.freed[stage], (i // STAGES + 1) % 2)
        T.tma_copy(k[walk.batch, left : left + C, walk.k_head, 0:K], m.k[stage, :, :], barrier=m.loaded[i % RING])
        if walk.is_transition == 0:
            T.tma_copy(
                x[walk.batch, left : left + C, walk.v_head, walk.v_col : walk.v_col + width],
                m.x[stage, :, :],
                barrier=m.loaded[i % RING],
            )
        T.tma_copy(T_inv[walk.batch, left : left + C, walk.v_head, 0:C], m.t[stage, :, :], barrier=m.loaded[i % RING])
        if T.shuffle_elect(32):
            T.barrier_arrive(m.loaded[i % RING])
        for half in T.unroll(2, unroll_factor=1):
            row = (i + state_walk.PREFETCH_CHUNKS) * C + T.get_thread_binding() % 32 + 32 * half
            row = walk.start + T.min(row, walk.length - 1)
            rows.prefetch(g_cumsum[walk.batch, row, walk.v_head])
            rows.prefetch(beta[walk.batch, row, walk.v_head])


@T.macro
def gate_role(m: Smem, walk: decay.Walk, g_cumsum, beta, stage):
    """Row factors; loads before the wait. A warp has a stage of its own: their latency is longer than a chunk."""
    lane = T.get_thread_binding() % 32
    g_last = T.alloc_var("float32")
    g = T.alloc_local((2,), "float32")
    b = T.alloc_local((2,), "float32")
    for j in T.serial((walk.chunks + STAGES - 1 - stage) // STAGES):
        i = stage + j * STAGES
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
        pipeline.arrive(m.decayed, i % RING)


@T.macro
def operands_role(spec: Spec, m: Smem, walk: decay.Walk, first, step):
    """w = -(T beta Gamma) K, and T beta in T's place, of the chunks first, first + step, ..."""
    width = spec.width
    t = T.alloc_fragment((C, C), spec.dtype)
    T_op = T.alloc_fragment((C, C), spec.dtype)
    part = T.alloc_fragment((C, C), spec.dtype)
    acc = T.alloc_fragment((C, C), "float32")
    if first == 0 and walk.is_transition != 0:
        for stage in T.unroll(STAGES, unroll_factor=1):
            rows.zero_stage_from(m.x, stage, 0, width)
    for j in T.serial((walk.chunks + step - 1 - first) // step):
        i = first + j * step
        stage = i % STAGES
        T.barrier_wait(m.loaded[i % RING], (i // RING) % 2)
        T.barrier_wait(m.decayed[i % RING], (i // RING) % 2)
        valid = walk.length - i * C
        if valid < C:
            rows.zero_stage_from(m.k, stage, valid, spec.head_dim_k)
            rows.zero_stage_from(m.t, stage, valid, C)
            rows.zero_stage_from(m.x, stage, valid, width)
            T.fence_proxy_async()
            T.sync_threads(state_walk.OPERANDS_BARRIER - first, 128)
        fragments.load_tile_unfenced(t, m.t, stage)
        for r, c in T.Parallel(C, C):
            T_op[r, c] = T.cast(t[r, c], "float32") * m.minus_beta_gamma[stage, c]
        T.wgmma_gemm(T_op, m.k[stage, :, 0:64], acc, clear_accum=True)
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
def value_role(spec: Spec, m: Smem, walk: decay.Walk, inner, transitions):
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
        stage = i % STAGES
        T.barrier_wait(m.t_ready[stage], (i // STAGES) % 2)
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
def helper_roles(spec: Spec, m: Smem, walk: decay.Walk, k, x, T_inv, g_cumsum, beta, registers, first):
    """Load and gate, in the warpgroup from thread `first` on."""
    pipeline.set_registers(registers, spec.threads)
    tx = T.get_thread_binding()
    if tx < first + 32:
        load_role(spec, m, walk, k, x, T_inv, g_cumsum, beta)
    else:
        gate_role(m, walk, g_cumsum, beta, (tx - first) // 32 - 1)


@T.macro
def run_roles(spec: Spec, m: Smem, walk: decay.Walk, k, x, T_inv, g_cumsum, beta, inner, transitions):
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


def make(spec: Spec):
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
            T.import_source(SOURCES + START_SOURCE + decay.SOURCE)
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


def specs(dtype, head_dim_k=128, head_dim_v=128, beta_dtype="float32"):
    """Every Spec that a configuration can ask for."""
    counts = (1,) if V_TILE in (head_dim_k, head_dim_v) else (1, 2)
    return [Spec(dtype, head_dim_k, head_dim_v, beta_dtype, value_warpgroups=n, ends_only=True) for n in counts]


def segment_ends(
    inner, transitions, carries, k, x, T_inv, g_cumsum, beta, seqs: Sequences, split: Split, *, q=None, scale=1.0,
    has_h0=False, for_backward=False,
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
    """
    device, (K, V, Hv) = k.device, (k.shape[-1], x.shape[-1], x.shape[2])
    names = launch.DTYPE_NAMES
    pairs = launch.num_walks(seqs, split=split) * Hv
    wgs = launch.num_end_warpgroups(pairs, K, V, archs.num_sms(device), split.segment_chunks, q is not None)
    spec = Spec(names[k.dtype], K, V, names[beta.dtype], value_warpgroups=wgs, ends_only=True)
    k, x = launch.tma_ready(k), launch.tma_ready(x)
    b_walks = (seqs.flat_tokens - 1) // (split.segment_chunks * C)  # segments that hand something on, at most
    if b_walks == 0 and not for_backward:
        return
    cu, cu_step, seq_len = launch.cu_arguments(seqs, device)
    arch, tensors = archs.of_device(device), (k, x, T_inv, g_cumsum, beta, cu, inner)
    where = (split.tolerance, seqs.num_seqs, cu_step, seq_len, split.segment_chunks * C)
    if q is not None:
        build(make_reverse, spec, arch)(launch.tma_ready(q), *tensors, carries, float(scale), *where, b_walks)
        return
    m_walks = launch.num_segment_slots(seqs, split.segment_chunks) if for_backward else b_walks
    build(make, spec, arch)(
        *tensors, transitions, carries, *where, m_walks, b_walks, int(has_h0), int(for_backward)
    )  # fmt: skip

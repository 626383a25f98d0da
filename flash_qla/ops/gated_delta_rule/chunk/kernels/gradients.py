"""Gradients of one chunk (Hopper): dq, dk, dv, dβ, dg from the states on both sides. Equations B1 to B11.

A CTA takes one (chunk, key head) and walks its value heads; V is walked in slices of 64 columns:

    U = K S                  W = β (V − Γ U)          Vd = T W
    dVd = Pᵀ dO + e (K dS)   X = Tᵀ dVd               dv = β X
    dPg = s D ∘ (dO Vdᵀ)     ΣβdM += −β D ∘ (X Vdᵀ)
    dQ += s Γ (dO Sᵀ) + dPg K
    dK += (−Γ β X) Sᵀ + (e Vd) dSᵀ + dPgᵀ Q

K is the group's, so βdM is summed over the value heads first and multiplied once, with its transpose, at the end:
dK += (ΣβdM + ΣβdMᵀ) K. (The same for dPg would save products and cost 32 registers that do not fit.) No atomics, no
partial sums in memory.

dg needs row products of each value head alone (all from the operands that the products see, see design.md §3):
    k·dK_read  = −β Γ X·U + rowsum(β dM ∘ K Kᵀ)      k·dK_write = colsum(P ∘ dO Vdᵀ) + colsum(β dM ∘ K Kᵀ) + x
    q·dQ       = s Γ q·(dO Sᵀ) + rowsum(P ∘ dO Vdᵀ)  x = e Vd·(K dS)        P's diagonal left out, x_last := 0
    dβ = X·(V − Γ U) + rowsum(dM ∘ K Kᵀ)

Roles:
    role      threads   registers   computes (K = 128)
    load      warp 0    24          TMA; zeroes the rows past the sequence's end
    row       warp 1    24          row factors of each value head; dg and dβ out of the roles' row sums
    store     warp 2    24          dv
    chain     128       168         U, W, Vd, dVd, X, dv
    query     128       168         Q Kᵀ, P, dO Sᵀ, dO Vdᵀ, dPg, <S, dS>, dq
    key       128       152         X Vdᵀ, (Γ β X) Sᵀ, (e Vd) dSᵀ, dPgᵀ Q, dk

Barriers (arrivals count warps; "h" is a V slice, one slot for each):
    name          signalled by       waited by           guards
    qk_ready      load (TMA)         chain, query, key   q, k
    slice_ready   load (TMA)         chain, query, key   S[h], dS[h], v[h]
    slice_free    chain, query, key  load                the same
    do_ready      load (TMA)         chain, query        dO (ring of 3 slices)
    do_free       chain, query       load                the same
    t_ready       load (TMA)         chain               T (ring of 2 heads)
    t_free        chain              load                the same
    rows_ready    row                chain, query, key   row factors (ring of 2 heads); the sums' slots are free
    sums_ready    chain, query, key  row                 row sums (ring of 2 heads)
    p_ready       query              chain               P
    p_free        chain              query               P
    vd_ready      chain              query, key          Vd[h]
    vd_free       query, key         chain               Vd[h]
    x_ready       chain              key                 X[h]
    x_free        key                chain               X[h]
    dv_ready      chain              store               scratch, as dv
    dv_free       store              chain               scratch
    dp_ready      query              key                 dPg
    dp_free       key                query               dPg
    cleaned       load (TMA)         load                tiles whose rows past the end it zeroes

Shared memory, K = V = 128 (tiles of 64 × 64, 8 KB): q 2, k 2, S 4, dS 4, v 2, dO 3, T 2, P 1, scratch 1, Vd 2, X 2,
dPg 1, K Kᵀ 1: 27 tiles, 216 KB; row factors and sums 10 KB: 226 KB with the barriers 227, all there is.
Grid: x = (chunk slot, key head), the key head innermost.

Longer than 600 lines: six roles hand over to each other inside one CTA, and their macros read only side by side.
"""

from dataclasses import dataclass

import tilelang.language as T

from flash_qla import arch as archs

from . import launch
from .build import build
from .tiles import layouts, pipeline, program, rows

C = 64
DO_STAGES = 3
HEAD_STAGES = 2
LOG2E = 1.4426950408889634
# By head_dim_k. With K = 128 one tile address of the key role and one value of the row warp live in local memory: of
# the budgets tried this one spills least. The lowering test allows no more.
REGISTERS = {
    64: {"load": 40, "chain": 168, "query": 152, "key": 152},
    128: {"load": 24, "chain": 168, "query": 168, "key": 152},
}
KNOWN_SPILL_BYTES = 16
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.enable_fast_math": True,
}


@dataclass(frozen=True)
class Spec:
    """Compile key.

    Attributes:
        dtype: of q, k, v, do, T_inv, S, dS, dq, dk and dv.
        beta_dtype: of beta.
        head_dim_k, head_dim_v: 64 or 128.
    """

    dtype: str
    beta_dtype: str = "float32"
    head_dim_k: int = 128
    head_dim_v: int = 128

    @property
    def k_slices(self) -> tuple[int, ...]:
        return tuple(range(self.head_dim_k // C))

    @property
    def v_slices(self) -> tuple[int, ...]:
        return tuple(range(self.head_dim_v // C))


@dataclass
class Smem:
    """Tiles, row factors and row sums of a CTA. Lists are over slices of K or V; rings have a leading stage."""

    q: list
    k: list
    S: list
    dS: list
    v: list
    do: object
    t: object
    p: object
    scratch: object
    vd: list
    x: list
    dp: object
    kk: object
    factors: object
    sums: object
    columns: object


@dataclass
class Barriers:
    qk_ready: object
    slice_ready: object
    slice_free: object
    do_ready: object
    do_free: object
    t_ready: object
    t_free: object
    rows_ready: object
    sums_ready: object
    p_ready: object
    p_free: object
    vd_ready: object
    vd_free: object
    x_ready: object
    x_free: object
    dv_ready: object
    dv_free: object
    dp_ready: object
    dp_free: object
    cleaned: object


@dataclass
class Work:
    """A CTA's chunk: batch row, first token, number of tokens, key head, and its value heads."""

    batch: object
    left: object
    count: object
    k_head: object
    first_v_head: object
    group: object


SOURCE = """
namespace flash_qla {
// x, by way of a shuffle with oneself: neither compiler stage sees that it is the same value again.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("shfl.sync.idx.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(x) : "r"((int)threadIdx.x & 31));
  return x;
}
}
"""
# Slots of the row factors: g in log2 units, β, Γ, e.
G, BETA, GAMMA, DECAY = range(4)
# Slots of the row sums. chain: x, X·(V − Γ U), X·U. query: q·(dO Sᵀ), rowsum(P ∘ dO Vdᵀ), <S, dS> by warp. key:
# rowsum(dM ∘ K Kᵀ).
END, BETA_ROW, READ_U, READ_STATE, QUERY_PAIR, STATE_DOT, KEY_PAIR = range(7)


def load_tile(source, tile, w: Work, head, col, barrier):
    return T.tma_copy(source[w.batch, w.left : w.left + C, head, col : col + C], tile, barrier=barrier)


@T.macro
def load_chunk(spec: Spec, m: Smem, b: Barriers, w: Work, q, k):
    """q and k of the chunk, once."""
    if w.count == C:
        for c in spec.k_slices:
            load_tile(k, m.k[c], w, w.k_head, c * C, b.qk_ready)
            load_tile(q, m.q[c], w, w.k_head, c * C, b.qk_ready)
    else:
        for c in spec.k_slices:
            load_tile(k, m.k[c], w, w.k_head, c * C, b.cleaned)
            load_tile(q, m.q[c], w, w.k_head, c * C, b.cleaned)
        if T.shuffle_elect(32):
            T.barrier_arrive(b.cleaned)
        T.barrier_wait(b.cleaned, 0)
        for c in spec.k_slices:
            rows.zero_rows_from(m.k[c], w.count, C, C)
            rows.zero_rows_from(m.q[c], w.count, C, C)
        T.fence_proxy_async()
        T.sync_warp()
    if T.shuffle_elect(32):
        T.barrier_arrive(b.qk_ready)


@T.macro
def load_role(spec: Spec, m: Smem, b: Barriers, w: Work, slot, q, k, v, T_inv, do, S, dS):
    v_slices = len(spec.v_slices)
    cleanings = T.alloc_var("int32")
    cleanings = 1
    load_chunk(spec, m, b, w, q, k)
    for head in T.serial(w.group):
        v_head = w.first_v_head + head
        stage = head % HEAD_STAGES
        for h in spec.v_slices:
            do_stage = (head * v_slices + h) % DO_STAGES
            T.barrier_wait(b.slice_free[h], (head & 1) ^ 1)
            for c in spec.k_slices:
                T.tma_copy(S[slot, v_head, h * C : h * C + C, c * C : c * C + C], m.S[h][c], barrier=b.slice_ready[h])
            for c in spec.k_slices:
                T.tma_copy(dS[slot, v_head, h * C : h * C + C, c * C : c * C + C], m.dS[h][c], barrier=b.slice_ready[h])
            if h == 0:
                T.barrier_wait(b.t_free[stage], (head // HEAD_STAGES + 1) % 2)
            T.barrier_wait(b.do_free[do_stage], ((head * v_slices + h) // DO_STAGES + 1) % 2)
            if w.count == C:
                load_tile(v, m.v[h], w, v_head, h * C, b.slice_ready[h])
                if T.shuffle_elect(32):
                    T.barrier_arrive(b.slice_ready[h])
                if h == 0:
                    load_tile(T_inv, m.t[stage, :, :], w, v_head, 0, b.t_ready[stage])
                    if T.shuffle_elect(32):
                        T.barrier_arrive(b.t_ready[stage])
                load_tile(do, m.do[do_stage, :, :], w, v_head, h * C, b.do_ready[do_stage])
                if T.shuffle_elect(32):
                    T.barrier_arrive(b.do_ready[do_stage])
            else:
                load_tile(v, m.v[h], w, v_head, h * C, b.cleaned)
                load_tile(do, m.do[do_stage, :, :], w, v_head, h * C, b.cleaned)
                if h == 0:
                    load_tile(T_inv, m.t[stage, :, :], w, v_head, 0, b.cleaned)
                if T.shuffle_elect(32):
                    T.barrier_arrive(b.cleaned)
                T.barrier_wait(b.cleaned, cleanings & 1)
                cleanings += 1
                rows.zero_rows_from(m.v[h], w.count, C, C)
                rows.zero_ring_rows_from(m.do, do_stage, w.count, C, C)
                if h == 0:
                    rows.zero_ring_rows_from(m.t, stage, w.count, C, C)
                T.fence_proxy_async()
                T.sync_warp()
                if T.shuffle_elect(32):
                    T.barrier_arrive(b.slice_ready[h])
                    T.barrier_arrive(b.do_ready[do_stage])
                    if h == 0:
                        T.barrier_arrive(b.t_ready[stage])


@T.macro
def load_row_factors(m: Smem, b: Barriers, w: Work, head, g_cumsum, beta, lane):
    """g in log2 units (the last valid row's past the end), β (zero there), Γ and e of one value head."""
    stage = head % HEAD_STAGES
    v_head = w.first_v_head + head
    b_row = T.alloc_var("float32")
    g_last = T.alloc_var("float32")
    g_row = T.alloc_var("float32")
    g_last = g_cumsum[w.batch, w.left + w.count - 1, v_head] * LOG2E
    for r in T.unroll(2, unroll_factor=1):
        row = 2 * lane + r
        g_row = g_cumsum[w.batch, w.left + T.min(row, w.count - 1), v_head] * LOG2E
        b_row = T.cast(beta[w.batch, w.left + T.min(row, w.count - 1), v_head], "float32")
        m.factors[stage, G, row] = g_row
        m.factors[stage, BETA, row] = T.if_then_else(row < w.count, b_row, 0.0)
        m.factors[stage, GAMMA, row] = T.exp2(g_row)
        m.factors[stage, DECAY, row] = T.exp2(g_last - g_row)
    pipeline.arrive(b.rows_ready, stage)


@T.macro
def finish_rows(m: Smem, w: Work, head, scale, dbeta, dg, lane):
    """dβ and dg of one value head out of the roles' row sums, and dg's reverse cumsum. Equations: B9 to B11."""
    stage = head % HEAD_STAGES
    pair = T.alloc_local((2,), "float32")
    end = T.alloc_var("float32")
    end_sum = T.alloc_var("float32")
    state_dot = T.alloc_var("float32")
    other = T.alloc_var("float32")
    end_sum = 0.0
    state_dot = 0.0
    for r in tuple(range(2)):
        row = 2 * lane + r
        end = T.if_then_else(row == w.count - 1, 0.0, m.sums[stage, END, row])
        end_sum += end
        if row < w.count:
            dbeta[w.batch, w.left + row, w.first_v_head + head] = (
                m.sums[stage, BETA_ROW, row] + m.sums[stage, KEY_PAIR, row]
            )
        pair[r] = scale * m.factors[stage, GAMMA, row] * m.sums[stage, READ_STATE, row] + m.sums[stage, QUERY_PAIR, row]
        pair[r] -= m.factors[stage, BETA, row] * m.factors[stage, GAMMA, row] * m.sums[stage, READ_U, row]
        pair[r] += m.factors[stage, BETA, row] * m.sums[stage, KEY_PAIR, row] - end
        for i in T.unroll(8, unroll_factor=1):
            pair[r] -= m.columns[stage, i, row]
    for shift in (1, 2, 4, 8, 16):
        end_sum += T.shfl_xor(end_sum, shift)
    for i in T.unroll(4, unroll_factor=1):
        state_dot += m.sums[stage, STATE_DOT, i]
    for r in tuple(range(2)):
        if 2 * lane + r == w.count - 1:
            pair[r] += end_sum + m.factors[stage, GAMMA, 2 * lane + r] * state_dot
    pair[0] += pair[1]
    end = pair[0]
    for shift in (1, 2, 4, 8, 16):
        other = T.shfl_down(end, shift)
        end += T.if_then_else(lane + shift < 32, other, 0.0)
    other = T.shfl_down(end, 1)
    other = T.if_then_else(lane < 31, other, 0.0)
    pair[0] += other
    pair[1] += other
    for r in tuple(range(2)):
        if 2 * lane + r < w.count:
            dg[w.batch, w.left + 2 * lane + r, w.first_v_head + head] = pair[r]


@T.macro
def row_role(m: Smem, b: Barriers, w: Work, scale, g_cumsum, beta, dbeta, dg):
    lane = T.alloc_var("int32")
    for head in T.serial(T.min(w.group, HEAD_STAGES)):
        lane = T.call_extern("int32", "flash_qla::opaque", T.get_thread_binding() % 32)
        load_row_factors(m, b, w, head, g_cumsum, beta, lane)
    for head in T.serial(w.group):
        T.barrier_wait(b.sums_ready[head % HEAD_STAGES], (head // HEAD_STAGES) % 2)
        lane = T.call_extern("int32", "flash_qla::opaque", T.get_thread_binding() % 32)
        finish_rows(m, w, head, scale, dbeta, dg, lane)
        T.sync_warp()
        if head + HEAD_STAGES < w.group:
            lane = T.call_extern("int32", "flash_qla::opaque", T.get_thread_binding() % 32)
            load_row_factors(m, b, w, head + HEAD_STAGES, g_cumsum, beta, lane)


@T.macro
def store_role(spec: Spec, m: Smem, b: Barriers, w: Work, dv):
    v_slices = len(spec.v_slices)
    for i in T.serial(w.group * v_slices):
        v_head = w.first_v_head + i // v_slices
        col = i % v_slices * C
        T.barrier_wait(b.dv_ready, i % 2)
        if w.count == C:
            T.copy(m.scratch, dv[w.batch, w.left : w.left + C, v_head, col : col + C])
        else:
            rows.store_rows(dv, m.scratch, w.batch, w.left, v_head, col, w.count, C)
        pipeline.arrive(b.dv_free, 0)


def offset_below(diagonal, i, j):
    """Expression i - j, plus what `diagonal` adds, as the sum of a register number and one value per thread.

    The compiler then compares with constants; i >= j itself would cost it a register for every column.
    """
    return diagonal + (i % 16) // 8 * 8 - (j // 8 * 8 + j % 2)


@T.macro
def begin_gating(stage, diagonal: T.Ref, gate_stage: T.Ref):
    """Sets what `decay` takes: row minus column of this thread's first accumulator element, and the stage.

    Opaque, lest the compiler keep one use's masks and differences of gates (32 registers each) for the next.
    """
    tx = T.get_thread_binding() % 128
    diagonal = T.call_extern("int32", "flash_qla::opaque", tx // 32 * 16 + tx % 32 // 4 - tx % 4 * 2)
    gate_stage = T.call_extern("int32", "flash_qla::opaque", stage)


def decay(m: Smem, stage, diagonal, i, j):
    """Expression D_ij: exp(g_i - g_j) on and below the diagonal, 0 above, where the exponent may overflow."""
    bound = T.Select(offset_below(diagonal, i, j) >= 0, T.float32(3.0e38), T.float32(-1.0e4))
    return T.exp2(T.min(m.factors[stage, G, i] - m.factors[stage, G, j], bound))


@T.macro
def scale_rows(m: Smem, stage, factor, tile):
    """tile[i, :] *= a row factor."""
    for i, j in T.Parallel(C, C):
        tile[i, j] *= m.factors[stage, factor, i]


@T.macro
def residual(m: Smem, stage, V, U, R):
    """R = V - Γ U."""
    for i, j in T.Parallel(C, C):
        R[i, j] = T.cast(V[i, j], "float32") - m.factors[stage, GAMMA, i] * T.cast(U[i, j], "float32")


@T.macro
def add_row_sums(a, b, product, sums, clear=False):
    """sums[i] += Σ_j a[i, j] b[i, j] (= with clear); product is overwritten."""
    for i, j in T.Parallel(C, C):
        product[i, j] = a[i, j] * T.cast(b[i, j], "float32")
    T.reduce_sum(product, sums, dim=1, clear=clear)


@T.macro
def add_to_sums(m: Smem, stage, kind, h, row_sum):
    """m.sums[stage, kind, :] += row_sum, from zero for the first slice of V."""
    if h == 0:
        for i in T.Parallel(C):
            m.sums[stage, kind, i] = row_sum[i]
    else:
        for i in T.Parallel(C):
            m.sums[stage, kind, i] += row_sum[i]


@T.macro
def add_product(a, b, total: T.Ref, dtype):
    """total += the warpgroup's share, different in each thread, of Σ_ij a[i, j] b[i, j]."""
    tx = T.alloc_var("int32")
    tx = T.call_extern("int32", "flash_qla::opaque", T.get_thread_binding() % 128)
    a_local = T.alloc_local((8,), dtype)
    b_local = T.alloc_local((8,), dtype)
    for block in T.unroll(C * C // (128 * 8), unroll_factor=1):
        for e in T.vectorized(8):
            a_local[e] = a[block * 16 + tx // 8, tx % 8 * 8 + e]
        for e in T.vectorized(8):
            b_local[e] = b[block * 16 + tx // 8, tx % 8 * 8 + e]
        for e in T.unroll(8):
            total += T.cast(a_local[e], "float32") * T.cast(b_local[e], "float32")


@T.macro
def store_warp_sum(m: Smem, stage, value: T.Ref):
    """m.sums[stage, STATE_DOT, warp] = Σ of the warp's values."""
    for shift in (1, 2, 4, 8, 16):
        value += T.shfl_xor(value, shift)
    if T.get_thread_binding() % 32 == 0:
        m.sums[stage, STATE_DOT, T.get_thread_binding() // 32 % 4] = value


@T.macro
def store_column_sums(tile, target, stage, first, folded, by_warp):
    """target[stage, first + warp, j] = Σ over the warp's 16 rows of tile[:, j]; the reader adds the four warps."""
    for wp, r, j in T.Parallel(4, 8, C):
        folded[wp, r, j] = tile[wp * 16 + r, j]
    for wp, r, j in T.Parallel(4, 8, C):
        folded[wp, r, j] += tile[wp * 16 + 8 + r, j]
    T.reduce_sum(folded, by_warp, dim=1)
    for wp, j in T.Parallel(4, C):
        target[stage, first + wp, j] = by_warp[wp, j]


@T.macro
def chain_role(spec: Spec, m: Smem, b: Barriers, w: Work):
    v_slices = len(spec.v_slices)
    V_frag = T.alloc_fragment((C, C), spec.dtype)
    U = T.alloc_fragment((C, C), spec.dtype)
    dVd = T.alloc_fragment((C, C), "float32")
    Y = T.alloc_fragment((C, C), "float32")
    row_sum = T.alloc_fragment((C,), "float32")
    T.barrier_wait(b.qk_ready, 0)
    for head in T.serial(w.group):
        stage = head % HEAD_STAGES
        phase = (head // HEAD_STAGES) % 2
        T.barrier_wait(b.rows_ready[stage], phase)
        for h in spec.v_slices:
            step = head * v_slices + h
            T.barrier_wait(b.slice_ready[h], head % 2)
            for c in spec.k_slices:
                T.wgmma_gemm(m.k[c], m.S[h][c], Y, transpose_B=True, clear_accum=c == 0)
            for c in spec.k_slices:
                T.wgmma_gemm(m.k[c], m.dS[h][c], dVd, transpose_B=True, clear_accum=c == 0)
            T.copy(m.v[h], V_frag)
            T.wait_wgmma(len(spec.k_slices))
            T.copy(Y, U)
            residual(m, stage, V_frag, Y, Y)
            scale_rows(m, stage, BETA, Y)
            T.barrier_wait(b.dv_free, (step + 1) % 2)
            T.copy(Y, m.scratch)
            if h == 0:
                T.barrier_wait(b.t_ready[stage], phase)
            T.wgmma_gemm(m.t[stage, :, :], m.scratch, Y, clear_accum=True)  # Vd
            T.wait_wgmma(1)
            scale_rows(m, stage, DECAY, dVd)
            if h == 0:
                T.barrier_wait(b.p_ready, head % 2)
            T.barrier_wait(b.do_ready[step % DO_STAGES], (step // DO_STAGES) % 2)
            T.barrier_wait(b.vd_free[h], (head + 1) % 2)
            T.wait_wgmma(0)
            T.copy(Y, m.vd[h])
            pipeline.publish(b.vd_ready, h)
            add_row_sums(Y, dVd, Y, row_sum, True)
            add_to_sums(m, stage, END, h, row_sum)
            T.wgmma_gemm(m.p, m.do[step % DO_STAGES, :, :], dVd, transpose_A=True)
            T.wait_wgmma(0)
            pipeline.arrive(b.do_free, step % DO_STAGES)
            if h == v_slices - 1:
                pipeline.arrive(b.p_free, 0)
            T.copy(dVd, m.scratch)
            T.wgmma_gemm(m.t[stage, :, :], m.scratch, Y, transpose_A=True, clear_accum=True)  # X
            T.copy(m.v[h], V_frag)
            T.wait_wgmma(0)
            if h == v_slices - 1:
                pipeline.arrive(b.t_free, stage)
            T.barrier_wait(b.x_free[h], (head + 1) % 2)
            T.copy(Y, m.x[h])
            pipeline.publish(b.x_ready, h)
            add_row_sums(Y, U, dVd, row_sum, True)
            add_to_sums(m, stage, READ_U, h, row_sum)
            residual(m, stage, V_frag, U, dVd)
            add_row_sums(Y, dVd, dVd, row_sum, True)
            add_to_sums(m, stage, BETA_ROW, h, row_sum)
            scale_rows(m, stage, BETA, Y)
            T.copy(Y, m.scratch)
            pipeline.publish(b.dv_ready, 0)
            pipeline.arrive(b.slice_free, h)
        pipeline.arrive(b.sums_ready, stage)


@T.macro
def query_role(spec: Spec, m: Smem, b: Barriers, w: Work, scale, dq):
    v_slices = len(spec.v_slices)
    dQ = [T.alloc_fragment((C, C), "float32") for _ in spec.k_slices]
    Y = T.alloc_fragment((C, C), "float32")
    P = T.alloc_fragment((C, C), spec.dtype)
    dP_op = T.alloc_fragment((C, C), spec.dtype)
    state_dot = T.alloc_var("float32")
    diagonal = T.alloc_var("int32")
    gate_stage = T.alloc_var("int32")
    q_dot = T.alloc_fragment((C,), "float32")
    p_dot = T.alloc_fragment((C,), "float32")
    folded = T.alloc_fragment((4, 8, C), "float32")
    by_warp = T.alloc_fragment((4, C), "float32")
    for c in spec.k_slices:
        T.fill(dQ[c], 0.0)
    T.barrier_wait(b.qk_ready, 0)
    for head in T.serial(w.group):
        stage = head % HEAD_STAGES
        T.fill(q_dot, 0.0)
        T.fill(p_dot, 0.0)
        state_dot = 0.0
        for c in spec.k_slices:
            T.wgmma_gemm(m.q[c], m.k[c], Y, transpose_B=True, clear_accum=c == 0)
        T.barrier_wait(b.rows_ready[stage], (head // HEAD_STAGES) % 2)
        begin_gating(stage, diagonal, gate_stage)
        T.wait_wgmma(0)
        for i, j in T.Parallel(C, C):
            Y[i, j] *= scale * decay(m, gate_stage, diagonal, i, j)
        T.barrier_wait(b.p_free, (head + 1) % 2)
        T.copy(Y, m.p)
        pipeline.publish(b.p_ready, 0)
        for h in spec.v_slices:
            step = head * v_slices + h
            T.barrier_wait(b.slice_ready[h], head % 2)
            T.barrier_wait(b.do_ready[step % DO_STAGES], (step // DO_STAGES) % 2)
            for c in spec.k_slices:
                T.wgmma_gemm(m.do[step % DO_STAGES, :, :], m.S[h][c], Y, clear_accum=True)
                T.copy(m.q[c], P)
                T.wait_wgmma(0)
                for i, j in T.Parallel(C, C):
                    dQ[c][i, j] += Y[i, j] * (scale * m.factors[stage, GAMMA, i])
                add_row_sums(Y, P, Y, q_dot)
                add_product(m.S[h][c], m.dS[h][c], state_dot, spec.dtype)
            pipeline.arrive(b.slice_free, h)
        for i in T.Parallel(C):
            m.sums[stage, READ_STATE, i] = q_dot[i]
        store_warp_sum(m, stage, state_dot)
        for h in spec.v_slices:
            T.barrier_wait(b.vd_ready[h], head % 2)
            T.wgmma_gemm(
                m.do[(head * v_slices + h) % DO_STAGES, :, :], m.vd[h], Y, transpose_B=True, clear_accum=h == 0
            )
        T.wait_wgmma(0)
        for h in spec.v_slices:
            pipeline.arrive(b.vd_free, h)
            pipeline.arrive(b.do_free, (head * v_slices + h) % DO_STAGES)
        begin_gating(stage, diagonal, gate_stage)
        for i, j in T.Parallel(C, C):
            dP_op[i, j] = Y[i, j] * (scale * decay(m, gate_stage, diagonal, i, j))
        T.barrier_wait(b.dp_free, (head + 1) % 2)
        T.copy(dP_op, m.dp)
        pipeline.publish(b.dp_ready, 0)
        for c in spec.k_slices:
            T.wgmma_gemm(m.dp, m.k[c], dQ[c])
        T.copy(m.p, P)
        for i, j in T.Parallel(C, C):
            Y[i, j] *= T.Select(offset_below(diagonal, i, j) > 0, T.cast(P[i, j], "float32"), T.float32(0.0))
        T.reduce_sum(Y, p_dot, dim=1)
        for i in T.Parallel(C):
            m.sums[stage, QUERY_PAIR, i] = p_dot[i]
        store_column_sums(Y, m.columns, stage, 0, folded, by_warp)
        pipeline.arrive(b.sums_ready, stage)
        T.wait_wgmma(0)
    T.barrier_wait(b.p_free, (w.group + 1) % 2)
    for c in spec.k_slices:
        store_result(dq, dQ[c], m.p, w, c * C)


@T.macro
def store_result(target, result, tile, w: Work, col):
    T.copy(result, tile)
    if w.count == C:
        T.copy(tile, target[w.batch, w.left : w.left + C, w.k_head, col : col + C])
    else:
        rows.store_rows(target, tile, w.batch, w.left, w.k_head, col, w.count, C)


@T.macro
def key_role(spec: Spec, m: Smem, b: Barriers, w: Work, dk):
    dK = [T.alloc_fragment((C, C), "float32") for _ in spec.k_slices]
    sum_dM = T.alloc_fragment((C, C), "float32")
    Y = T.alloc_fragment((C, C), "float32")
    Vd_op = T.alloc_fragment((C, C), spec.dtype)
    X_op = T.alloc_fragment((C, C), spec.dtype)
    M_t = T.alloc_fragment((C, C), spec.dtype)
    m_dot = T.alloc_fragment((C,), "float32")
    diagonal = T.alloc_var("int32")
    gate_stage = T.alloc_var("int32")
    folded = T.alloc_fragment((4, 8, C), "float32")
    by_warp = T.alloc_fragment((4, C), "float32")
    T.annotate_layout({M_t: layouts.transposed_accumulator(C)})
    T.fill(sum_dM, 0.0)
    for c in spec.k_slices:
        T.fill(dK[c], 0.0)
    T.barrier_wait(b.qk_ready, 0)
    for c in spec.k_slices:
        T.wgmma_gemm(m.k[c], m.k[c], Y, transpose_B=True, clear_accum=c == 0)
    T.wait_wgmma(0)
    T.copy(Y, m.kk)
    for head in T.serial(w.group):
        stage = head % HEAD_STAGES
        T.barrier_wait(b.rows_ready[stage], (head // HEAD_STAGES) % 2)
        for h in spec.v_slices:
            T.barrier_wait(b.slice_ready[h], head % 2)
            T.barrier_wait(b.vd_ready[h], head % 2)
            T.copy(m.vd[h], Vd_op)
            for i, j in T.Parallel(C, C):
                Vd_op[i, j] = T.cast(Vd_op[i, j], "float32") * m.factors[stage, DECAY, i]
            for c in spec.k_slices:
                T.wgmma_gemm(Vd_op, m.dS[h][c], dK[c])
            T.barrier_wait(b.x_ready[h], head % 2)
            T.copy(m.x[h], X_op)
            for i, j in T.Parallel(C, C):
                X_op[i, j] = T.cast(X_op[i, j], "float32") * (-m.factors[stage, GAMMA, i] * m.factors[stage, BETA, i])
            for c in spec.k_slices:
                T.wgmma_gemm(X_op, m.S[h][c], dK[c])
            T.wait_wgmma(0)
            pipeline.arrive(b.slice_free, h)
        for h in spec.v_slices:
            T.wgmma_gemm(m.x[h], m.vd[h], Y, transpose_B=True, clear_accum=h == 0)
        T.barrier_wait(b.dp_ready, head % 2)
        for c in spec.k_slices:
            T.wgmma_gemm(m.dp, m.q[c], dK[c], transpose_A=True)
        T.wait_wgmma(len(spec.k_slices))
        for h in spec.v_slices:
            pipeline.arrive(b.vd_free, h)
            pipeline.arrive(b.x_free, h)
        begin_gating(stage, diagonal, gate_stage)
        for i, j in T.Parallel(C, C):
            Y[i, j] *= T.Select(offset_below(diagonal, i, j) > 0, -decay(m, stage, diagonal, i, j), T.float32(0.0))
        for i, j in T.Parallel(C, C):
            sum_dM[i, j] += Y[i, j] * m.factors[stage, BETA, i]
        T.copy(m.kk, X_op)
        for i, j in T.Parallel(C, C):
            Y[i, j] *= T.cast(X_op[i, j], "float32")
        T.reduce_sum(Y, m_dot, dim=1)
        for i in T.Parallel(C):
            m.sums[stage, KEY_PAIR, i] = m_dot[i]
        for i, j in T.Parallel(C, C):
            Y[i, j] *= m.factors[stage, BETA, i]
        store_column_sums(Y, m.columns, stage, 4, folded, by_warp)
        pipeline.arrive(b.sums_ready, stage)
        T.wait_wgmma(0)
        pipeline.arrive(b.dp_free, 0)
    T.copy(sum_dM, m.kk)
    T.copy(m.kk, M_t)
    for i, j in T.Parallel(C, C):
        X_op[i, j] = sum_dM[i, j] + T.cast(M_t[j, i], "float32")
    for c in spec.k_slices:
        T.wgmma_gemm(X_op, m.k[c], dK[c])
    T.wait_wgmma(0)
    for c in spec.k_slices:
        store_result(dk, dK[c], m.kk, w, c * C)


def allocate(spec: Spec) -> tuple[Smem, Barriers]:
    """Allocates a CTA's shared memory, annotates its swizzles and makes the barriers."""
    warps, v_slices = pipeline.WARPS_PER_WARPGROUP, len(spec.v_slices)

    def tile(*ring):
        return T.alloc_shared((*ring, C, C), spec.dtype)

    def row(*kinds):
        return T.alloc_shared((HEAD_STAGES, *kinds, C), "float32")

    m = Smem(
        q=[tile() for _ in spec.k_slices],
        k=[tile() for _ in spec.k_slices],
        S=[[tile() for _ in spec.k_slices] for _ in spec.v_slices],
        dS=[[tile() for _ in spec.k_slices] for _ in spec.v_slices],
        v=[tile() for _ in spec.v_slices],
        do=tile(DO_STAGES),
        t=tile(HEAD_STAGES),
        p=tile(),
        scratch=tile(),
        vd=[tile() for _ in spec.v_slices],
        x=[tile() for _ in spec.v_slices],
        dp=tile(),
        kk=tile(),
        factors=row(4),
        sums=row(7),
        columns=row(8),  # the 4 warps of query, then those of key
    )
    b = Barriers(
        qk_ready=T.alloc_barrier(1),
        slice_ready=T.alloc_barrier([1] * v_slices),
        slice_free=T.alloc_barrier([3 * warps] * v_slices),
        do_ready=T.alloc_barrier([1] * DO_STAGES),
        do_free=T.alloc_barrier([2 * warps] * DO_STAGES),
        t_ready=T.alloc_barrier([1] * HEAD_STAGES),
        t_free=T.alloc_barrier([warps] * HEAD_STAGES),
        rows_ready=T.alloc_barrier([1] * HEAD_STAGES),
        sums_ready=T.alloc_barrier([3 * warps] * HEAD_STAGES),
        p_ready=T.alloc_barrier(warps),
        p_free=T.alloc_barrier(warps),
        vd_ready=T.alloc_barrier([warps] * v_slices),
        vd_free=T.alloc_barrier([2 * warps] * v_slices),
        x_ready=T.alloc_barrier([warps] * v_slices),
        x_free=T.alloc_barrier([warps] * v_slices),
        dv_ready=T.alloc_barrier(warps),
        dv_free=T.alloc_barrier(1),
        dp_ready=T.alloc_barrier(warps),
        dp_free=T.alloc_barrier(warps),
        cleaned=T.alloc_barrier(1),
    )
    lists = (m.q, m.k, *m.S, *m.dS, m.v, m.vd, m.x)
    T.annotate_layout(layouts.swizzled(*(t for group in lists for t in group), m.do, m.t, m.p, m.scratch, m.dp, m.kk))
    return m, b


@T.macro
def zero_rows_after(spec: Spec, w: Work, first, step, last, dq, dk, dv, dbeta, dg):
    """Zeros of a packed tensor's rows first, first + step, … below last, for the CTA's heads."""
    row = T.alloc_var("int32")
    row = first
    while row < last:
        for d in T.Parallel(spec.head_dim_k):
            dq[0, row, w.k_head, d] = 0
            dk[0, row, w.k_head, d] = 0
        for head in T.serial(w.group):
            for d in T.Parallel(spec.head_dim_v):
                dv[0, row, w.first_v_head + head, d] = 0
            if T.get_thread_binding() == 0:
                dbeta[0, row, w.first_v_head + head] = 0.0
                dg[0, row, w.first_v_head + head] = 0.0
        row = row + step


def make(spec: Spec):
    """Returns the prim_func of a specification."""
    K, V = spec.head_dim_k, spec.head_dim_v
    registers = REGISTERS[K]
    batch, num_tokens, num_k_heads, num_v_heads = T.dynamic("batch num_tokens num_k_heads num_v_heads")
    num_slots, cu_len = T.dynamic("num_slots cu_len")

    def strided(name, heads, dim, dtype):
        return program.strided_rows(name, (batch, num_tokens, heads, dim), dtype)

    beta_type = program.strided_gates("beta", (batch, num_tokens, num_v_heads), spec.beta_dtype)

    @T.prim_func
    def gradients(
        q: strided("q", num_k_heads, K, spec.dtype),
        k: strided("k", num_k_heads, K, spec.dtype),
        v: strided("v", num_v_heads, V, spec.dtype),
        T_inv: T.Tensor((batch, num_tokens, num_v_heads, C), spec.dtype),
        g_cumsum: T.Tensor((batch, num_tokens, num_v_heads), "float32"),
        beta: beta_type,
        do: strided("do", num_v_heads, V, spec.dtype),
        S: T.Tensor((num_slots, num_v_heads, V, K), spec.dtype),
        dS: T.Tensor((num_slots, num_v_heads, V, K), spec.dtype),
        cu: T.Tensor((cu_len,), "int32"),
        dq: T.Tensor((batch, num_tokens, num_k_heads, K), spec.dtype),
        dk: T.Tensor((batch, num_tokens, num_k_heads, K), spec.dtype),
        dv: T.Tensor((batch, num_tokens, num_v_heads, V), spec.dtype),
        dbeta: T.Tensor((batch, num_tokens, num_v_heads), "float32"),
        dg: T.Tensor((batch, num_tokens, num_v_heads), "float32"),
        scale: T.float32,
        group: T.int32,
        num_seqs: T.int32,
        cu_step: T.int32,
        seq_len: T.int32,
    ):
        with T.Kernel(num_slots * num_k_heads, threads=512) as (block,):
            T.import_source(SOURCE)
            m, b = allocate(spec)
            n = T.alloc_var("int32")
            chunk = T.alloc_var("int32")
            seq_batch = T.alloc_var("int32")
            start = T.alloc_var("int32")
            length = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            left = T.alloc_var("int32")
            count = T.alloc_var("int32")
            k_head = T.alloc_var("int32")
            first_v_head = T.alloc_var("int32")
            tail = T.alloc_var("int32")
            flat_tokens = batch * num_tokens
            slot = T.truncdiv(block, num_k_heads)
            k_head = block - slot * num_k_heads
            first_v_head = k_head * group
            program.sequence_of_slot(cu, cu_step, seq_len, flat_tokens, num_seqs, C, slot, n, chunk)
            program.locate_sequence(cu, cu_step, seq_len, flat_tokens, n, seq_batch, start, length)
            left = start + chunk * C
            count = T.min(length - chunk * C, C)
            w = Work(seq_batch, left, count, k_head, first_v_head, group)
            tail = program.offset(cu, cu_step, seq_len, flat_tokens, num_seqs) + slot
            zero_rows_after(spec, w, tail, num_slots, flat_tokens, dq, dk, dv, dbeta, dg)
            tx = T.get_thread_binding()
            if count > 0:
                if tx < 128:
                    T.set_max_nreg(registers["load"], 0)
                    if tx < 32:
                        load_role(spec, m, b, w, slot, q, k, v, T_inv, do, S, dS)
                    elif tx < 64:
                        row_role(m, b, w, scale, g_cumsum, beta, dbeta, dg)
                    elif tx < 96:
                        store_role(spec, m, b, w, dv)
                elif tx < 256:
                    T.set_max_nreg(registers["chain"], 1)
                    chain_role(spec, m, b, w)
                elif tx < 384:
                    T.set_max_nreg(registers["query"], 1)
                    query_role(spec, m, b, w, scale, dq)
                else:
                    T.set_max_nreg(registers["key"], 1)
                    key_role(spec, m, b, w, dk)

    return gradients


def specs(dtype, beta_dtype, head_dim_k, head_dim_v) -> list[Spec]:
    """Every variant that a configuration can ask for."""
    return [Spec(dtype, beta_dtype, head_dim_k, head_dim_v)]


def gradients(dq, dk, dv, dbeta, dg, q, k, v, T_inv, g_cumsum, beta, do, scale, S, dS, seqs):
    """Launches the chunks. Equations: B1 to B11.

    Args:
        dq, dk: `[B, T, Hq, K]` contiguous destinations in q's dtype, summed over each key head's value heads.
        dv: `[B, T, Hv, V]` contiguous destination in q's dtype.
        dbeta, dg: `[B, T, Hv]` contiguous fp32 destinations; dg is the gradient of the raw gate.
        q, k, v, do: `[B, T, H, D]`, TMA-ready (`launch.tma_ready`), native head sizes.
        T_inv: `[B, T, Hv, C]` contiguous, the gated inverse without beta.
        g_cumsum: `[B, T, Hv]` fp32 contiguous, natural log.
        beta: `[B, T, Hv]` fp32, bf16 or fp16, any strides.
        scale: factor of q.
        S, dS: `[slots, Hv, V, K]` contiguous in q's dtype: the state entering each chunk, and the cotangent of the one
            leaving it, numbered as `Sequences` numbers chunk slots.
        seqs: the sequences.

    Rows of no sequence become zero in all five.
    """
    device, names = v.device, launch.DTYPE_NAMES
    spec = Spec(names[q.dtype], names[beta.dtype], q.shape[3], v.shape[3])
    cu, cu_step, seq_len = launch.cu_arguments(seqs, device)
    kernel = build(make, spec, archs.of_device(device), PASS_CONFIGS)
    kernel(
        q, k, v, T_inv, g_cumsum, beta, do, S, dS, cu, dq, dk, dv, dbeta, dg,
        scale, v.shape[2] // q.shape[2], seqs.num_seqs, cu_step, seq_len,
    )  # fmt: skip

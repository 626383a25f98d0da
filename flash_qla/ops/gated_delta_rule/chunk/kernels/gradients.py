"""Gradients of one chunk (Hopper): dq, dk, dv, dβ, dg from the states on both sides. Equations B1 to B11.

An item is one (chunk, key head); a CTA takes every `ctas`-th item and walks its value heads, V in slices of 64 columns:

    U = K S                  W = β V − β Γ U          Vd = T W
    dVd = Pᵀ dO + e (K dS)   X = Tᵀ dVd               dv = β X
    dPg = s D ∘ (dO Vdᵀ)     βdM = −β D ∘ (X Vdᵀ)     P = D ∘ s Q Kᵀ
    dQ += s Γ (dO Sᵀ) + dPg K
    dK += (−Γ β X) Sᵀ + (e Vd) dSᵀ + dPgᵀ Q + (βdM + βdMᵀ) K

No atomics, no partial sums in memory. D (0 above the diagonal), s Q Kᵀ and K Kᵀ are tiles of 16 bits, so gating is a
packed product; row sums of products are diagonals on the tensor cores (tiles/dots.py).

dg needs row products of each value head alone (all from the operands that the products see, see design.md §3):
    k·dK_read  = −β Γ X·U + rowsum(βdM ∘ K Kᵀ)       k·dK_write = colsum(P ∘ dO Vdᵀ) + colsum(βdM ∘ K Kᵀ) + x
    q·dQ       = s Γ q·(dO Sᵀ) + rowsum(P ∘ dO Vdᵀ)  x = e Vd·(K dS)        P's diagonal left out, x_last := 0
    dβ = X·V − Γ X·U + rowsum(dM ∘ K Kᵀ)             P ∘ dO Vdᵀ = dPg ∘ Q Kᵀ

Roles:
    role      threads   registers   computes (K = V = 128)
    load      warp 0    40          TMA; finds and announces the items; zeroes the rows past a sequence's end
    row       warp 1    40          row factors of each value head; dg and dβ out of the roles' row sums
    store     warp 2    40          dv, dq, dk
    chain     128       168         U, W, Vd, K dS, dVd, X, dv
    query     128       144         s Q Kᵀ, dO Sᵀ, dO Vdᵀ, dPg, <S, dS>, dq
    key       128       160         K Kᵀ, D, X Vdᵀ, βdM, (Γ β X) Sᵀ, (e Vd) dSᵀ, dPgᵀ Q, dk

Barriers (arrivals count warps; "h" is a V slice, one slot for each; rings of heads go on from item to item):
    name          signalled by       waited by           guards
    item_known    load               row, store          the item's description (ring of 4)
    qk_ready      load (TMA)         chain, query, key   q, k, the item's description
    qk_free       chain, query, key  load                q, k
    qk_made       query              chain               s Q Kᵀ
    slice_ready   load (TMA)         chain, query, key   S[h], dS[h], v[h]
    slice_free    query, key, store  load                the same (chain's reads end before dv_ready)
    do_ready      load (TMA)         chain, query        dO[h]
    do_free       chain, query       load                the same
    t_ready       load (TMA)         chain               T (ring of 2 heads)
    t_free        chain              load                the same
    rows_ready    row                query, key          row factors (ring of 3 heads, rewritten after sums_ready)
    sums_ready    chain, query, key  row                 row sums (ring of 2 heads)
    sums_free     row                chain, query, key   the same
    d_ready       key                chain, query        D (ring of 2 heads, rewritten after vd_ready and dp_ready);
                                                         for chain also the row factors, which D was made of
    vd_ready      chain              query, key          Vd[h], X[h]
    vd_free       query, key         chain               the same, where dVd and W stand before
    dv_ready      chain              store               v[h], now dv
    dp_ready      query              key                 dPg
    dp_free       query, key         query               dPg (query reads it too, for its column sums)
    dq_ready      query              store               dPg and s Q Kᵀ, now dq
    dq_free       store              query               the same
    dk_ready      key                store               D, now dk
    dk_free       store              key                 the same
    cleaned       load (TMA)         load                tiles whose rows past the end it zeroes
Inside a role a named barrier stands before a tile that its other warps may still read is rewritten (Vd, X; D, βdM) and
after one that its products or other warps read is written (W, dVd; dPg, βdM).

Shared memory, K = V = 128 (tiles of 64 × 64, 8 KB): q 2, k 2, S and dS 8, v 2, dO 2, T 2, D 2, s Q Kᵀ 1, K Kᵀ 1, Vd 2,
X 2, dPg 1: 27 tiles, 216 KB; row factors 3.75, row sums 4.5, descriptions 0.1 KB: with the barriers 227, all there is.
Grid: x = one CTA per multiprocessor; items in the order (chunk slot, key head), the key head innermost.

Longer than 600 lines: six roles hand over to each other inside one CTA, and their macros read only side by side.
"""

from dataclasses import dataclass

import tilelang.language as T

from flash_qla import arch as archs

from . import gradient_rows as rows
from . import launch
from .build import build
from .tiles import dots, fragments, layouts, pipeline, program
from .tiles.items import ITEM_STAGES, Items, Work, get_info, next_item, put_info

C = 64
CHAIN_BARRIER, QUERY_BARRIER, KEY_BARRIER = 13, 14, 15  # named barriers inside a role
# By head_dim_k, head_dim_v; what four warpgroups get must not exceed 512 together.
REGISTERS = {
    (64, 64): {"load": 56, "chain": 184, "query": 128, "key": 144},
    (64, 128): {"load": 56, "chain": 184, "query": 128, "key": 144},
    (128, 64): {"load": 40, "chain": 168, "query": 144, "key": 160},
    (128, 128): {"load": 40, "chain": 168, "query": 144, "key": 160},
}
KNOWN_SPILL_BYTES = 64  # K = 128, V = 64: the other variants spill nothing
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_loop_unswitching": True,
    "tl.enable_fast_math": True,
    "tl.disable_safe_memory_legalize": True,  # indices are in bounds by construction (tiles/program.py clamps)
    "tl.disable_buffer_init_check": True,  # it does not see the writes of `fragments`
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
    """Tiles, row factors and row sums of a CTA; all but q and k are rings (leading index)."""

    q: object
    k: object
    S: object
    v: object
    do: object
    t: object
    d: object
    qk: object
    kk: object
    vd: object
    x: object
    dp: object
    factors: object
    sums: object
    info: object


@dataclass
class Barriers:
    qk_ready: object
    qk_free: object
    item_known: object
    slice_ready: object
    slice_free: object
    do_ready: object
    do_free: object
    t_ready: object
    t_free: object
    rows_ready: object
    sums_ready: object
    sums_free: object
    qk_made: object
    d_ready: object
    vd_ready: object
    vd_free: object
    dv_ready: object
    dq_ready: object
    dq_free: object
    dk_ready: object
    dk_free: object
    dp_ready: object
    dp_free: object
    cleaned: object


SOURCE = fragments.LEAN_SOURCE + fragments.STORE_SOURCE + fragments.READ_SOURCE


def load_tile(source, tile, w: Work, head, col, barrier):
    return T.tma_copy(source[w.batch, w.left : w.left + C, head, col : col + C], tile, barrier=barrier)


@T.macro
def load_chunk(spec: Spec, m: Smem, b: Barriers, w: Work, q, k, cleanings: T.Ref):
    """q and k of the chunk."""
    if w.count == C:
        for c in spec.k_slices:
            load_tile(k, m.k[:, c * C : c * C + C], w, w.k_head, c * C, b.qk_ready)
            load_tile(q, m.q[:, c * C : c * C + C], w, w.k_head, c * C, b.qk_ready)
    else:
        for c in spec.k_slices:
            load_tile(k, m.k[:, c * C : c * C + C], w, w.k_head, c * C, b.cleaned)
            load_tile(q, m.q[:, c * C : c * C + C], w, w.k_head, c * C, b.cleaned)
        if T.shuffle_elect(32):
            T.barrier_arrive(b.cleaned)
        T.barrier_wait(b.cleaned, cleanings & 1)
        cleanings += 1
        dots.zero_rows(dots.at(m.k), w.count, spec.head_dim_k)
        dots.zero_rows(dots.at(m.q), w.count, spec.head_dim_k)
        T.fence_proxy_async()
        T.sync_warp()
    if T.shuffle_elect(32):
        T.barrier_arrive(b.qk_ready)


@T.macro
def load_slice(spec: Spec, m: Smem, b: Barriers, w: Work, slot, n, h, v_head, v, T_inv, do, S, dS, cleanings: T.Ref):
    """Slice h of V of one value head, the n-th of the CTA; T with the first slice."""
    stage = n % rows.HEAD_STAGES
    row = h * C
    T.barrier_wait(b.slice_free[h], (n + 1) % 2)
    for c in spec.k_slices:
        col = c * C
        T.tma_copy(S[slot, v_head, row : row + C, col : col + C], m.S[h, 0:C, col : col + C], barrier=b.slice_ready[h])
        T.tma_copy(
            dS[slot, v_head, row : row + C, col : col + C], m.S[h, C : 2 * C, col : col + C], barrier=b.slice_ready[h]
        )
    if w.count == C:
        load_tile(v, m.v[h, :, :], w, v_head, row, b.slice_ready[h])
        if T.shuffle_elect(32):
            T.barrier_arrive(b.slice_ready[h])
    if h == 0:
        T.barrier_wait(b.t_free[stage], (n // rows.HEAD_STAGES + 1) % 2)
        if w.count == C:
            load_tile(T_inv, m.t[stage, :, :], w, v_head, 0, b.t_ready[stage])
            if T.shuffle_elect(32):
                T.barrier_arrive(b.t_ready[stage])
    T.barrier_wait(b.do_free[h], (n + 1) % 2)
    if w.count == C:
        load_tile(do, m.do[h, :, :], w, v_head, row, b.do_ready[h])
        if T.shuffle_elect(32):
            T.barrier_arrive(b.do_ready[h])
    else:
        load_tile(v, m.v[h, :, :], w, v_head, row, b.cleaned)
        load_tile(do, m.do[h, :, :], w, v_head, row, b.cleaned)
        if h == 0:
            load_tile(T_inv, m.t[stage, :, :], w, v_head, 0, b.cleaned)
        if T.shuffle_elect(32):
            T.barrier_arrive(b.cleaned)
        T.barrier_wait(b.cleaned, cleanings & 1)
        cleanings += 1
        dots.zero_rows(dots.at(m.v, h), w.count, C)
        dots.zero_rows(dots.at(m.do, h), w.count, C)
        if h == 0:
            dots.zero_rows(dots.at(m.t, stage), w.count, C)
        T.fence_proxy_async()
        T.sync_warp()
        if T.shuffle_elect(32):
            T.barrier_arrive(b.slice_ready[h])
            T.barrier_arrive(b.do_ready[h])
            if h == 0:
                T.barrier_arrive(b.t_ready[stage])


@T.macro
def load_role(spec: Spec, m: Smem, b: Barriers, a: Items, q, k, v, T_inv, do, S, dS):
    """Announces the items and runs ahead: a first head is under way before its q and k have a place."""
    item, slot, batch, left, count, k_head, cleanings, n, turn = (T.alloc_var("int32") for _ in range(9))
    w = Work(batch, left, count, k_head)
    item = a.first - a.step
    cleanings = 0
    n = 0
    turn = 0
    count = 1
    while count > 0:
        next_item(a, item, slot, batch, left, count, k_head)
        put_info(m, turn % ITEM_STAGES, batch, left, count, k_head)
        pipeline.arrive(b.item_known, turn % ITEM_STAGES)
        for head in T.serial(T.if_then_else(count > 0, a.group, 0)):
            for h in T.unroll(len(spec.v_slices), unroll_factor=1):
                load_slice(spec, m, b, w, slot, n, h, k_head * a.group + head, v, T_inv, do, S, dS, cleanings)
            if head == 0:
                T.barrier_wait(b.qk_free, (turn + 1) % 2)
                load_chunk(spec, m, b, w, q, k, cleanings)
            n += 1
        turn += 1
    T.barrier_wait(b.qk_free, turn % 2)
    if T.shuffle_elect(32):
        T.barrier_arrive(b.qk_ready)


@T.macro
def store_tile(target, ring, index, w: Work, head, col):
    """target[the item's rows, head, col:] = the valid rows of ring[index]."""
    if w.count == C:
        T.copy(ring[index, :, :], target[w.batch, w.left : w.left + C, head, col : col + C])
    else:
        for i in T.unroll(w.count, unroll_factor=1):
            for j in T.Parallel(C):
                target[w.batch, w.left + i, head, col + j] = ring[index, i, j]


@T.macro
def store_role(spec: Spec, m: Smem, b: Barriers, a: Items, dq, dk, dv):
    batch, left, count, k_head, n, turn = (T.alloc_var("int32") for _ in range(6))
    w = Work(batch, left, count, k_head)
    n = 0
    turn = 0
    count = 1
    while count > 0:
        T.barrier_wait(b.item_known[turn % ITEM_STAGES], (turn // ITEM_STAGES) % 2)
        get_info(m, turn % ITEM_STAGES, batch, left, count, k_head)
        if count > 0:
            for head in T.serial(a.group):
                for h in T.unroll(len(spec.v_slices), unroll_factor=1):
                    T.barrier_wait(b.dv_ready[h], n % 2)
                    store_tile(dv, m.v, h, w, k_head * a.group + head, h * C)
                    pipeline.arrive(b.slice_free, h)
                n += 1
            T.barrier_wait(b.dq_ready, turn % 2)
            for c in spec.k_slices:
                store_tile(dq, m.dp if c == 0 else m.qk, 0, w, k_head, c * C)
            pipeline.arrive(b.dq_free, 0)
            T.barrier_wait(b.dk_ready, turn % 2)
            for c in spec.k_slices:
                store_tile(dk, m.d, c, w, k_head, c * C)
            pipeline.arrive(b.dk_free, 0)
        turn += 1


@T.macro
def sync_role(barrier):
    """What the role's warps wrote to shared memory is there for its next products and TMA stores."""
    T.fence_proxy_async()
    T.sync_threads(barrier, 128)


@T.macro
def settle(accumulator):
    """Keeps the compiler from reading an accumulator before the wait that stands above."""
    T.warpgroup_fence_operand(accumulator, num_regs=C * int(accumulator.shape[1]) // 128)


@T.macro
def clear(sums):
    sums[0] = 0.0
    sums[1] = 0.0


@T.macro
def chain_role(spec: Spec, m: Smem, b: Barriers, a: Items):
    """Vd's chain (U, W, Vd) and X's (K dS, dVd, X) need nothing of each other: their products go in pairs."""
    v_slices = len(spec.v_slices)
    UD = T.alloc_fragment((C, 2 * C), "float32")  # U | K dS
    Y = T.alloc_fragment((C, C), "float32")  # Vd
    Z = T.alloc_fragment((C, C), "float32")  # Pᵀ dO, then X
    P_t = T.alloc_fragment((C, C), spec.dtype)
    U_op, E_op, V_op, A_op, X_op = (T.alloc_local((C * C // 128,), spec.dtype) for _ in range(5))
    x_dot, u_dot, v_dot = (T.alloc_local((2,), "float32") for _ in range(3))
    n, turn = (T.alloc_var("int32") for _ in range(2))
    n = 0
    turn = 0
    T.barrier_wait(b.qk_ready, 0)
    while m.info[turn % ITEM_STAGES, 2] > 0:
        T.barrier_wait(b.qk_made, turn % 2)
        for _head in T.serial(a.group):
            stage = n % rows.HEAD_STAGES
            slot = n % rows.FACTOR_STAGES
            phase = (n // rows.HEAD_STAGES) % 2
            clear(x_dot)
            clear(u_dot)
            clear(v_dot)
            for h in T.unroll(v_slices, unroll_factor=1):
                T.barrier_wait(b.slice_ready[h], n % 2)
                T.wgmma_gemm(m.k, m.S[h, :, :], UD, transpose_B=True, clear_accum=True)
                if h == 0:
                    T.barrier_wait(b.d_ready[stage], phase)  # and the row factors, which D was made of
                    T.barrier_wait(b.t_ready[stage], phase)
                dots.load_product_transposed(P_t, dots.at(m.d, stage), dots.at(m.qk))
                T.barrier_wait(b.do_ready[h], n % 2)
                T.wgmma_gemm(P_t, m.do[h, :, :], Z, clear_accum=True)
                fragments.load_tile_unfenced(V_op, m.v, h)
                T.barrier_wait(b.vd_free[h], (n + 1) % 2)
                T.wait_wgmma(1)
                settle(UD)
                dots.combine_rows(
                    A_op, V_op, UD, rows.factors_of(m, slot, rows.BETA), rows.factors_of(m, slot, rows.READ)
                )
                fragments.store_tile_unfenced(m.x, h, A_op)  # W
                dots.pack_right(U_op, UD)
                dots.pack_right(E_op, UD, 1)
                T.wait_wgmma(0)
                settle(Z)
                pipeline.arrive(b.do_free, h)
                dots.pack_sum(A_op, Z, UD, 1, rows.factors_of(m, slot, rows.DECAY))
                fragments.store_tile_unfenced(m.vd, h, A_op)  # dVd
                sync_role(CHAIN_BARRIER)
                T.wgmma_gemm(m.t[stage, :, :], m.x[h, :, :], Y, clear_accum=True)
                T.wgmma_gemm(m.t[stage, :, :], m.vd[h, :, :], Z, transpose_A=True, clear_accum=True)
                T.wait_wgmma(0)
                settle(Y)
                settle(Z)
                if h == v_slices - 1:
                    pipeline.arrive(b.t_free, stage)
                dots.pack(A_op, Y)
                dots.pack(X_op, Z)
                T.sync_threads(CHAIN_BARRIER, 128)  # every warp is done with W and dVd
                fragments.store_tile_unfenced(m.vd, h, A_op)
                fragments.store_tile_unfenced(m.x, h, X_op)
                pipeline.publish(b.vd_ready, h)
                dots.fragment_dots(x_dot, A_op, E_op)
                dots.fragment_dots(u_dot, X_op, U_op)
                dots.row_dots(v_dot, X_op, dots.at(m.v, h))
                dots.pack_scaled(V_op, Z, rows.factors_of(m, slot, rows.BETA))
                fragments.store_tile_unfenced(m.v, h, V_op)  # dv
                pipeline.publish(b.dv_ready, h)
            T.barrier_wait(b.sums_free[stage], (n // rows.HEAD_STAGES + 1) % 2)
            dots.store_row_dots(dots.at(m.sums, stage, rows.END), x_dot)
            dots.store_row_dots(dots.at(m.sums, stage, rows.READ_U), u_dot)
            dots.store_row_dots(dots.at(m.sums, stage, rows.READ_V), v_dot)
            pipeline.arrive(b.sums_ready, stage)
            n += 1
        pipeline.arrive(b.qk_free, 0)
        turn += 1
        T.barrier_wait(b.qk_ready, turn % 2)


@T.macro
def query_role(spec: Spec, m: Smem, b: Barriers, a: Items, scale):
    v_slices = len(spec.v_slices)
    dQ = T.alloc_fragment((C, spec.head_dim_k), "float32")
    Y = T.alloc_fragment((C, C), "float32")
    A_op = T.alloc_fragment((C, C), spec.dtype)
    D_op = T.alloc_local((C * C // 128,), spec.dtype)  # as A_op; only functions see it
    state, read_row, row, column = (T.alloc_local((2,), "float32") for _ in range(4))
    n, turn = (T.alloc_var("int32") for _ in range(2))
    n = 0
    turn = 0
    T.barrier_wait(b.qk_ready, 0)
    while m.info[turn % ITEM_STAGES, 2] > 0:
        T.fill(dQ, 0.0)
        T.wgmma_gemm(m.q, m.k, Y, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        settle(Y)
        for i, j in T.Parallel(C, C):
            A_op[i, j] = scale * Y[i, j]
        T.barrier_wait(b.dq_free, (turn + 1) % 2)
        fragments.store_tile_unfenced(m.qk, 0, A_op)
        pipeline.arrive(b.qk_made, 0)
        for _head in T.serial(a.group):
            stage = n % rows.HEAD_STAGES
            slot = n % rows.FACTOR_STAGES
            clear(state)
            clear(read_row)
            clear(row)
            clear(column)
            T.barrier_wait(b.rows_ready[slot], (n // rows.FACTOR_STAGES) % 2)
            for c in spec.k_slices:
                for h in spec.v_slices:
                    if c == 0:
                        T.barrier_wait(b.slice_ready[h], n % 2)
                        T.barrier_wait(b.do_ready[h], n % 2)
                    T.wgmma_gemm(m.do[h, :, :], m.S[h, 0:C, c * C : c * C + C], Y, clear_accum=h == 0)
                for h in T.unroll(v_slices, unroll_factor=1):
                    dots.tile_dots(state, dots.at(m.S, h, 0, c * C), dots.at(m.S, h, C, c * C))
                T.wait_wgmma(0)
                settle(Y)
                dots.add_scaled_rows(dQ, c, Y, rows.factors_of(m, slot, rows.GAMMA), scale)
                dots.accumulator_dots(read_row, Y, dots.at(m.q, 0, c * C))
            for h in spec.v_slices:
                pipeline.arrive(b.slice_free, h)
            for h in spec.v_slices:
                T.barrier_wait(b.vd_ready[h], n % 2)
                T.wgmma_gemm(m.do[h, :, :], m.vd[h, :, :], Y, transpose_B=True, clear_accum=h == 0)
                T.wait_wgmma(0)
                settle(Y)
                pipeline.arrive(b.do_free, h)
                pipeline.arrive(b.vd_free, h)
            T.barrier_wait(b.d_ready[stage], (n // rows.HEAD_STAGES) % 2)
            fragments.load_tile_unfenced(D_op, m.d, stage)
            for i, j in T.Parallel(C, C):
                A_op[i, j] = scale * Y[i, j]
            dots.multiply_tiles(A_op, D_op)
            T.barrier_wait(b.dp_free, (n + 1) % 2)
            fragments.store_tile_unfenced(m.dp, 0, A_op)
            pipeline.publish(b.dp_ready, 0)
            T.wgmma_gemm(A_op, m.k, dQ)
            T.sync_threads(QUERY_BARRIER, 128)  # dPg is whole
            dots.tile_dots(row, dots.at(m.dp), dots.at(m.qk), strict=True)
            dots.tile_dots(column, dots.at(m.dp), dots.at(m.qk), transposed=True, strict=True)
            T.barrier_wait(b.sums_free[stage], (n // rows.HEAD_STAGES + 1) % 2)
            dots.store_warp_dot(dots.at(m.sums, stage, rows.STATE_DOT), state)
            dots.store_row_dots(dots.at(m.sums, stage, rows.READ_STATE), read_row)
            dots.store_row_dots(dots.at(m.sums, stage, rows.QUERY_ROW), row)
            dots.store_row_dots(dots.at(m.sums, stage, rows.QUERY_COLUMN), column)
            pipeline.arrive(b.dp_free, 0)
            pipeline.arrive(b.sums_ready, stage)
            T.wait_wgmma(0)
            settle(dQ)
            n += 1
        pipeline.arrive(b.qk_free, 0)
        T.barrier_wait(b.dp_free, (n + 1) % 2)  # nobody reads dPg or s Q Kᵀ any more
        for c in spec.k_slices:
            dots.pack(A_op, dQ, c)
            fragments.store_tile_unfenced(m.dp if c == 0 else m.qk, 0, A_op)
        pipeline.publish(b.dq_ready, 0)
        turn += 1
        T.barrier_wait(b.qk_ready, turn % 2)


@T.macro
def make_decay(m: Smem, b: Barriers, head, D_op):
    """m.d of a head."""
    stage = head % rows.HEAD_STAGES
    slot = head % rows.FACTOR_STAGES
    T.barrier_wait(b.rows_ready[slot], (head // rows.FACTOR_STAGES) % 2)
    dots.make_decay(D_op, rows.factors_of(m, slot, rows.G))
    T.sync_threads(KEY_BARRIER, 128)  # every warp is done with what the tile held
    fragments.store_tile_unfenced(m.d, stage, D_op)
    pipeline.arrive(b.d_ready, stage)


@T.macro
def key_pairs(m: Smem, stage, slot, M_op, A_op, Y):
    """M_op = β dM + (β dM)ᵀ of one head, Y = X Vdᵀ; the pairs' share of dβ and dg. Equations: B7, B9, B10."""
    pair, column = (T.alloc_local((2,), "float32") for _ in range(2))
    clear(pair)
    clear(column)
    dots.pack_product(M_op, Y, dots.at(m.d, stage))
    dots.row_dots(pair, M_op, dots.at(m.kk))
    dots.store_row_dots(dots.at(m.sums, stage, rows.KEY_PAIR), pair)
    dots.scale_tile_rows(M_op, rows.factors_of(m, slot, rows.BETA), -1.0)
    fragments.store_tile_unfenced(m.d, stage, M_op)
    T.sync_threads(KEY_BARRIER, 128)
    fragments.load_tile_transposed(A_op, m.d, stage)
    dots.row_dots(column, A_op, dots.at(m.kk))
    dots.add_tiles(M_op, A_op)
    dots.store_row_dots(dots.at(m.sums, stage, rows.KEY_COLUMN), column)


@T.macro
def key_role(spec: Spec, m: Smem, b: Barriers, a: Items):
    v_slices = len(spec.v_slices)
    dK = T.alloc_fragment((C, spec.head_dim_k), "float32")
    Y = T.alloc_fragment((C, C), "float32")
    A_op, M_op = (T.alloc_fragment((C, C), spec.dtype) for _ in range(2))
    n, turn = (T.alloc_var("int32") for _ in range(2))
    n = 0
    turn = 0
    T.barrier_wait(b.qk_ready, 0)
    while m.info[turn % ITEM_STAGES, 2] > 0:
        T.fill(dK, 0.0)
        T.wgmma_gemm(m.k, m.k, Y, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        settle(Y)
        dots.pack(A_op, Y)
        fragments.store_tile_unfenced(m.kk, 0, A_op)
        T.barrier_wait(b.dk_free, (turn + 1) % 2)
        for head in T.serial(a.group):
            stage = n % rows.HEAD_STAGES
            slot = n % rows.FACTOR_STAGES
            for next_head in T.serial(T.Select(head == 0, 0, head + 1), T.min(head + 2, a.group)):
                make_decay(m, b, n - head + next_head, M_op)
            for h in T.unroll(v_slices, unroll_factor=1):
                T.barrier_wait(b.slice_ready[h], n % 2)
                T.barrier_wait(b.vd_ready[h], n % 2)
                fragments.load_tile_unfenced(A_op, m.vd, h)
                dots.scale_tile_rows(A_op, rows.factors_of(m, slot, rows.DECAY))
                T.wgmma_gemm(A_op, m.S[h, C : 2 * C, :], dK)
                T.wgmma_gemm(m.x[h, :, :], m.vd[h, :, :], Y, transpose_B=True, clear_accum=h == 0)
                fragments.load_tile_unfenced(M_op, m.x, h)
                dots.scale_tile_rows(M_op, rows.factors_of(m, slot, rows.READ))
                T.wgmma_gemm(M_op, m.S[h, 0:C, :], dK)
                T.wait_wgmma(0)
                settle(dK)
                settle(Y)
                pipeline.arrive(b.slice_free, h)
                pipeline.arrive(b.vd_free, h)
            T.barrier_wait(b.dp_ready, n % 2)
            T.wgmma_gemm(m.dp[0, :, :], m.q, dK, transpose_A=True)
            T.barrier_wait(b.sums_free[stage], (n // rows.HEAD_STAGES + 1) % 2)
            key_pairs(m, stage, slot, M_op, A_op, Y)
            T.wgmma_gemm(M_op, m.k, dK)
            pipeline.arrive(b.sums_ready, stage)
            T.wait_wgmma(1)
            pipeline.arrive(b.dp_free, 0)
            T.wait_wgmma(0)
            settle(dK)
            n += 1
        pipeline.arrive(b.qk_free, 0)
        T.sync_threads(KEY_BARRIER, 128)  # every warp is done with D's tiles
        for c in spec.k_slices:
            dots.pack(A_op, dK, c)
            fragments.store_tile_unfenced(m.d, c, A_op)
        pipeline.publish(b.dk_ready, 0)
        turn += 1
        T.barrier_wait(b.qk_ready, turn % 2)


def allocate(spec: Spec) -> tuple[Smem, Barriers]:
    """Allocates a CTA's shared memory, annotates its swizzles and makes the barriers."""
    warps, v_slices, K = pipeline.WARPS_PER_WARPGROUP, len(spec.v_slices), spec.head_dim_k

    def tile(*ring, rows=C, cols=C):
        return T.alloc_shared((*ring, rows, cols), spec.dtype)

    m = Smem(
        q=tile(cols=K),
        k=tile(cols=K),
        S=tile(v_slices, rows=2 * C, cols=K),  # rows 0 to C: S, then dS
        v=tile(v_slices),
        do=tile(v_slices),
        t=tile(rows.HEAD_STAGES),
        d=tile(rows.HEAD_STAGES),
        qk=tile(1),
        kk=tile(1),
        vd=tile(v_slices),
        x=tile(v_slices),
        dp=tile(1),
        factors=T.alloc_shared((rows.FACTOR_STAGES, 5, C), "float32"),
        info=T.alloc_shared((ITEM_STAGES + rows.FACTOR_STAGES, 4), "int32"),
        sums=T.alloc_shared((rows.HEAD_STAGES, 9, C), "float32"),
    )
    b = Barriers(
        qk_ready=T.alloc_barrier(1),
        qk_free=T.alloc_barrier(3 * warps),
        item_known=T.alloc_barrier([1] * ITEM_STAGES),
        slice_ready=T.alloc_barrier([1] * v_slices),
        slice_free=T.alloc_barrier([2 * warps + 1] * v_slices),
        do_ready=T.alloc_barrier([1] * v_slices),
        do_free=T.alloc_barrier([2 * warps] * v_slices),
        t_ready=T.alloc_barrier([1] * rows.HEAD_STAGES),
        t_free=T.alloc_barrier([warps] * rows.HEAD_STAGES),
        rows_ready=T.alloc_barrier([1] * rows.FACTOR_STAGES),
        sums_ready=T.alloc_barrier([3 * warps] * rows.HEAD_STAGES),
        sums_free=T.alloc_barrier([1] * rows.HEAD_STAGES),
        qk_made=T.alloc_barrier(warps),
        d_ready=T.alloc_barrier([warps] * rows.HEAD_STAGES),
        vd_ready=T.alloc_barrier([warps] * v_slices),
        vd_free=T.alloc_barrier([2 * warps] * v_slices),
        dv_ready=T.alloc_barrier([warps] * v_slices),
        dq_ready=T.alloc_barrier(warps),
        dq_free=T.alloc_barrier(1),
        dk_ready=T.alloc_barrier(warps),
        dk_free=T.alloc_barrier(1),
        dp_ready=T.alloc_barrier(warps),
        dp_free=T.alloc_barrier(2 * warps),
        cleaned=T.alloc_barrier(1),
    )
    tiles = (m.q, m.k, m.S, m.v, m.do, m.t, m.d, m.qk, m.kk, m.vd, m.x, m.dp)
    T.annotate_layout(layouts.swizzled(*tiles))
    return m, b


@T.macro
def zero_rows_after(spec: Spec, a: Items, num_slots, dq, dk, dv, dbeta, dg):
    """Zeros of a packed tensor's rows after the last sequence, spread over the items."""
    item, row, end, k_head = (T.alloc_var("int32") for _ in range(4))
    end = program.offset(a.cu, a.cu_step, a.seq_len, a.flat_tokens, a.num_seqs)
    item = T.if_then_else(end < a.flat_tokens, a.first, a.total)
    while item < a.total:
        k_head = item % a.num_k_heads
        row = end + item // a.num_k_heads
        while row < a.flat_tokens:
            for d in T.Parallel(spec.head_dim_k):
                dq[0, row, k_head, d] = 0
                dk[0, row, k_head, d] = 0
            for head in T.serial(a.group):
                for d in T.Parallel(spec.head_dim_v):
                    dv[0, row, k_head * a.group + head, d] = 0
                if T.get_thread_binding() == 0:
                    dbeta[0, row, k_head * a.group + head] = 0.0
                    dg[0, row, k_head * a.group + head] = 0.0
            row = row + num_slots
        item = item + a.step


def make(spec: Spec):
    """Returns the prim_func of a specification."""
    K, V = spec.head_dim_k, spec.head_dim_v
    registers = REGISTERS[K, V]
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
        ctas: T.int32,
    ):
        with T.Kernel(ctas, threads=512) as (block,):
            T.import_source(SOURCE + dots.source(spec.dtype))
            m, b = allocate(spec)
            flat_tokens = batch * num_tokens
            total = num_slots * num_k_heads
            a = Items(block, ctas, total, group, num_k_heads, cu, cu_step, seq_len, flat_tokens, num_seqs)
            zero_rows_after(spec, a, num_slots, dq, dk, dv, dbeta, dg)
            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(registers["load"], 0)
                if tx < 32:
                    load_role(spec, m, b, a, q, k, v, T_inv, do, S, dS)
                elif tx < 64:
                    rows.row_role(m, b, a, scale, g_cumsum, beta, dbeta, dg)
                elif tx < 96:
                    store_role(spec, m, b, a, dq, dk, dv)
            elif tx < 256:
                T.set_max_nreg(registers["chain"], 1)
                chain_role(spec, m, b, a)
            elif tx < 384:
                T.set_max_nreg(registers["query"], 1)
                query_role(spec, m, b, a, scale)
            else:
                T.set_max_nreg(registers["key"], 1)
                key_role(spec, m, b, a)

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
    kernel = build(make, spec, archs.of_device(device))
    kernel(
        q, k, v, T_inv, g_cumsum, beta, do, S, dS, cu, dq, dk, dv, dbeta, dg,
        scale, v.shape[2] // q.shape[2], seqs.num_seqs, cu_step, seq_len,
        min(S.shape[0] * q.shape[2], archs.num_sms(device)),
    )  # fmt: skip

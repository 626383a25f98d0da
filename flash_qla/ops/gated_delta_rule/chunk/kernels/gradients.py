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

Barriers and shared memory: gradient_smem.py; load and store: gradient_tma.py; row: gradient_rows.py.

Inside a role a named barrier stands before a tile that its other warps may still read is rewritten (Vd, X; D, βdM) and
after one that its products or other warps read is written (W, dVd; dPg, βdM).

Grid: x = one CTA per multiprocessor; items in the order (chunk slot, key head), the key head innermost.
"""

import tilelang.language as T

from flash_qla import arch as archs

from ..constants import CHUNK_SIZE as C
from . import gradient_smem as smem
from . import launch
from .build import BARE_PASS_CONFIGS, build
from .gradient_rows import factors_of, row_role
from .gradient_smem import Barriers, Smem, Spec, allocate
from .gradient_tma import load_role, store_role
from .tiles import dots, fragments, pipeline, prefetch, program
from .tiles.items import ITEM_STAGES, Items

CHAIN_BARRIER, QUERY_BARRIER, KEY_BARRIER = 13, 14, 15  # named barriers inside a role
# By head_dim_k; what four warpgroups get must not exceed 512 together.
REGISTERS = {
    64: {"load": 56, "chain": 184, "query": 128, "key": 144},
    128: {"load": 40, "chain": 168, "query": 144, "key": 160},
}
PASS_CONFIGS = {**BARE_PASS_CONFIGS, "tl.disable_loop_unswitching": True}
SOURCE = prefetch.SOURCE + fragments.LEAN_SOURCE + fragments.STORE_SOURCE + fragments.READ_SOURCE


@T.macro
def sync_role(barrier):
    """What the role's warps wrote to shared memory is there for its next products and TMA stores."""
    T.fence_proxy_async()
    T.sync_threads(barrier, 128)


@T.macro
def start_item(gradient, rows, cols, product):
    """gradient = 0; product = rows colsᵀ, complete."""
    T.fill(gradient, 0.0)
    T.wgmma_gemm(rows, cols, product, transpose_B=True, clear_accum=True)
    T.wait_wgmma(0)
    pipeline.settle(product)


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
            stage = n % smem.HEAD_STAGES
            slot = n % smem.FACTOR_STAGES
            phase = (n // smem.HEAD_STAGES) % 2
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
                pipeline.settle(UD)
                dots.combine_rows(A_op, V_op, UD, factors_of(m, slot, smem.BETA), factors_of(m, slot, smem.READ))
                fragments.store_tile_unfenced(m.x, h, A_op)  # W
                dots.pack_right(U_op, UD)
                dots.pack_right(E_op, UD, 1)
                T.wait_wgmma(0)
                pipeline.settle(Z)
                pipeline.arrive(b.do_free, h)
                dots.pack_sum(A_op, Z, UD, 1, factors_of(m, slot, smem.DECAY))
                fragments.store_tile_unfenced(m.vd, h, A_op)  # dVd
                sync_role(CHAIN_BARRIER)
                T.wgmma_gemm(m.t[stage, :, :], m.x[h, :, :], Y, clear_accum=True)
                T.wgmma_gemm(m.t[stage, :, :], m.vd[h, :, :], Z, transpose_A=True, clear_accum=True)
                T.wait_wgmma(0)
                pipeline.settle(Y)
                pipeline.settle(Z)
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
                dots.pack_scaled(V_op, Z, factors_of(m, slot, smem.BETA))
                fragments.store_tile_unfenced(m.v, h, V_op)  # dv
                pipeline.publish(b.dv_ready, h)
            T.barrier_wait(b.sums_free[stage], (n // smem.HEAD_STAGES + 1) % 2)
            dots.store_row_dots(dots.at(m.sums, stage, smem.END), x_dot)
            dots.store_row_dots(dots.at(m.sums, stage, smem.READ_U), u_dot)
            dots.store_row_dots(dots.at(m.sums, stage, smem.READ_V), v_dot)
            pipeline.arrive(b.sums_ready, stage)
            n += 1
        pipeline.arrive(b.qk_free, 0)
        turn += 1
        T.barrier_wait(b.qk_ready, turn % 2)


@T.macro
def query_role(spec: Spec, m: Smem, b: Barriers, a: Items, scale):
    # A loop of one trip would dissolve, and its addresses take registers all the time: 64 bytes spilled.
    v_slices = len(spec.v_slices) if len(spec.v_slices) > 1 else dots.opaque(1)
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
        start_item(dQ, m.q, m.k, Y)
        for i, j in T.Parallel(C, C):
            A_op[i, j] = scale * Y[i, j]
        T.barrier_wait(b.dq_free, (turn + 1) % 2)
        fragments.store_tile_unfenced(m.qk, 0, A_op)
        pipeline.arrive(b.qk_made, 0)
        for _head in T.serial(a.group):
            stage = n % smem.HEAD_STAGES
            slot = n % smem.FACTOR_STAGES
            clear(state)
            clear(read_row)
            clear(row)
            clear(column)
            T.barrier_wait(b.rows_ready[slot], (n // smem.FACTOR_STAGES) % 2)
            for c in spec.k_slices:
                for h in spec.v_slices:
                    if c == 0:
                        T.barrier_wait(b.slice_ready[h], n % 2)
                        T.barrier_wait(b.do_ready[h], n % 2)
                    T.wgmma_gemm(m.do[h, :, :], m.S[h, 0:C, c * C : c * C + C], Y, clear_accum=h == 0)
                for h in T.unroll(v_slices, unroll_factor=1):
                    dots.tile_dots(state, dots.at(m.S, h, 0, c * C), dots.at(m.S, h, C, c * C))
                T.wait_wgmma(0)
                pipeline.settle(Y)
                dots.add_scaled_rows(dQ, c, Y, factors_of(m, slot, smem.GAMMA), scale)
                dots.accumulator_dots(read_row, Y, dots.at(m.q, 0, c * C))
            for h in spec.v_slices:
                pipeline.arrive(b.slice_free, h)
            for h in spec.v_slices:
                T.barrier_wait(b.vd_ready[h], n % 2)
                T.wgmma_gemm(m.do[h, :, :], m.vd[h, :, :], Y, transpose_B=True, clear_accum=h == 0)
                T.wait_wgmma(0)
                pipeline.settle(Y)
                pipeline.arrive(b.do_free, h)
                pipeline.arrive(b.vd_free, h)
            T.barrier_wait(b.d_ready[stage], (n // smem.HEAD_STAGES) % 2)
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
            T.barrier_wait(b.sums_free[stage], (n // smem.HEAD_STAGES + 1) % 2)
            dots.store_warp_dot(dots.at(m.sums, stage, smem.STATE_DOT), state)
            dots.store_row_dots(dots.at(m.sums, stage, smem.READ_STATE), read_row)
            dots.store_row_dots(dots.at(m.sums, stage, smem.QUERY_ROW), row)
            dots.store_row_dots(dots.at(m.sums, stage, smem.QUERY_COLUMN), column)
            pipeline.arrive(b.dp_free, 0)
            pipeline.arrive(b.sums_ready, stage)
            T.wait_wgmma(0)
            pipeline.settle(dQ)
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
    stage = head % smem.HEAD_STAGES
    slot = head % smem.FACTOR_STAGES
    T.barrier_wait(b.rows_ready[slot], (head // smem.FACTOR_STAGES) % 2)
    dots.make_decay(D_op, factors_of(m, slot, smem.G))
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
    dots.store_row_dots(dots.at(m.sums, stage, smem.KEY_PAIR), pair)
    dots.scale_tile_rows(M_op, factors_of(m, slot, smem.BETA), -1.0)
    fragments.store_tile_unfenced(m.d, stage, M_op)
    T.sync_threads(KEY_BARRIER, 128)
    fragments.load_tile_transposed(A_op, m.d, stage)
    dots.row_dots(column, A_op, dots.at(m.kk))
    dots.add_tiles(M_op, A_op)
    dots.store_row_dots(dots.at(m.sums, stage, smem.KEY_COLUMN), column)


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
        start_item(dK, m.k, m.k, Y)
        dots.pack(A_op, Y)
        fragments.store_tile_unfenced(m.kk, 0, A_op)
        T.barrier_wait(b.dk_free, (turn + 1) % 2)
        for head in T.serial(a.group):
            stage = n % smem.HEAD_STAGES
            slot = n % smem.FACTOR_STAGES
            for next_head in T.serial(T.Select(head == 0, 0, head + 1), T.min(head + 2, a.group)):
                make_decay(m, b, n - head + next_head, M_op)
            for h in T.unroll(v_slices, unroll_factor=1):
                T.barrier_wait(b.slice_ready[h], n % 2)
                T.barrier_wait(b.vd_ready[h], n % 2)
                fragments.load_tile_unfenced(A_op, m.vd, h)
                dots.scale_tile_rows(A_op, factors_of(m, slot, smem.DECAY))
                T.wgmma_gemm(A_op, m.S[h, C : 2 * C, :], dK)
                T.wgmma_gemm(m.x[h, :, :], m.vd[h, :, :], Y, transpose_B=True, clear_accum=h == 0)
                fragments.load_tile_unfenced(M_op, m.x, h)
                dots.scale_tile_rows(M_op, factors_of(m, slot, smem.READ))
                T.wgmma_gemm(M_op, m.S[h, 0:C, :], dK)
                T.wait_wgmma(0)
                pipeline.settle(dK)
                pipeline.settle(Y)
                pipeline.arrive(b.slice_free, h)
                pipeline.arrive(b.vd_free, h)
            T.barrier_wait(b.dp_ready, n % 2)
            T.wgmma_gemm(m.dp[0, :, :], m.q, dK, transpose_A=True)
            T.barrier_wait(b.sums_free[stage], (n // smem.HEAD_STAGES + 1) % 2)
            key_pairs(m, stage, slot, M_op, A_op, Y)
            T.wgmma_gemm(M_op, m.k, dK)
            pipeline.arrive(b.sums_ready, stage)
            T.wait_wgmma(1)
            pipeline.arrive(b.dp_free, 0)
            T.wait_wgmma(0)
            pipeline.settle(dK)
            n += 1
        pipeline.arrive(b.qk_free, 0)
        T.sync_threads(KEY_BARRIER, 128)  # every warp is done with D's tiles
        for c in spec.k_slices:
            dots.pack(A_op, dK, c)
            fragments.store_tile_unfenced(m.d, c, A_op)
        pipeline.publish(b.dk_ready, 0)
        turn += 1
        T.barrier_wait(b.qk_ready, turn % 2)


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
    registers = REGISTERS[K]
    t = program.Tensors.of(spec)
    num_slots, state_slots = T.dynamic("num_slots state_slots")

    @T.prim_func
    def gradients(
        q: t.keys("q"), k: t.keys("k"), v: t.values("v"), T_inv: t.inverse(), g_cumsum: t.per_head(),
        beta: t.gates("beta", spec.beta_dtype), do: t.values("do"),
        S: T.Tensor((state_slots, t.num_v_heads, C, K), spec.dtype),
        dS: t.states(num_slots, spec.dtype), cu: program.cu_seqlens(),
        dq: t.per_key_head(K, dtype=spec.dtype), dk: t.per_key_head(K, dtype=spec.dtype),
        dv: t.per_head(V, dtype=spec.dtype), dbeta: t.per_head(), dg: t.per_head(),
        scale: T.float32, group: T.int32, num_seqs: T.int32, cu_step: T.int32, seq_len: T.int32, ctas: T.int32,
    ):  # fmt: skip
        with T.Kernel(ctas, threads=512) as (block,):
            T.import_source(SOURCE + dots.source(spec.dtype))
            m, b = allocate(spec)
            flat_tokens = t.batch * t.num_tokens
            total = num_slots * t.num_k_heads
            a = Items(block, ctas, total, group, t.num_k_heads, cu, cu_step, seq_len, flat_tokens, num_seqs)
            zero_rows_after(spec, a, num_slots, dq, dk, dv, dbeta, dg)
            tx = T.get_thread_binding()
            if tx < 128:
                T.set_max_nreg(registers["load"], 0)
                if tx < 32:
                    load_role(spec, m, b, a, q, k, v, T_inv, do, S, dS, dv)
                elif tx < 64:
                    row_role(m, b, a, scale, g_cumsum, beta, dbeta, dg)
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
        dv: `[B, T, Hv, V]` contiguous destination in q's dtype; half of S lies there before (`backward_states`).
        dbeta, dg: `[B, T, Hv]` contiguous fp32 destinations; dg is the gradient of the raw gate.
        q, k, v, do: `[B, T, H, D]`, TMA-ready (`launch.tma_ready`), native head sizes.
        T_inv: `[B, T, Hv, C]` contiguous, the gated inverse without beta.
        g_cumsum: `[B, T, Hv]` fp32 contiguous, natural log.
        beta: `[B, T, Hv]` fp32, bf16 or fp16, any strides.
        scale: factor of q.
        S, dS: from `backward_states`: the state entering each chunk, and the cotangent of the one leaving it.
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
        min(dS.shape[0] * q.shape[2], archs.num_sms(device)),
    )  # fmt: skip

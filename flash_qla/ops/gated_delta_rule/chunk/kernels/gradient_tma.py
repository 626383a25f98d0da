"""The load and store roles of gradients.py: TMA in and out, and the items that the CTA walks."""

import tilelang.language as T

from ..constants import CHUNK_SIZE as C
from .gradient_smem import HEAD_STAGES, Barriers, Smem, Spec
from .tiles import dots, pipeline, prefetch
from .tiles.items import ITEM_STAGES, Items, Work, get_info, next_item, put_info


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
def load_state(spec: Spec, m: Smem, b: Barriers, w: Work, slot, tail, h, v_head, S, dv):
    """Slice h of S. Slice 1 of a whole chunk lies in dv's rows (`state_walk.Halves`): the store role waits for it."""
    if h == 0 or w.count < C:
        for c in spec.k_slices:
            col = c * C
            T.tma_copy(
                S[T.if_then_else(h == 0, slot, tail), v_head, 0:C, col : col + C],
                m.S[h, 0:C, col : col + C],
                barrier=b.slice_ready[h],
            )
    else:
        for c in spec.k_slices:
            load_tile(dv, m.S[h, 0:C, c * C : c * C + C], w, v_head, c * C, b.slice_ready[h])


@T.macro
def load_slice(
    spec: Spec, m: Smem, b: Barriers, w: Work, slot, tail, n, h, v_head, v, T_inv, do, S, dS, dv, cleanings: T.Ref
):
    """Slice h of V of one value head, the n-th of the CTA; T with the first slice."""
    stage = n % HEAD_STAGES
    row = h * C
    T.barrier_wait(b.slice_free[h], (n + 1) % 2)
    for c in spec.k_slices:
        col = c * C
        if len(spec.v_slices) == 1:
            T.tma_copy(S[slot, v_head, 0:C, col : col + C], m.S[h, 0:C, col : col + C], barrier=b.slice_ready[h])
        T.tma_copy(
            dS[slot, v_head, row : row + C, col : col + C], m.S[h, C : 2 * C, col : col + C], barrier=b.slice_ready[h]
        )
    if len(spec.v_slices) > 1:
        load_state(spec, m, b, w, slot, tail, h, v_head, S, dv)
    if w.count == C:
        load_tile(v, m.v[h, :, :], w, v_head, row, b.slice_ready[h])
        if T.shuffle_elect(32):
            T.barrier_arrive(b.slice_ready[h])
    if h == 0:
        T.barrier_wait(b.t_free[stage], (n // HEAD_STAGES + 1) % 2)
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
def load_role(spec: Spec, m: Smem, b: Barriers, a: Items, q, k, v, T_inv, do, S, dS, dv):
    """Announces the items and runs ahead: a first head is under way before its q and k have a place."""
    item, slot, batch, left, count, k_head, cleanings, n, turn, seq = (T.alloc_var("int32") for _ in range(10))
    w = Work(batch, left, count, k_head)
    item = a.first - a.step
    cleanings = 0
    n = 0
    turn = 0
    count = 1
    while count > 0:
        next_item(a, item, slot, seq, batch, left, count, k_head)
        put_info(m, turn % ITEM_STAGES, batch, left, count, k_head)
        pipeline.arrive(b.item_known, turn % ITEM_STAGES)
        if count > 0:
            if T.shuffle_elect(32):  # they wait for the last item's end, S, dS and v do not
                prefetch.tile(q, batch, left, k_head)
                prefetch.tile(k, batch, left, k_head)
        for head in T.serial(T.if_then_else(count > 0, a.group, 0)):
            for h in T.unroll(len(spec.v_slices), unroll_factor=1):
                load_slice(
                    spec, m, b, w, slot, dS.shape[0] + seq, n, h, k_head * a.group + head, v, T_inv, do, S, dS, dv,
                    cleanings,
                )  # fmt: skip
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
                    T.barrier_wait(b.slice_ready[len(spec.v_slices) - 1], n % 2)  # S has left dv's rows
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

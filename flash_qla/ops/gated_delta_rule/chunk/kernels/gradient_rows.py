"""The row role of gradients.py: row factors of each value head, and dβ and dg out of the other roles' row sums."""

import tilelang.language as T

from .gradient_smem import (
    BETA,
    DECAY,
    END,
    FACTOR_STAGES,
    GAMMA,
    HEAD_STAGES,
    KEY_COLUMN,
    KEY_PAIR,
    QUERY_COLUMN,
    QUERY_ROW,
    READ,
    READ_STATE,
    READ_U,
    READ_V,
    STATE_DOT,
    Barriers,
    G,
    Smem,
)  # fmt: skip
from .tiles import dots, pipeline
from .tiles.gate import LOG2E
from .tiles.items import ITEM_STAGES, Items, get_info, put_info


def factors_of(m, slot, kind):
    """Pointer to the 64 row factors of one kind."""
    return dots.at(m.factors, slot, kind)


@T.macro
def load_row_factors(m: Smem, b: Barriers, slot, g_cumsum, beta, lane, batch, left, count, v_head):
    """g in log2 units (the last valid row's past the end), β (zero there), Γ, e and -β Γ of one value head."""
    b_row, g_last, g_row = (T.alloc_var("float32") for _ in range(3))
    token = T.alloc_var("int32")
    g_last = g_cumsum[batch, left + count - 1, v_head] * LOG2E
    for r in T.unroll(2, unroll_factor=1):
        row = 32 * r + lane
        token = left + T.min(row, count - 1)
        g_row = g_cumsum[batch, token, v_head] * LOG2E
        b_row = T.cast(beta[batch, token, v_head], "float32")
        b_row = T.if_then_else(row < count, b_row, 0.0)
        m.factors[slot, G, row] = g_row
        m.factors[slot, BETA, row] = b_row
        m.factors[slot, GAMMA, row] = T.exp2(g_row)
        m.factors[slot, DECAY, row] = T.exp2(g_last - g_row)
        m.factors[slot, READ, row] = -b_row * T.exp2(g_row)
    pipeline.arrive(b.rows_ready, slot)


@T.macro
def finish_rows(m: Smem, b: Barriers, head, scale, unscale, dbeta, dg, lane, batch, left, count, v_head):
    """dβ and dg of one value head out of the roles' row sums, and dg's reverse cumsum. Equations: B9 to B11.

    Two rows a lane, 32 apart. dPg and s Q Kᵀ both hold s.
    """
    stage = head % HEAD_STAGES
    slot = head % FACTOR_STAGES
    pair = T.alloc_local((2,), "float32")
    row = T.alloc_var("int32")
    end, end_sum, last_sum, later, other = (T.alloc_var("float32") for _ in range(5))
    end_sum = 0.0
    last_sum = 0.0
    for r in tuple(range(2)):
        row = 32 * r + lane
        end = T.if_then_else(row == count - 1, 0.0, m.factors[slot, DECAY, row] * m.sums[stage, END, row])
        end_sum += end
        other = m.sums[stage, READ_V, row] - m.factors[slot, GAMMA, row] * m.sums[stage, READ_U, row]
        other -= m.sums[stage, KEY_PAIR, row]
        if row < count:
            dbeta[batch, left + row, v_head] = other
        pair[r] = scale * m.factors[slot, GAMMA, row] * m.sums[stage, READ_STATE, row] - end
        other = m.sums[stage, QUERY_ROW, row] - m.sums[stage, QUERY_COLUMN, row]
        pair[r] += unscale * other
        pair[r] += m.factors[slot, READ, row] * m.sums[stage, READ_U, row]
        pair[r] -= m.factors[slot, BETA, row] * m.sums[stage, KEY_PAIR, row] + m.sums[stage, KEY_COLUMN, row]
    for i in T.unroll(4, unroll_factor=1):
        last_sum += m.sums[stage, STATE_DOT, i]
    last_sum *= m.factors[slot, GAMMA, count - 1]
    T.sync_warp()
    if T.get_thread_binding() % 32 == 0:
        T.barrier_arrive(b.sums_free[stage])
    for shift in (1, 2, 4, 8, 16):
        end_sum += T.shfl_xor(end_sum, shift)
    last_sum += end_sum
    later = 0.0
    for r in (1, 0):
        row = 32 * r + lane
        pair[r] += T.if_then_else(row == count - 1, last_sum, 0.0)
        for shift in (1, 2, 4, 8, 16):
            other = T.shfl_down(pair[r], shift)
            pair[r] += T.if_then_else(lane + shift < 32, other, 0.0)
        pair[r] += later
        later = T.shfl_sync(pair[r], 0)
        if row < count:
            dg[batch, left + row, v_head] = pair[r]


@T.macro
def row_role(m: Smem, b: Barriers, a: Items, scale, g_cumsum, beta, dbeta, dg):
    """Loads the row factors up to FACTOR_STAGES heads ahead of the head that it finishes."""
    turn, head, loaded, done = (T.alloc_var("int32") for _ in range(4))
    lane, batch, left, count, v_head = (T.alloc_var("int32") for _ in range(5))
    unscale = T.alloc_var("float32")
    unscale = T.if_then_else(scale == 0.0, 0.0, 1.0 / scale)
    turn = 0
    head = a.group
    loaded = 0
    done = 0
    while T.Or(head >= 0, done < loaded):
        lane = dots.opaque(T.get_thread_binding() % 32)
        if head == a.group:
            T.barrier_wait(b.item_known[turn % ITEM_STAGES], (turn // ITEM_STAGES) % 2)
            head = T.if_then_else(m.info[turn % ITEM_STAGES, 2] > 0, 0, -1)
            turn += 1
        if T.Or(head < 0, loaded - done == FACTOR_STAGES):
            if done < loaded:
                T.barrier_wait(b.sums_ready[done % HEAD_STAGES], (done // HEAD_STAGES) % 2)
                get_info(m, ITEM_STAGES + done % FACTOR_STAGES, batch, left, count, v_head)
                finish_rows(m, b, done, scale, unscale, dbeta, dg, lane, batch, left, count, v_head)
                done += 1
        else:
            get_info(m, (turn - 1) % ITEM_STAGES, batch, left, count, v_head)
            v_head = v_head * a.group + head
            put_info(m, ITEM_STAGES + loaded % FACTOR_STAGES, batch, left, count, v_head)
            load_row_factors(m, b, loaded % FACTOR_STAGES, g_cumsum, beta, lane, batch, left, count, v_head)
            loaded += 1
            head += 1

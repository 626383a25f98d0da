"""What the roles of gradients.py share: tiles, row factors, row sums and barriers of a CTA.

Barriers (arrivals count warps; "h" is a V slice, one slot for each; rings of heads go on from item to item):
    name          signalled by       waited by           guards
    item_known    load               row, store          the item's description (ring of 4)
    qk_ready      load (TMA)         chain, query, key   q, k, the item's description
    qk_free       chain, query, key  load                q, k
    qk_made       query              chain               s Q Kᵀ
    slice_ready   load (TMA)         chain, query, key   S[h], dS[h], v[h]
                                     store               (the last) dv's rows in memory, where that slice of S was
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

Shared memory, K = V = 128 (tiles of 64 × 64, 8 KB): q 2, k 2, S and dS 8, v 2, dO 2, T 2, D 2, s Q Kᵀ 1, K Kᵀ 1, Vd 2,
X 2, dPg 1: 27 tiles, 216 KB; row factors 3.75, row sums 4.5, descriptions 0.1 KB: with the barriers 227, all there is.
"""

from dataclasses import dataclass

import tilelang.language as T

from ..constants import CHUNK_SIZE as C
from .tiles import layouts, pipeline
from .tiles.items import ITEM_STAGES

HEAD_STAGES = 2  # heads whose T, D and row sums are in flight
FACTOR_STAGES = 3  # heads whose row factors are
# Slots of the row factors: g in log2 units, β, Γ, e, -β Γ.
G, BETA, GAMMA, DECAY, READ = range(NUM_FACTORS := 5)
# Slots of the row sums. chain: x / e, X·U, X·V. query: q·(dO Sᵀ), row and column sums of dPg ∘ s Q Kᵀ, <S, dS> by warp.
# key: row sums of D ∘ X Vdᵀ ∘ K Kᵀ, column sums of that times -β.
END, READ_U, READ_V, READ_STATE, QUERY_ROW, QUERY_COLUMN, STATE_DOT, KEY_PAIR, KEY_COLUMN = range(NUM_SUMS := 9)


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
        t=tile(HEAD_STAGES),
        d=tile(HEAD_STAGES),
        qk=tile(1),
        kk=tile(1),
        vd=tile(v_slices),
        x=tile(v_slices),
        dp=tile(1),
        factors=T.alloc_shared((FACTOR_STAGES, NUM_FACTORS, C), "float32"),
        info=T.alloc_shared((ITEM_STAGES + FACTOR_STAGES, 4), "int32"),
        sums=T.alloc_shared((HEAD_STAGES, NUM_SUMS, C), "float32"),
    )
    b = Barriers(
        qk_ready=T.alloc_barrier(1),
        qk_free=T.alloc_barrier(3 * warps),
        item_known=T.alloc_barrier([1] * ITEM_STAGES),
        slice_ready=T.alloc_barrier([1] * v_slices),
        slice_free=T.alloc_barrier([2 * warps + 1] * v_slices),
        do_ready=T.alloc_barrier([1] * v_slices),
        do_free=T.alloc_barrier([2 * warps] * v_slices),
        t_ready=T.alloc_barrier([1] * HEAD_STAGES),
        t_free=T.alloc_barrier([warps] * HEAD_STAGES),
        rows_ready=T.alloc_barrier([1] * FACTOR_STAGES),
        sums_ready=T.alloc_barrier([3 * warps] * HEAD_STAGES),
        sums_free=T.alloc_barrier([1] * HEAD_STAGES),
        qk_made=T.alloc_barrier(warps),
        d_ready=T.alloc_barrier([warps] * HEAD_STAGES),
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

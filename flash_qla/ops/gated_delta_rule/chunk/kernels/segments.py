"""Context parallelism inside one card: the states at the borders of segments, so that all segments run at once.

Equations C1 to C6, forward and reverse. Two launches, with the roles of `states.py` and states transposed as there:

    segment_ends   b_j: the state after segment j from zero (reverse: c_j, the cotangent before it), and where the
                   segment's gates and keys do not bound the transition below the tolerance, M_j from the identity
    segment_scan   S_(j+1) = M_j S_j + b_j   dS_(j-1) = M_j^T dS_j + c_j, in place, for the heads that carry

b_j is written where S_(j+1) belongs (slot j + 1; reverse: c_j at slot j - 1), so heads that do not carry are done after
the first launch, which walks only their last (first) few chunks. Every CTA of segment_ends finds out by itself, from
the cumulative gates and the keys it would walk (`tiles/decay.py`), before its roles part. M is kept as two bfloat16
tensors (their sum is right to 16 bits), and a scan step multiplies three of the four products, so its rounding is far
below that of the walks.

A launch goes one way. Grids: segment_ends: (slot, value head, tile): K tiles of M (forward only), then V tiles.
segment_scan: (sequence, value head, 32 columns of V). CTAs with nothing to do exit.

segment_ends has the roles, barriers and shared memory of `states.py` without its store warps. segment_scan keeps the
state K-first, so that few columns of V make a CTA and many CTAs share the chain's products; its left operand is M, its
right one the state in two halves, through shared memory:
    role      threads   computes                 barrier    signalled by, waited by     guards
    product   2 K       S' = M S + b             loaded     load (TMA bytes), product   m (M's halves)
    load      32        TMA of M's halves        freed      product, load               m
Shared memory (K = 128): m 3 stages of 64 KB; two pairs of 8 KB of S, by turns, so that one barrier a step is enough.
"""

from dataclasses import dataclass

import tilelang.language as T
import torch

from flash_qla import arch as archs

from ..constants import CHUNK_SIZE as C
from ..sequences import Sequences
from ..split import SegmentStates, Split
from . import launch, states
from .build import build
from .tiles import decay, pipeline, program, state

V_TILE = states.V_TILE
FORWARD, REVERSE = 0, 1
M_DTYPE = "bfloat16"
HALVES = 2  # M = high + low
SCAN_STAGES = 3
SCAN_COLUMNS = launch.SCAN_COLUMNS
PRODUCT_BARRIER = 15  # named barrier of the product role
ROWS = T.GemmWarpPolicy.FullRow  # 64 rows for each warpgroup
FLAGS = 32  # segments whose carry flags a register holds
PASS_CONFIGS = states.PASS_CONFIGS


def ends_specs(dtype, head_dim_k=128, head_dim_v=128, beta_dtype="float32"):
    """Every Spec of segment_ends that a configuration can ask for."""
    counts = (1,) if V_TILE in (head_dim_k, head_dim_v) else (1, 2)
    return [states.Spec(dtype, head_dim_k, head_dim_v, beta_dtype, value_warpgroups=n, ends_only=True) for n in counts]


@dataclass
class Ends:
    """Where a walk of segment_ends leaves its last state."""

    states: object
    transitions: object

    def store(self, S, S_op, walk, v_col, rows, cols):
        if self.transitions is None:
            return store_end(self.states, S, walk, v_col, rows, cols)
        return store_end_or_transition(self.states, self.transitions, S, walk, v_col, rows, cols)


@T.macro
def store_end(target, S, walk: states.Walk, v_col, rows, cols):
    if walk.last_row < target.shape[0]:
        for jv, jk in T.Parallel(rows, cols):
            target[walk.last_row, walk.v_head, v_col + jv, jk] = S[jv, jk]


@T.macro
def store_end_or_transition(target, transitions, S, walk: states.Walk, v_col, rows, cols):
    if walk.is_transition == 0:
        store_end(target, S, walk, v_col, rows, cols)
    else:
        for jv, jk in T.Parallel(rows, cols):
            transitions[-1 - walk.last_row, walk.v_head, 0, v_col + jv, jk] = T.cast(S[jv, jk], M_DTYPE)
        for jv, jk in T.Parallel(rows, cols):
            S[jv, jk] = S[jv, jk] - T.cast(T.cast(S[jv, jk], M_DTYPE), "float32")
        for jv, jk in T.Parallel(rows, cols):
            transitions[-1 - walk.last_row, walk.v_head, 1, v_col + jv, jk] = T.cast(S[jv, jk], M_DTYPE)


def make(spec: states.Spec):
    """Returns the prim_func of segment_ends."""
    K, V, wgs = spec.head_dim_k, spec.head_dim_v, spec.value_warpgroups
    width = V_TILE * wgs
    v_tiles, m_tiles = V // width, K // width
    batch, num_tokens, num_k_heads, num_v_heads = T.dynamic("batch num_tokens num_k_heads num_v_heads")
    cu_len, slots, m_slots = T.dynamic("cu_len slots m_slots")

    def strided(name, heads, dim):
        return program.strided_rows(name, (batch, num_tokens, heads, dim), spec.dtype)

    beta_type = program.strided_gates("beta", (batch, num_tokens, num_v_heads), spec.beta_dtype)

    @T.prim_func
    def segment_ends(
        q: strided("q", num_k_heads, K),
        k: strided("k", num_k_heads, K),
        x: strided("x", num_v_heads, V),
        T_inv: T.Tensor((batch, num_tokens, num_v_heads, C), spec.dtype),
        g_cumsum: T.Tensor((batch, num_tokens, num_v_heads), "float32"),
        beta: beta_type,
        cu: T.Tensor((cu_len,), "int32"),
        inner: T.Tensor((slots, num_v_heads, V, K), "float32"),
        transitions: T.Tensor((m_slots, num_v_heads, HALVES, K, K), M_DTYPE),
        carries: T.Tensor((m_slots, num_v_heads, 2), "int32"),
        scale: T.float32,
        tolerance: T.float32,
        num_seqs: T.int32,
        cu_step: T.int32,
        seq_len: T.int32,
        segment_tokens: T.int32,
        num_slots: T.int32,
        reverse: T.int32,
        has_h0: T.int32,
        for_backward: T.int32,
    ):
        with T.Kernel(num_slots * num_v_heads * (v_tiles + (1 - reverse) * m_tiles), threads=128 * (2 + wgs)) as (
            block,
        ):
            T.import_source(states.SOURCES + decay.SOURCE)
            m = states.allocate(spec)
            scratch = T.alloc_shared((4 * (2 + wgs),), "float32")
            # What no role has registers for: row of the end state (-1 - row for a transition), heads, column, batch.
            place = T.alloc_shared((5,), "int32")
            n, seq_batch, start, length, pair = (T.alloc_var("int32") for _ in range(5))
            chunks, k_head, v_head, tile, row = (T.alloc_var("int32") for _ in range(5))
            slot, segment, last_of, is_transition = (T.alloc_var("int32") for _ in range(4))
            needed, window, last_direction = (T.alloc_var("int32") for _ in range(3))
            pair = block // (v_tiles + (1 - reverse) * m_tiles)
            tile = block - pair * (v_tiles + (1 - reverse) * m_tiles)
            is_transition = T.if_then_else(reverse == 0 and tile < m_tiles, 1, 0)
            if reverse == 0 and is_transition == 0:
                tile = tile - m_tiles
            slot = pair // num_v_heads
            v_head = pair - slot * num_v_heads
            k_head = v_head // (num_v_heads // num_k_heads)
            program.locate_segment(
                cu, cu_step, seq_len, batch * num_tokens, num_seqs, segment_tokens, slot,
                n, seq_batch, start, length, segment, last_of,
            )  # fmt: skip
            chunks = T.ceildiv(length, C)
            # A segment's end state is needed unless it is the sequence's last one (reverse: first one); M is where a
            # state other than zero may enter it.
            needed = T.if_then_else(length > 0 and last_of == program.NO_ROW, 1, 0)
            last_direction = FORWARD
            row = slot + 1
            if reverse != 0:
                needed = T.if_then_else(length > 0 and segment > 0, 1, 0)
                last_direction = REVERSE
                row = slot - 1
            if is_transition != 0:
                row = -1 - slot
                needed = T.if_then_else(segment > 0 or has_h0 != 0, needed, 0)
                if for_backward != 0 and length > 0 and segment > 0:
                    needed = 1
                last_direction = T.if_then_else(for_backward != 0, REVERSE, FORWARD)
            window = 0
            if needed != 0:
                window = decay.windows(
                    g_cumsum, k, beta, seq_batch, start, k_head, v_head, length,
                    T.if_then_else(is_transition != 0, FORWARD, last_direction), last_direction, tolerance, scratch,
                )  # fmt: skip
                if is_transition != 0:
                    if for_backward == 0:
                        window = T.if_then_else(window == 0, 1, 0)
                    if tile == 0 and T.get_thread_binding() < 2:
                        carries[slot, v_head, T.get_thread_binding()] = (window >> T.get_thread_binding()) & 1
                    window = T.if_then_else(window != 0, chunks, 0)
                else:
                    window = T.if_then_else(window == 0, chunks, window)
                if reverse != 0:  # the launch that made M decided; its sums may round otherwise
                    window = T.if_then_else(carries[slot, v_head, REVERSE] != 0, chunks, window)
            if reverse == 0:
                start = start + (chunks - window) * C
                length = length - (chunks - window) * C
            if T.get_thread_binding() == 0:
                place[0] = T.if_then_else(window > 0, row, program.NO_ROW)
                place[1] = k_head
                place[2] = v_head
                place[3] = tile * width
                place[4] = seq_batch
            T.sync_threads()
            where = dict(
                n=n, slot=slot, inner=0, last_row=place[0], batch=place[4], start=start,
                length=T.min(length, window * C), chunks=window, updates=window, first_slot=0, k_head=place[1],
                v_head=place[2], v_col=place[3],
            )  # fmt: skip
            inputs = (T_inv, g_cumsum, beta, scale, None, None, None)
            if reverse != 0:
                states.run_roles(spec, m, states.Walk(True, **where), q, k, x, *inputs, Ends(inner, None))
            else:
                walk = states.Walk(False, is_transition=T.Select(place[0] < 0, 1, 0), **where)
                states.run_roles(spec, m, walk, q, k, x, *inputs, Ends(inner, transitions))

    return segment_ends


@dataclass(frozen=True)
class ScanSpec:
    """Compile key of segment_scan: dtype of the sequences' own states, native head sizes."""

    state_dtype: str = "float32"
    head_dim_k: int = 128
    head_dim_v: int = 128


def scan_specs(state_dtypes=("float32",), head_dim_k=128, head_dim_v=128):
    """Every ScanSpec that a configuration can ask for."""
    return [ScanSpec(dtype, head_dim_k, head_dim_v) for dtype in dict.fromkeys(state_dtypes)]


SCAN_SOURCE = r"""
namespace flash_qla {
// Bit i: whether flag i of `count` is set, for up to 32 flags `stride` apart.
__device__ __forceinline__ int flag_bits(int const* flags, long long stride, int count) {
  int lane = threadIdx.x % 32;
  return __ballot_sync(~0u, lane < count && flags[lane * stride] != 0);
}
}  // namespace flash_qla
"""


@dataclass
class Chain:
    """The segments of one sequence and head, in walking order: step i takes the state over segment first + i * step."""

    reverse: bool
    first: object
    step: int
    steps: object
    n: object
    v_head: object
    v_col: object

    def slot(self, i):
        return self.first + i * self.step

    def flags(self, carries, i):
        """Call expression: bits of the steps from i on."""
        direction = REVERSE if self.reverse else FORWARD
        return T.call_extern(
            "int32", "flash_qla::flag_bits", T.address_of(carries[self.slot(i), self.v_head, direction]),
            T.cast(carries.shape[1] * (2 * self.step), "int64"), T.min(self.steps - i, FLAGS),
        )  # fmt: skip


@T.macro
def carried(chain: Chain, carries, i, has_start, bits: T.Ref):
    """Keeps `bits` so that bit i % FLAGS says whether step i multiplies: not the first one when it starts from zero."""
    if i % FLAGS == 0:
        bits = chain.flags(carries, i)
        if i == 0 and has_start == 0:
            bits = bits & ~1


@T.macro
def load_transitions(chain: Chain, ring, loaded, freed, transitions, carries, has_start, K):
    bits = T.alloc_var("int32")
    used = T.alloc_var("int32")
    bits = 0
    used = 0
    for i in T.serial(chain.steps):
        carried(chain, carries, i, has_start, bits)
        if (bits >> (i % FLAGS)) & 1 != 0:
            stage = used % SCAN_STAGES
            T.barrier_wait(freed[stage], (used // SCAN_STAGES + 1) % 2)
            for half in tuple(range(HALVES)):
                T.tma_copy(
                    transitions[chain.slot(i), chain.v_head, half, 0:K, 0:K],
                    ring[stage * HALVES + half, :, :],
                    barrier=loaded[stage],
                )
            if T.shuffle_elect(32):
                T.barrier_arrive(loaded[stage])
            used = used + 1


@T.macro
def load_chain_start(S, outer, chain: Chain, K):
    if chain.n < outer.shape[0]:
        for jk, jv in T.Parallel(K, SCAN_COLUMNS):
            S[jk, jv] = T.cast(outer[chain.n, chain.v_head, jk, chain.v_col + jv], "float32")
    else:
        T.fill(S, 0.0)


@T.macro
def split_state(S, halves, turn, K):
    """Writes S as high + low for the products of all the role's threads."""
    for jk, jv in T.Parallel(K, SCAN_COLUMNS):
        halves[2 * turn, jk, jv] = T.cast(S[jk, jv], M_DTYPE)
    for jk, jv in T.Parallel(K, SCAN_COLUMNS):
        halves[2 * turn + 1, jk, jv] = T.cast(S[jk, jv] - T.cast(T.cast(S[jk, jv], M_DTYPE), "float32"), M_DTYPE)
    T.fence_proxy_async()
    T.sync_threads(PRODUCT_BARRIER, 2 * K)


@T.macro
def load_states(state, inner, chain: Chain, row, K):
    for jk, jv in T.Parallel(K, SCAN_COLUMNS):
        state[jk, jv] = inner[row, chain.v_head, chain.v_col + jv, jk]


@T.macro
def store_states(inner, state, chain: Chain, row, K):
    for jk, jv in T.Parallel(K, SCAN_COLUMNS):
        inner[row, chain.v_head, chain.v_col + jv, jk] = state[jk, jv]


@T.macro
def multiply(chain: Chain, ring, halves, loaded, freed, outer, inner, carries, has_start, K):
    """Global loads and stores stand behind the products' issue: the fence in `split_state` would wait for them."""
    S = T.alloc_fragment((K, SCAN_COLUMNS), "float32")
    kept = T.alloc_fragment((K, SCAN_COLUMNS), "float32")
    b = T.alloc_fragment((K, SCAN_COLUMNS), "float32")
    bits = T.alloc_var("int32")
    used = T.alloc_var("int32")
    unsaved = T.alloc_var("int32")  # row of the state that S holds and memory does not, -1 for none
    bits = 0
    used = 0
    unsaved = -1
    load_chain_start(S, outer, chain, K)
    for i in T.serial(chain.steps):
        carried(chain, carries, i, has_start, bits)
        row = chain.slot(i) + chain.step  # where the state after this segment lies
        if (bits >> (i % FLAGS)) & 1 != 0:
            stage = used % SCAN_STAGES
            turn = used % 2
            split_state(S, halves, turn, K)
            T.copy(S, kept)
            T.barrier_wait(loaded[stage], used // SCAN_STAGES % 2)
            for m, x in ((0, 0), (0, 1), (1, 0)):
                T.wgmma_gemm(
                    ring[stage * HALVES + m, :, :], halves[2 * turn + x, :, :], S, transpose_A=not chain.reverse,
                    clear_accum=m + x == 0, policy=ROWS,
                )  # fmt: skip
            load_states(b, inner, chain, row, K)
            if unsaved >= 0:
                store_states(inner, kept, chain, unsaved, K)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(S, num_regs=64 * SCAN_COLUMNS // 128)
            pipeline.arrive(freed, stage)
            used = used + 1
            unsaved = row
            for jk, jv in T.Parallel(K, SCAN_COLUMNS):
                S[jk, jv] += b[jk, jv]
        else:
            if unsaved >= 0:
                store_states(inner, S, chain, unsaved, K)
            unsaved = -1
            # The next step may need b; its bit may not be here yet.
            if (bits >> (i % FLAGS)) & 2 != 0 or i % FLAGS == FLAGS - 1:
                load_states(S, inner, chain, row, K)
    if unsaved >= 0:
        store_states(inner, S, chain, unsaved, K)


@T.macro
def run_chain(chain: Chain, ring, halves, loaded, freed, outer, inner, transitions, carries, has_start, K):
    if T.get_thread_binding() < 2 * K:
        multiply(chain, ring, halves, loaded, freed, outer, inner, carries, has_start, K)
    else:
        load_transitions(chain, ring, loaded, freed, transitions, carries, has_start, K)


def make_scan(spec: ScanSpec):
    """Returns the prim_func of segment_scan."""
    K, V = spec.head_dim_k, spec.head_dim_v
    v_tiles = V // SCAN_COLUMNS
    num_v_heads = T.dynamic("num_v_heads")
    cu_len, slots, m_slots = T.dynamic("cu_len slots m_slots")

    @T.prim_func
    def segment_scan(
        outer: state.strided_state("outer", spec.state_dtype, K, V),
        cu: T.Tensor((cu_len,), "int32"),
        inner: T.Tensor((slots, num_v_heads, V, K), "float32"),
        transitions: T.Tensor((m_slots, num_v_heads, HALVES, K, K), M_DTYPE),
        carries: T.Tensor((m_slots, num_v_heads, 2), "int32"),
        num_seqs: T.int32,
        cu_step: T.int32,
        seq_len: T.int32,
        flat_tokens: T.int32,
        segment_tokens: T.int32,
        reverse: T.int32,
    ):
        with T.Kernel(num_seqs * num_v_heads * v_tiles, threads=2 * K + 32) as (block,):
            T.import_source(SCAN_SOURCE)
            ring = T.alloc_shared((SCAN_STAGES * HALVES, K, K), M_DTYPE)
            halves = T.alloc_shared((2 * HALVES, K, SCAN_COLUMNS), M_DTYPE)
            loaded = T.alloc_barrier([1] * SCAN_STAGES)
            freed = T.alloc_barrier([2 * K // 32] * SCAN_STAGES)
            n, v_head, seq_batch, start, length, first, steps, has_start = (T.alloc_var("int32") for _ in range(8))
            n = block // v_tiles // num_v_heads
            v_head = block // v_tiles - n * num_v_heads
            program.locate_sequence(cu, cu_step, seq_len, flat_tokens, n, seq_batch, start, length)
            first = program.offset(cu, cu_step, seq_len, flat_tokens, n) // segment_tokens + n
            steps = T.max(T.ceildiv(length, segment_tokens) - 1, 0)
            has_start = T.if_then_else(n < outer.shape[0], 1, 0)
            where = dict(steps=steps, n=n, v_head=v_head, v_col=block % v_tiles * SCAN_COLUMNS)
            tensors = (outer, inner, transitions, carries, has_start, K)
            if reverse != 0:
                run_chain(Chain(True, first + steps, -1, **where), ring, halves, loaded, freed, *tensors)
            else:
                run_chain(Chain(False, first, 1, **where), ring, halves, loaded, freed, *tensors)

    return segment_scan


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
    wgs = launch.num_end_warpgroups(pairs, K, V, archs.num_sms(device), split.segment_chunks)
    spec = states.Spec(names[k.dtype], K, V, names[beta.dtype], value_warpgroups=wgs, ends_only=True)
    k, x = launch.tma_ready(k), launch.tma_ready(x)
    cu, cu_step, seq_len = launch.cu_arguments(seqs, device)
    build(make, spec, archs.of_device(device))(
        k if q is None else launch.tma_ready(q), k, x, T_inv, g_cumsum, beta, cu, inner, transitions, carries,
        float(scale), split.tolerance, seqs.num_seqs, cu_step, seq_len, split.segment_chunks * C,
        launch.num_segment_slots(seqs, split.segment_chunks), int(q is not None), int(has_h0), int(for_backward),
    )  # fmt: skip


def segment_scan(inner, transitions, carries, outer, seqs: Sequences, split: Split, reverse=False):
    """Launches the scans, in place. Equations: C3, C4.

    Args:
        inner, transitions, carries: from `segment_ends`.
        outer: h0, reverse dht: logical states `[N, Hv, K, V]` or None for zeros.
    """
    device, (_, Hv, V, K) = inner.device, inner.shape
    outer = launch.placeholder(device, torch.float32, Hv, K, V) if outer is None else outer
    cu, cu_step, seq_len = launch.cu_arguments(seqs, device)
    build(make_scan, ScanSpec(launch.DTYPE_NAMES[outer.dtype], K, V), archs.of_device(device))(
        outer, cu, inner, transitions, carries, seqs.num_seqs, cu_step, seq_len, seqs.flat_tokens,
        split.segment_chunks * C, int(reverse),
    )  # fmt: skip


def entering_states(k, v, T_inv, g_cumsum, beta, h0, seqs: Sequences, split: Split, for_backward=False):
    """Computes the state entering each segment but the first ones. Two launches.

    Args:
        for_backward: also the transitions that only `leaving_cotangents` needs.
    """
    slots, Hv, V, K = launch.num_segment_slots(seqs, split.segment_chunks), v.shape[2], v.shape[3], k.shape[3]
    entering = torch.empty((slots, Hv, V, K), dtype=torch.float32, device=k.device)
    transitions = torch.empty((slots, Hv, HALVES, K, K), dtype=launch.DTYPES[M_DTYPE], device=k.device)
    carries = torch.empty((slots, Hv, 2), dtype=torch.int32, device=k.device)
    segment_ends(
        entering, transitions, carries, k, v, T_inv, g_cumsum, beta, seqs, split, has_h0=h0 is not None,
        for_backward=for_backward,
    )  # fmt: skip
    segment_scan(entering, transitions, carries, h0, seqs, split)
    return SegmentStates(split, entering, transitions, carries)


def leaving_cotangents(
    q, k, T_inv, g_cumsum, beta, do, dht, scale, seqs: Sequences, split: Split, entering: SegmentStates
):
    """Computes the cotangent of the state leaving each segment but the last ones. Two launches.

    Args:
        entering: of the same split, made with for_backward.
    """
    leaving, carry = torch.empty_like(entering.states), (entering.transitions, entering.carries)
    segment_ends(leaving, *carry, k, do, T_inv, g_cumsum, beta, seqs, split, q=q, scale=scale)
    segment_scan(leaving, *carry, dht, seqs, split, reverse=True)
    return SegmentStates(split, leaving)

"""Context parallelism inside one card: the states at the borders of segments, so that all segments run at once.

Equations C1 to C6, forward and reverse. Two launches: the segments' ends (`ends.py`), then

    segment_scan   S_(j+1) = M_j S_j + b_j   dS_(j-1) = M_j^T dS_j + c_j, in place, for the heads that carry

A step multiplies three of the four products of M's and the state's halves, so its rounding is far below that of the
walks. The state is K-first, so that few columns of V make a CTA and many CTAs share the chain's products; the left
operand is M, the right one the state in two halves, through shared memory, and b is where the accumulators start.

Grid: (sequence, value head, 32 columns of V). CTAs of heads that do not carry have no step.

Roles:
    role      threads   does                                   barrier    signalled by, waited by     guards
    product   2 K       S' = M S + b, splits it into halves    loaded     load (TMA bytes), product   m (a half of M)
    store     K         joins the halves, writes the state     freed      product, load               m
    load      32        TMA of M's halves and of b             b_loaded   load (TMA bytes), product   b
                                                               b_freed    product, load               b
                                                               staged     product, store              halves
                                                               sent       store, product              halves
Shared memory (K = 128): m 5 of 32 KB; b 2 of 16 KB; two pairs of 8 KB of S, by turns.
"""

from dataclasses import dataclass

import tilelang.language as T
import torch

from flash_qla import arch as archs

from ..constants import CHUNK_SIZE as C
from ..sequences import Sequences
from ..split import SegmentStates, Split
from . import launch
from .build import BARE_PASS_CONFIGS, build
from .ends import HALVES, M_DTYPE, segment_ends
from .tiles import layouts, pipeline, program, state
from .tiles.pipeline import ROWS

FORWARD, REVERSE = 0, 1
RING = 5  # halves of transitions
SCAN_COLUMNS = launch.SCAN_COLUMNS
PRODUCT_BARRIER = 15  # named barrier of the product role
FLAGS = 32  # segments whose carry flags a register holds
PASS_CONFIGS = BARE_PASS_CONFIGS


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
// S = the transpose of b[v][k], 32 rows v of fp32 with the 128-byte swizzle; S: a wgmma accumulator of K rows.
__device__ __forceinline__ void load_b(float* S, float const* b) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, v = lane % 4 * 2, k16 = (warp % 2 * 4 + lane / 16) ^ v;
  float const* at = b + warp / 2 * 1024 + v * 32 + lane / 4 % 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int v1 = i % 2, h = i / 2 % 2;
    S[i] = at[i / 4 * 256 + v1 * 32 + (k16 ^ v1 ^ 2 * h) * 4];
  }
}
// out[v][k] = high[k][v] + low[k][v] for 32 columns v of bfloat16 tiles with the 64-byte swizzle, by K / 32 warps.
template <int K>
__device__ __forceinline__ void join_halves(float* out, void const* high, void const* low) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % (K / 32), row = 32 * warp + lane;
  unsigned at[2] = {(unsigned)__cvta_generic_to_shared(high), (unsigned)__cvta_generic_to_shared(low)};
  out += lane / 4 * K + 32 * warp + lane % 4 * 2;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    unsigned x[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[half][0]), "=r"(x[half][1]), "=r"(x[half][2]), "=r"(x[half][3])
                   : "r"(at[half] + row * 64 + ((c ^ (row >> 1 & 3)) << 4)) : "memory");
#pragma unroll
    for (int m = 0; m < 4; ++m)
      *(float2*)(out + c * 8 * K + m * 8) = make_float2(
          __uint_as_float(x[0][m] << 16) + __uint_as_float(x[1][m] << 16),
          __uint_as_float(x[0][m] & 0xffff0000) + __uint_as_float(x[1][m] & 0xffff0000));
  }
}
}  // namespace flash_qla
"""


@dataclass
class ScanSmem:
    """Shared memory and barriers of a CTA; a leading slot or turn."""

    m: object
    b: object
    halves: object
    loaded: object
    freed: object
    b_loaded: object
    b_freed: object
    staged: object
    sent: object


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
def load_steps(chain: Chain, m: ScanSmem, transitions, inner, carries, has_start, K):
    bits = T.alloc_var("int32")
    used = T.alloc_var("int32")
    bits = 0
    used = 0
    for i in T.serial(chain.steps):
        carried(chain, carries, i, has_start, bits)
        if (bits >> (i % FLAGS)) & 1 != 0:
            T.barrier_wait(m.b_freed[used % 2], (used // 2 + 1) % 2)
            T.tma_copy(
                inner[chain.slot(i) + chain.step, chain.v_head, chain.v_col : chain.v_col + SCAN_COLUMNS, 0:K],
                m.b[used % 2, :, :],
                barrier=m.b_loaded[used % 2],
            )
            if T.shuffle_elect(32):
                T.barrier_arrive(m.b_loaded[used % 2])
            for half in tuple(range(HALVES)):
                slot = (used * HALVES + half) % RING
                T.barrier_wait(m.freed[slot], ((used * HALVES + half) // RING + 1) % 2)
                T.tma_copy(
                    transitions[chain.slot(i), chain.v_head, half, 0:K, 0:K], m.m[slot, :, :], barrier=m.loaded[slot]
                )
                if T.shuffle_elect(32):
                    T.barrier_arrive(m.loaded[slot])
            used = used + 1


@T.macro
def load_chain_start(S, outer, chain: Chain, K):
    if chain.n < outer.shape[0]:
        for jk, jv in T.Parallel(K, SCAN_COLUMNS):
            S[jk, jv] = T.cast(outer[chain.n, chain.v_head, jk, chain.v_col + jv], "float32")
    else:
        T.fill(S, 0.0)


@T.macro
def split_state(S, m: ScanSmem, turn, K):
    """Writes S as high + low for the products of all the role's threads, and for the store warps."""
    T.barrier_wait(m.sent[turn % 2], (turn // 2 + 1) % 2)
    for jk, jv in T.Parallel(K, SCAN_COLUMNS):
        m.halves[turn % 2 * HALVES, jk, jv] = T.cast(S[jk, jv], M_DTYPE)
    for jk, jv in T.Parallel(K, SCAN_COLUMNS):
        m.halves[turn % 2 * HALVES + 1, jk, jv] = T.cast(
            S[jk, jv] - T.cast(T.cast(S[jk, jv], M_DTYPE), "float32"), M_DTYPE
        )
    pipeline.publish(m.staged, turn % 2)
    T.sync_threads(PRODUCT_BARRIER, 2 * K)


@T.macro
def load_states(state, inner, chain: Chain, row, K):
    for jk, jv in T.Parallel(K, SCAN_COLUMNS):
        state[jk, jv] = inner[row, chain.v_head, chain.v_col + jv, jk]


@T.macro
def multiply(chain: Chain, m: ScanSmem, outer, inner, carries, has_start, K):
    S = T.alloc_fragment((K, SCAN_COLUMNS), "float32")
    bits = T.alloc_var("int32")
    used = T.alloc_var("int32")
    turn = T.alloc_var("int32")
    ready = T.alloc_var("int32")  # whether the halves hold S
    bits = 0
    used = 0
    turn = 0
    ready = 0
    load_chain_start(S, outer, chain, K)
    for i in T.serial(chain.steps):
        carried(chain, carries, i, has_start, bits)
        if (bits >> (i % FLAGS)) & 1 != 0:
            if ready == 0:
                split_state(S, m, turn, K)
                turn = turn + 1
            T.barrier_wait(m.b_loaded[used % 2], used // 2 % 2)
            T.call_extern(
                "void", "flash_qla::load_b", S.access_ptr("w"),
                m.b.access_ptr("r", offset=used % 2 * (SCAN_COLUMNS * K)),
            )  # fmt: skip
            pipeline.arrive(m.b_freed, used % 2)
            for half in tuple(range(HALVES)):
                slot = (used * HALVES + half) % RING
                T.barrier_wait(m.loaded[slot], (used * HALVES + half) // RING % 2)
                for x in tuple(range(HALVES - half)):
                    T.wgmma_gemm(
                        m.m[slot, :, :], m.halves[(turn - 1) % 2 * HALVES + x, :, :], S, transpose_A=not chain.reverse,
                        policy=ROWS,
                    )  # fmt: skip
            T.wait_wgmma(0)
            pipeline.settle(S)
            for half in tuple(range(HALVES)):
                pipeline.arrive(m.freed, (used * HALVES + half) % RING)
            used = used + 1
            split_state(S, m, turn, K)
            turn = turn + 1
            ready = 1
        else:
            ready = 0
            # The next step may need b; its bit may not be here yet.
            if (bits >> (i % FLAGS)) & 2 != 0 or i % FLAGS == FLAGS - 1:
                load_states(S, inner, chain, chain.slot(i) + chain.step, K)


@T.macro
def store_steps(chain: Chain, m: ScanSmem, inner, carries, has_start, K):
    bits = T.alloc_var("int32")
    turn = T.alloc_var("int32")
    ready = T.alloc_var("int32")
    bits = 0
    turn = 0
    ready = 0
    for i in T.serial(chain.steps):
        carried(chain, carries, i, has_start, bits)
        if (bits >> (i % FLAGS)) & 1 != 0:
            if ready == 0:
                T.barrier_wait(m.staged[turn % 2], turn // 2 % 2)
                pipeline.arrive(m.sent, turn % 2)
                turn = turn + 1
            T.barrier_wait(m.staged[turn % 2], turn // 2 % 2)
            T.call_extern(
                "void", f"flash_qla::join_halves<{K}>",
                T.address_of(inner[chain.slot(i) + chain.step, chain.v_head, chain.v_col, 0]),
                m.halves.access_ptr("r", offset=turn % 2 * (HALVES * K * SCAN_COLUMNS)),
                m.halves.access_ptr("r", offset=(turn % 2 * HALVES + 1) * (K * SCAN_COLUMNS)),
            )  # fmt: skip
            pipeline.arrive(m.sent, turn % 2)
            turn = turn + 1
            ready = 1
        else:
            ready = 0


@T.macro
def run_chain(chain: Chain, m: ScanSmem, outer, inner, transitions, carries, has_start, K):
    tx = T.get_thread_binding()
    if tx < 2 * K:
        multiply(chain, m, outer, inner, carries, has_start, K)
    elif tx < 3 * K:
        store_steps(chain, m, inner, carries, has_start, K)
    else:
        load_steps(chain, m, transitions, inner, carries, has_start, K)


def make_scan(spec: ScanSpec):
    """Returns the prim_func of segment_scan."""
    K, V = spec.head_dim_k, spec.head_dim_v
    v_tiles = V // SCAN_COLUMNS
    num_v_heads = T.dynamic("num_v_heads")
    slots, m_slots = T.dynamic("slots m_slots")

    @T.prim_func
    def segment_scan(
        outer: state.strided_state("outer", spec.state_dtype, K, V), cu: program.cu_seqlens(),
        inner: T.Tensor((slots, num_v_heads, V, K), "float32"),
        transitions: T.Tensor((m_slots, num_v_heads, HALVES, K, K), M_DTYPE),
        carries: T.Tensor((m_slots, num_v_heads, 2), "int32"), num_seqs: T.int32, cu_step: T.int32, seq_len: T.int32,
        flat_tokens: T.int32, segment_tokens: T.int32, reverse: T.int32,
    ):  # fmt: skip
        with T.Kernel(num_seqs * num_v_heads * v_tiles, threads=3 * K + 32) as (block,):
            T.import_source(SCAN_SOURCE)
            warps = 2 * K // 32
            m = ScanSmem(
                m=T.alloc_shared((RING, K, K), M_DTYPE),
                b=T.alloc_shared((2, SCAN_COLUMNS, K), "float32"),
                halves=T.alloc_shared((2 * HALVES, K, SCAN_COLUMNS), M_DTYPE),
                loaded=T.alloc_barrier([1] * RING),
                freed=T.alloc_barrier([warps] * RING),
                b_loaded=T.alloc_barrier([1] * 2),
                b_freed=T.alloc_barrier([warps] * 2),
                staged=T.alloc_barrier([warps] * 2),
                sent=T.alloc_barrier([K // 32] * 2),
            )
            T.annotate_layout(layouts.swizzled(m.b))
            T.pdl_trigger()
            T.pdl_sync()  # by every thread of every CTA: only so may the kernels that follow rely on this one's end
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
                run_chain(Chain(True, first + steps, -1, **where), m, *tensors)
            else:
                run_chain(Chain(False, first, 1, **where), m, *tensors)

    return segment_scan


def segment_scan(inner, transitions, carries, outer, seqs: Sequences, split: Split, reverse=False):
    """Launches the scans, in place. Equations: C3, C4.

    Args:
        inner, transitions, carries: from `segment_ends`.
        outer: h0, reverse dht: logical states `[N, Hv, K, V]` or None for zeros.
    """
    device, (_, Hv, V, K) = inner.device, inner.shape
    outer = launch.present(outer, device, torch.float32, Hv, K, V)
    cu, cu_step, seq_len = launch.cu_arguments(seqs, device)
    build(make_scan, ScanSpec(launch.DTYPE_NAMES[outer.dtype], K, V), archs.of_device(device))(
        outer, cu, inner, transitions, carries, seqs.num_seqs, cu_step, seq_len, seqs.flat_tokens,
        split.segment_chunks * C, int(reverse),
    )  # fmt: skip


def entering_states(
    k, v, T_inv, g_cumsum, beta, h0, seqs: Sequences, split: Split, for_backward=False, ready=False
):  # fmt: skip
    """Computes the state entering each segment but the first ones. Two launches.

    Args:
        for_backward: also the transitions that only `leaving_cotangents` needs.
        ready: T_inv is what `solve` makes with `ready`.
    """
    slots, Hv, V, K = launch.num_segment_slots(seqs, split.segment_chunks), v.shape[2], v.shape[3], k.shape[3]
    entering = torch.empty((slots, Hv, V, K), dtype=torch.float32, device=k.device)
    transitions = torch.empty((slots, Hv, HALVES, K, K), dtype=launch.DTYPES[M_DTYPE], device=k.device)
    carries = torch.empty((slots, Hv, 2), dtype=torch.int32, device=k.device)
    segment_ends(
        entering, transitions, carries, k, v, T_inv, g_cumsum, beta, seqs, split, has_h0=h0 is not None,
        for_backward=for_backward, ready=ready,
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

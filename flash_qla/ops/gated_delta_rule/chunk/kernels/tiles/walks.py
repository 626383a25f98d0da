"""Persistent CTAs: which walks a CTA takes, found by one warp ahead of time and told to the others.

A walk is a (segment slot, value head, V tile); walk number `slot * jobs + v_head * v_tiles + v_tile`, jobs of them a
slot. The warp that loads runs into the next walk while the others finish this one, so it looks for walks and publishes
each in a ring of places in shared memory; a role reads a place where it needs it (registers are short) and leaves it
when the walk is done.

Which walks: CTA b takes walk b first. Where lengths may differ, further ones follow a list schedule: walks in order,
each to the CTA that is free first, a chunk taking one unit of time and a walk one more. Every CTA plays the same
schedule for itself on the sequences' lengths: no counter in global memory, and the same result each time. Where they
cannot differ (dense inputs), and where slots are segments, a CTA takes every num_ctas-th walk.
"""

from dataclasses import dataclass

import tilelang.language as T

from ...constants import CHUNK_SIZE as C
from . import pipeline, program

PLACES = 4
FIELDS = ("n", "slot", "segment", "ht_row", "batch", "start", "length", "k_head", "v_head", "v_col", "some")
PLACE_WORDS = 16
SCHEDULE_WORDS = 101  # of next_walk, then the number of the walk found last

SOURCE = r"""
namespace flash_qla {
__device__ __forceinline__ int quotient(int a, int b) { return (int)((unsigned)a / (unsigned)b); }
__device__ __forceinline__ int sequence_start(int const* cu, int cu_step, int rows, int n) {
  return min(max(cu[(long long)n * cu_step], 0), rows);
}
// By the first lane of a warp.
__device__ __forceinline__ void put_word(void const* to, int x) {
  if ((thread_index() & 31) == 0) *(int*)to = x;
}
__device__ __forceinline__ void put_words(void const* to, int x, int y, int z, int w) {
  if ((thread_index() & 31) == 0) *(int4*)to = make_int4(x, y, z, w);
}
// Walk `number` > 0 of a CTA, by one warp; numbers come in order. CTAs that become free together are a group, one a
// lane: its time and its size. A CTA is its group and a rank inside. More groups than lanes: one joins the nearest.
// words: 32 times, 32 sizes, 32 sequences' costs, then the CTA's group and rank, the sequence, walks left of it.
__device__ __forceinline__ int next_walk(void const* words, int number, int cta, int ctas, int const* cu, int cu_step,
                                         int rows, int num_seqs, int jobs) {
  int* state = (int*)words;
  int lane = thread_index() & 31, wanted = 1, walk = num_seqs * jobs;
  int time = 0, size = lane == 0 ? ctas : 0, costs = 0, group = 0, rank = cta, seq = -1, left = 0;
  if (number == 1) {
    wanted = 2;
  } else {
    time = state[lane], size = state[32 + lane], costs = state[64 + lane];
    group = state[96], rank = state[97], seq = state[98], left = state[99];
  }
#pragma unroll 1
  while (wanted) {
    if (left == 0) {
      if (++seq >= num_seqs) return num_seqs * jobs;
      if ((seq & 31) == 0) {
        int n = min(seq + lane, num_seqs - 1);
        int length = sequence_start(cu, cu_step, rows, n + 1) - sequence_start(cu, cu_step, rows, n);
        costs = 1 + (max(length, 0) + 63) / 64;
      }
      left = jobs;
    }
    unsigned first = __reduce_min_sync(~0u, size > 0 ? (unsigned)time << 5 | lane : ~0u);
    int from = first & 31, until = (int)(first >> 5) + __shfl_sync(~0u, costs, seq & 31);
    int members = __shfl_sync(~0u, size, from), taken = min(members, left), job = jobs - left, before = 0, to;
    left -= taken;
    unsigned same = __ballot_sync(~0u, size > 0 && time == until && lane != from);
    unsigned unused = __ballot_sync(~0u, size == 0);
    if (same)
      to = __ffs(same) - 1;
    else if (taken == members)
      to = from;
    else if (unused)
      to = __ffs(unused) - 1;
    else
      to = __reduce_min_sync(~0u, lane == from ? ~0u : (unsigned)abs(time - until) << 5 | lane) & 31;
    if (lane == to && (to == from || size == 0)) time = until;
    if (to != from) {
      before = __shfl_sync(~0u, size, to);
      size += lane == to ? taken : lane == from ? -taken : 0;
    }
    if (group == from) {
      if (rank < taken) {
        walk = seq * jobs + job + rank;
        group = to;
        rank += before;
        --wanted;
      } else {
        rank -= taken;
      }
    }
  }
  state[lane] = time, state[32 + lane] = size, state[64 + lane] = costs;
  if (lane == 0) state[96] = group, state[97] = rank, state[98] = seq, state[99] = left;
  __syncwarp();
  return walk;
}
}  // namespace flash_qla
"""


@dataclass
class Ring:
    """Places in shared memory. placed: a walk is known (1 arrival); left: every reading warp has left it."""

    place: object
    schedule: object
    placed: object
    left: object


@dataclass
class Walk:
    """Where a walk lies: segment (number `segment`, slot `slot`) of sequence n, a head, a slice of V. Expressions.

    ht_row: n in the sequence's last segment, out of range elsewhere. base: chunks of the CTA's earlier walks.
    some: 0 after the CTA's last walk; n is out of range then; None where a CTA has one walk.
    """

    n: object
    slot: object
    segment: object
    ht_row: object
    batch: object
    start: object
    length: object
    k_head: object
    v_head: object
    v_col: object
    chunks: object
    base: object = 0
    some: object = None


@dataclass
class Chunk:
    """A chunk's number among all chunks of its CTA. A field: giving a loop's variable a second name renames it."""

    number: object


@T.macro
def _keep(c):
    return c


def chunk(walk: Walk, i) -> Chunk:
    """Chunk i of a walk, whose number is a variable of its own where it is a sum."""
    return Chunk(i if isinstance(walk.base, int) else _keep(walk.base + i))


def allocate(readers: int) -> Ring:
    """Allocates the ring; readers: warps that read places, the finding one aside."""
    return Ring(
        place=T.alloc_shared((PLACES, PLACE_WORDS), "int32"),
        schedule=T.alloc_shared((SCHEDULE_WORDS,), "int32"),
        placed=T.alloc_barrier([1] * PLACES),
        left=T.alloc_barrier([readers] * PLACES),
    )


def at(ring: Ring, number, base=0) -> Walk:
    """Walk `number` of the CTA, read from shared memory wherever it is used."""
    fields = {name: ring.place[number % PLACES, field] for field, name in enumerate(FIELDS)}
    return Walk(**fields, chunks=T.ceildiv(fields["length"], C), base=base)


def found(ring: Ring):
    """Expression: number of the walk that `find` found last (the finding warp only)."""
    return ring.schedule[SCHEDULE_WORDS - 1]


def quotient(a, b):
    """Call expression: a // b of numbers that are not negative."""
    return T.call_extern("int32", "flash_qla::quotient", a, b)


def put_words(ring: Ring, number, field, *words):
    """Call expression: four fields of a place. "r" although it stores: TileLang would fence the role's next TMA."""
    place = ring.place.access_ptr("r", offset=number % PLACES * PLACE_WORDS + field)
    return T.call_extern("void", "flash_qla::put_words", place, *words)


@T.macro
def wait(ring: Ring, number):
    T.barrier_wait(ring.placed[number % PLACES], (number // PLACES) % 2)


@T.macro
def leave(ring: Ring, number: T.Ref, base: T.Ref):
    """A reading warp is done with a walk and waits for the next one."""
    base = base + at(ring, number).chunks
    pipeline.arrive(ring.left, number % PLACES)
    number = number + 1
    wait(ring, number)


@T.macro
def find(ring: Ring, count, lengths, grid, v_tiles, v_width):
    """One warp finds walk number `count` of its CTA and publishes it.

    lengths: (cu, cu_step, seq_len, flat_tokens, num_seqs).
    grid: (block, num_ctas, segment_tokens, num_slots, num_k_heads, num_v_heads).
    """
    cu, cu_step, seq_len, flat_tokens, num_seqs = lengths
    block, num_ctas, segment_tokens, num_slots, num_k_heads, num_v_heads = grid
    jobs = num_v_heads * v_tiles
    n, batch, start, length, segment, ht_row, slot, column, some, number, walk = (
        T.alloc_var("int32") for _ in range(11)
    )
    number = count
    T.barrier_wait(ring.left[number % PLACES], (number // PLACES + 1) % 2)
    T.sync_warp()
    walk = block + number * num_ctas
    if number > 0:
        if cu_step != 0 and segment_tokens == 0:
            if num_seqs * jobs > num_ctas:
                walk = T.call_extern(
                    "int32", "flash_qla::next_walk", ring.schedule.access_ptr("r"), number, block, num_ctas,
                    cu.access_ptr("r"), cu_step, flat_tokens, num_seqs, jobs,
                )  # fmt: skip
    slot = quotient(walk, jobs)
    column = walk - slot * jobs
    some = T.if_then_else(slot < num_slots, 1, 0)
    slot = T.min(slot, num_slots - 1)
    program.locate_segment(
        cu, cu_step, seq_len, flat_tokens, num_seqs, segment_tokens, slot,
        n, batch, start, length, segment, ht_row,
    )  # fmt: skip
    if some == 0:  # no state to load
        n = program.NO_ROW
        segment = 0
    put_words(ring, number, 0, n, slot, segment, ht_row)
    put_words(ring, number, 4, batch, start, length, quotient(column // v_tiles * num_k_heads, num_v_heads))
    put_words(ring, number, 8, column // v_tiles, column % v_tiles * v_width, some, 0)
    T.call_extern("void", "flash_qla::put_word", ring.schedule.access_ptr("r", offset=SCHEDULE_WORDS - 1), number)
    pipeline.arrive(ring.placed, number % PLACES)

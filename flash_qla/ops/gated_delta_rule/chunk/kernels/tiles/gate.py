"""A CTA's tasks and the gates of one chunk for four neighbouring value heads, in a CTA of four warps.

Gates: in memory the four heads of a row lie side by side, so a row is one asynchronous copy of a lane, and one store of
its sums; a warp copies 16 rows of both g and beta. Between the two, warp h sums head h: lane l takes rows 2 l and
2 l + 1. Order, for a chunk: fetch; wait, barrier; sum; barrier; store, and after it the next chunk's fetch by the same
lanes. All is CUDA in SOURCE (after `fragments.LEAN_SOURCE`); the functions below are call expressions. A task and the
cursor are TASK_WORDS words each in shared memory, 16-byte aligned; the names of a task's words are in its order.
"""

import tilelang.language as T

from ...constants import GATE_FLOOR

LOG2E = 1.4426950408889634
TASK_WORDS = 8
BATCH, START, ROWS, FIRST_HEAD, HEADS, PRODUCTS, LEFT, FIRST_KEY = range(8)
GROUP = 6  # of a cursor: value heads a key head

SOURCE = r"""
namespace flash_qla {
constexpr float LOG2E = 1.4426950408889634f;
// What a CTA works on, in shared memory.
struct Task {
  int batch, start, rows, first_head, heads, products, left, first_key;  // left: first_head's place in its group
};
// Where it looks next (slots are counted from the last one: the next kernel finds its first ones in the L2 cache), and
// the sequence that it was in last: its first slot, batch row, first token there, tokens.
struct Cursor {
  int slot, quad, first, batch, start, length, group, unused;
};
__device__ __forceinline__ int sequence_start(int const* cu, int cu_step, int seq_len, int tokens, int n) {
  return cu_step == 0 ? n * seq_len : min(max(cu[(long long)n * cu_step], 0), tokens);
}
// The next task with a chunk; rows = 0: there is none. By one warp.
__device__ __forceinline__ void find_task(void* task, void* cursor, int const* cu, int cu_step, int seq_len, int tokens,
                                          int num_seqs, int num_slots, int quads, int step_slots, int step_quads,
                                          int num_v_heads) {
  Cursor c;
  *(int4*)&c = *(int4 const*)cursor;
  *((int4*)&c + 1) = *((int4 const*)cursor + 1);
  int lane = thread_index() & 31;
  Task t = {0, 0, 0, 0, 0, 1, 0, 0};
  __syncwarp();
#pragma unroll 1
  while (c.slot < num_slots && t.rows <= 0) {
    int slot = num_slots - 1 - c.slot;
    if ((unsigned)(slot - c.first) * 64 >= (unsigned)c.length) {  // another sequence: the last n that starts by here
      int n = 0, count = num_seqs;
#pragma unroll 1
      while (count > 1) {
        int step = (count + 31) / 32, m = n + lane * step, hit = 0;
        if (lane * step < count) hit = sequence_start(cu, cu_step, seq_len, tokens, m) / 64 + m <= slot;
        int before = max(__popc(__ballot_sync(0xffffffffu, hit)) - 1, 0) * step;
        n += before;
        count = min(step, count - before);
      }
      int start = sequence_start(cu, cu_step, seq_len, tokens, n);
      c.first = start / 64 + n;
      c.length = max(sequence_start(cu, cu_step, seq_len, tokens, n + 1) - start, 0);
      c.batch = cu_step == 0 ? n : 0;
      c.start = cu_step == 0 ? 0 : start;
    }
    int inside = (slot - c.first) * 64;
    t.batch = c.batch;
    t.start = c.start + inside;
    t.rows = min(c.length - inside, 64);
    t.first_head = c.quad * 4;
    c.quad += step_quads;
    c.slot += step_slots + (c.quad >= quads);
    c.quad -= c.quad >= quads ? quads : 0;
  }
  t.rows = max(t.rows, 0);
  t.heads = min(num_v_heads - t.first_head, 4);
  float reciprocal = 1.f / c.group;
  t.first_key = (t.first_head + 0.5f) * reciprocal;
  t.left = t.first_head - t.first_key * c.group;
  t.products = (int)((t.first_head + t.heads - 0.5f) * reciprocal) - t.first_key + 1;
  if (lane == 0) {
    *(int4*)task = make_int4(t.batch, t.start, t.rows, t.first_head);
    *((int4*)task + 1) = make_int4(t.heads, t.products, t.left, t.first_key);
    *(int4*)cursor = make_int4(c.slot, c.quad, c.first, c.batch);
    *((int4*)cursor + 1) = make_int4(c.start, c.length, c.group, 0);
  }
}
// The chunk's gates in shared memory, raw: rows of 16 bytes, even rows first. Words 0 to 255: four gates in fp32 (later
// the sums). From word 256: four betas; when both are 16-bit, the gates behind them. From word 512: 16-bit gates beside
// fp32 betas, 8 bytes a row.
__device__ __forceinline__ int raw_row(int row) { return (row & 1) * 32 + (row >> 1); }
template <class G, class B>
__device__ __forceinline__ G* raw_gates(float* raw, int row) {
  if constexpr (sizeof(G) == 4) return (G*)(raw + raw_row(row) * 4);
  else if constexpr (sizeof(B) == 2) return (G*)(raw + 256 + raw_row(row) * 4 + 2);
  else return (G*)(raw + 512 + raw_row(row) * 2);
}
// Four neighbouring heads of a row to shared memory, not waited for; the last one that exists stands in for the others.
template <class E>
__device__ __forceinline__ void fetch_heads(E* slot, E const* p, int stride, int heads) {
  if (stride == 1 && heads == 4 && ((unsigned long long)p & (4 * sizeof(E) - 1)) == 0) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((unsigned)__cvta_generic_to_shared(slot)), "l"(p),
                 "n"(4 * sizeof(E)) : "memory");
  } else {
#pragma unroll 1
    for (int h = 0; h < 4; ++h) slot[h] = p[(long long)min(h, heads - 1) * stride];
  }
}
// A warp's 16 rows: gates by lanes 0 to 15, betas by the others.
template <class G, class B>
__device__ __forceinline__ void fetch_gates(float* raw, void const* task, G const* g, long long g_batch, int g_token,
                                            int g_head, B const* beta, long long b_batch, int b_token, int b_head) {
  int4 t = *(int4 const*)task;
  int heads = ((int const*)task)[4];
  unsigned thread = thread_index();
  int row = (thread >> 5) * 16 + (thread & 15);
  bool second = thread & 16;
  int stride = second ? b_head : g_head;
  long long from = t.x * (second ? b_batch : g_batch) + (long long)t.w * stride;
  from += (long long)(t.y + min(row, t.z - 1)) * (second ? b_token : g_token);
  B* beta_slot = (B*)(raw + 256 + raw_row(row) * 4);
  if constexpr (sizeof(G) == sizeof(B)) {
    G* slot = second ? (G*)beta_slot : raw_gates<G, B>(raw, row);
    fetch_heads(slot, (second ? (G const*)beta : g) + from, stride, heads);
  } else {
    if (second) fetch_heads(beta_slot, beta + from, stride, heads);
    else fetch_heads(raw_gates<G, B>(raw, row), g + from, stride, heads);
  }
}
__device__ __forceinline__ void wait_fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// The warp's head: sums of the clamped gates in raw's place, pairs (gate as log2, -beta). Equations: F0, F1.
// A mild chunk (no |sum| above `mild`; none if that is negative) gets its 64 -beta instead of pairs. Returns that.
template <class G, class B>
__device__ __forceinline__ int sum_gates(float* raw, float* pairs, int rows, float floor, float mild, G const*,
                                         B const*) {
  unsigned thread = thread_index(), lane = thread & 31, head = thread >> 5;
  float v[2], b[2], before;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    bool inside = 2 * lane + r < rows;
    v[r] = inside ? fmaxf((float)raw_gates<G, B>(raw, 2 * lane + r)[head], floor) : 0.f;
    b[r] = inside ? -(float)((B*)(raw + 256 + (lane + 32 * r) * 4))[head] : 0.f;
  }
  float sum = v[0] + v[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
    asm volatile("{ .reg .pred p; .reg .f32 t; shfl.sync.up.b32 t|p, %0, %1, 0, -1; @p add.f32 %0, %0, t; }"
                 : "+f"(sum) : "r"(d));
  asm volatile("{ .reg .pred p; shfl.sync.up.b32 %0|p, %1, 1, 0, -1; @!p mov.f32 %0, 0f00000000; }"
               : "=f"(before) : "f"(sum));
  v[0] += before;
  raw[lane * 4 + head] = v[0];
  raw[(lane + 32) * 4 + head] = sum;
  // Only of rows that exist, as the forward walk decides: sums behind them are the same but for rounding.
  float largest = fmaxf(2 * lane < rows ? fabsf(v[0]) : 0.f, 2 * lane + 1 < rows ? fabsf(sum) : 0.f);
  int strong = __any_sync(~0u, !(largest <= mild));
  if (strong) *(float4*)(pairs + 4 * lane) = make_float4(v[0] * LOG2E, b[0], sum * LOG2E, b[1]);
  else *(float2*)(pairs + 2 * lane) = make_float2(b[0], b[1]);
  return !strong;
}
// A warp's 16 rows of sums to memory, by the lanes that will fetch the next ones over them.
__device__ __forceinline__ void store_sums(float* target, int num_tokens, int num_heads, float const* raw,
                                           void const* task) {
  int4 t = *(int4 const*)task;
  int heads = ((int const*)task)[4];
  unsigned thread = thread_index();
  int row = (thread >> 5) * 16 + (thread & 15);
  if ((thread & 16) == 0 && row < t.z) {
    float4 v = *(float4 const*)(raw + raw_row(row) * 4);
    float* p = target + ((long long)t.x * num_tokens + t.y + row) * num_heads + t.w;
    if (heads == 4 && ((unsigned long long)p & 15) == 0) {
      *(float4*)p = v;
    } else {
      p[0] = v.x;
      if (heads > 1) p[1] = v.y;
      if (heads > 2) p[2] = v.z;
      if (heads > 3) p[3] = v.w;
    }
  }
}
}  // namespace flash_qla
"""


def raw_words(gate_dtype: str, beta_dtype: str) -> int:
    """Words of shared memory for a chunk's raw gates and betas, aligned to 16 bytes."""
    return 640 if beta_dtype == "float32" != gate_dtype else 512


def first_cursor(block, quads, group):
    """Words of the cursor of CTA `block` before its first task."""
    return T.truncdiv(block, quads), block % quads, 0, 0, 0, 0, group, 0


def find(words, task, cursor, cu_arguments, num_slots, quads, steps, num_heads):
    """Writes the next task with a chunk and moves the cursor; by one warp.

    Args:
        words, task, cursor: shared memory, and where in it the two lie.
        cu_arguments: cu, cu_step, seq_len, flat_tokens, num_seqs, as in `program.py`.
        num_slots, quads: chunk slots, quads of value heads of each.
        steps: how many slots and quads the CTA's next task lies behind its last one.
    """
    return T.call_extern(
        "handle", "flash_qla::find_task", T.address_of(words[task]), T.address_of(words[cursor]),
        T.address_of(cu_arguments[0][0]), *cu_arguments[1:], num_slots, quads, *steps, num_heads,
    )  # fmt: skip


def fetch(raw, base, words, task, g, g_strides, beta, beta_strides):
    """Starts the copies of a task that has rows. g, beta: `[B, T, Hv]`. Rows past the chunk's end take its last one."""
    return T.call_extern(
        "handle", "flash_qla::fetch_gates", T.address_of(raw[base]), T.address_of(words[task]),
        T.address_of(g[0, 0, 0]), *g_strides, T.address_of(beta[0, 0, 0]), *beta_strides,
    )  # fmt: skip


def wait():
    """Waits for the thread's own copies."""
    return T.call_extern("handle", "flash_qla::wait_fetched")


def sum_rows(raw, base, pairs, first_pair, rows, mild, g, beta):
    """The warp's head: pairs of (cumulative gate as log2, -beta), and its sums in raw. Equations: F0, F1.

    Rows past the chunk's end take the last valid row's sum, and beta 0. g, beta: only their types matter. Value: 1
    where no sum is above `mild` (natural log), and then -beta is all that is written; 0 elsewhere.
    """
    return T.call_extern(
        "int32", "flash_qla::sum_gates", T.address_of(raw[base]), T.address_of(pairs[first_pair]), rows,
        T.float32(GATE_FLOOR), mild, T.address_of(g[0, 0, 0]), T.address_of(beta[0, 0, 0]),
    )  # fmt: skip


def store(target, num_tokens, num_heads, raw, base, words, task):
    """The sums of the chunk's own rows to target, `[B, T, Hv]` fp32, contiguous."""
    return T.call_extern(
        "handle", "flash_qla::store_sums", T.address_of(target[0, 0, 0]), num_tokens, num_heads,
        T.address_of(raw[base]), T.address_of(words[task]),
    )  # fmt: skip

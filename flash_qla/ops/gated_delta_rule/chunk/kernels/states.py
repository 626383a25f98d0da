"""The backward's two recurrences in one launch: the state entering, and the state cotangent leaving, every chunk.

Roles, barriers and shared memory: state_walk.py. Where sequences are split into segments, each segment is a walk from
its own start.

Grid: x = 2 * slots * Hv * V tiles CTAs, the reverse walks (the longer ones) first, the V tile innermost; slots: of
segments, or the sequences.
"""

import tilelang.language as T
import torch

from flash_qla import arch as archs

from ..constants import CHUNK_SIZE as C
from ..sequences import Sequences
from . import launch
from .build import BARE_PASS_CONFIGS, build
from .state_walk import V_TILE, Halves, Spec, Walk, allocate, run_roles, sources
from .tiles import program

PASS_CONFIGS = BARE_PASS_CONFIGS


def specs(dtype, head_dim_k=128, head_dim_v=128, beta_dtype="float32", h0_dtype="float32", dht_dtype="float32"):
    """Every Spec that a configuration can ask for (warm-up and the lowering test)."""
    counts = (1,) if head_dim_v == V_TILE else (1, 2)
    return [Spec(dtype, head_dim_k, head_dim_v, beta_dtype, h0_dtype, dht_dtype, n) for n in counts]


def make(spec: Spec):
    """Returns the prim_func of a specification."""
    t = program.Tensors.of(spec)
    num_k_heads, num_v_heads = t.num_k_heads, t.num_v_heads
    slots, state_slots, entering_slots, leaving_slots = T.dynamic("slots state_slots entering_slots leaving_slots")

    @T.prim_func
    def backward_states(
        q: t.keys("q"), k: t.keys("k"), v: t.values("v"), do: t.values("do"), T_inv: t.inverse(),
        g_cumsum: t.per_head(), beta: t.gates("beta", spec.beta_dtype), h0: t.state("h0", spec.h0_dtype),
        dht: t.state("dht", spec.dht_dtype), dh0: t.state("dh0", spec.h0_dtype), entering: t.states(entering_slots),
        leaving: t.states(leaving_slots), cu: program.cu_seqlens(),
        S: T.Tensor((state_slots, num_v_heads, V_TILE, spec.head_dim_k), spec.dtype),
        dv: t.per_head(spec.head_dim_v, dtype=spec.dtype), dS: t.states(slots, spec.dtype), scale: T.float32,
        num_seqs: T.int32, cu_step: T.int32, seq_len: T.int32, segment_tokens: T.int32, num_segments: T.int32,
    ):  # fmt: skip
        with T.Kernel(2 * num_segments * num_v_heads * spec.v_tiles, threads=spec.threads) as (block,):
            T.import_source(sources(spec.dtype))
            m = allocate(spec)
            n, seq_batch, start, length, pair = (T.alloc_var("int32") for _ in range(5))
            chunks, updates, k_head, v_head, first_slot = (T.alloc_var("int32") for _ in range(5))
            slot, segment, last_of, dh0_row = (T.alloc_var("int32") for _ in range(4))
            num_pairs = num_segments * num_v_heads * spec.v_tiles
            pair = block % num_pairs
            slot = pair // spec.v_tiles // num_v_heads
            v_head = pair // spec.v_tiles - slot * num_v_heads
            k_head = v_head // (num_v_heads // num_k_heads)
            flat_tokens = t.batch * t.num_tokens
            lengths = (cu, cu_step, seq_len, flat_tokens)
            program.locate_segment(
                *lengths, num_seqs, segment_tokens, slot, n, seq_batch, start, length, segment, last_of
            )
            chunks = T.ceildiv(length, C)
            first_slot = program.offset(*lengths, n) // C + n + segment * (segment_tokens // C)
            dh0_row = T.if_then_else(segment == 0, n, program.NO_ROW)
            where = dict(
                n=n, slot=slot, last_row=dh0_row, batch=seq_batch, start=start, length=length, chunks=chunks,
                updates=updates, first_slot=first_slot, k_head=k_head, v_head=v_head,
                v_col=pair % spec.v_tiles * spec.width,
            )  # fmt: skip
            inputs = (T_inv, g_cumsum, beta, scale)
            if block < num_pairs:
                updates = T.if_then_else(dh0_row < dh0.shape[0], chunks, T.max(chunks - 1, 0))
                walk = Walk(True, inner=last_of - n, **where)
                run_roles(spec, m, walk, q, k, do, *inputs, dS, dht, leaving, dh0)
            else:
                updates = T.max(chunks - 1, 0)
                stored = S if spec.head_dim_v == V_TILE else Halves(S, dv, slots + n)
                run_roles(spec, m, Walk(False, inner=segment, **where), q, k, v, *inputs, stored, h0, entering, None)

    return backward_states


def num_state_slots(seqs: Sequences, head_dim_v: int) -> int:
    """Slots of S: those of the chunks, and where V has two tiles one for each sequence (`state_walk.Halves`)."""
    return seqs.max_slots + (seqs.num_seqs if head_dim_v > V_TILE else 0)


def backward_states(
    q, k, v, T_inv, g_cumsum, beta, do, scale, h0, dht, dh0, seqs: Sequences, entering=None, leaving=None, *, dv
):
    """Runs both recurrences.

    Args:
        q, k: `[B, T, Hq, K]`; v, do: `[B, T, Hv, V]`; any strides that TMA can read.
        T_inv, g_cumsum: from `solve`, contiguous; beta: `[B, T, Hv]`.
        scale: factor of q.
        h0, dht: `[N, Hv, K, V]` logical (strided) or None for zeros.
        dh0: `[N, Hv, K, V]` logical destination of the reverse state before the first chunk, or None.
        entering, leaving: `SegmentStates` of both walks where every segment starts at once (one split), or None.
        dv: `[B, T, Hv, V]` contiguous in k's dtype: room for half of S where V has two tiles.

    Returns:
        S and dS in k's dtype: transposed state entering, state cotangent leaving, each chunk. dS: `[slots, Hv, V, K]`,
        S: `[num_state_slots, Hv, 64, K]`, the rest of it in dv (`state_walk.Halves`). Slots that no chunk owns are not
        written.
    """
    device = k.device
    K, V, Hv = k.shape[-1], v.shape[-1], v.shape[2]
    h0_dtype = next((x.dtype for x in (h0, dh0, dht) if x is not None), torch.float32)
    dht_dtype = torch.float32 if dht is None else dht.dtype
    spec = Spec(
        launch.DTYPE_NAMES[k.dtype], K, V, launch.DTYPE_NAMES[beta.dtype], launch.DTYPE_NAMES[h0_dtype],
        launch.DTYPE_NAMES[dht_dtype],
        launch.num_value_warpgroups(2 * launch.num_walks(seqs, entering) * Hv, V, archs.num_sms(device)),
    )  # fmt: skip
    kernel = build(make, spec, archs.of_device(device))
    h0 = launch.present(h0, device, h0_dtype, Hv, K, V)
    dht = launch.present(dht, device, dht_dtype, Hv, K, V)
    dh0 = launch.present(dh0, device, h0_dtype, Hv, K, V)
    S = torch.empty((num_state_slots(seqs, V), Hv, V_TILE, K), dtype=k.dtype, device=device)
    dS = torch.empty((seqs.max_slots, Hv, V, K), dtype=k.dtype, device=device)
    q, k, v, do = (launch.tma_ready(x) for x in (q, k, v, do))
    cu, cu_step, seq_len = launch.cu_arguments(seqs, device)
    starts_forward, segment_tokens, num_slots = launch.segment_arguments(seqs, entering, device, Hv, V, K)
    starts_reverse, _, _ = launch.segment_arguments(seqs, leaving, device, Hv, V, K)
    kernel(
        q, k, v, do, T_inv, g_cumsum, beta, h0, dht, dh0, starts_forward, starts_reverse, cu, S, dv, dS, float(scale),
        seqs.num_seqs, cu_step, seq_len, segment_tokens, num_slots,
    )  # fmt: skip
    return S, dS

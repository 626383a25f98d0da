"""Fused forward (Hopper): walks a sequence's chunks with the state in registers. Equations F3 to F8.

Roles, barriers and shared memory: fused_roles.py. Here every CTA has one walk, and the host chooses the variant;
fused_walks.py has CTAs that take several. Grid: x = (sequence or segment, value head, V tile), the V tile innermost.

Launched as a programmatic dependent: CTAs may start while the launch before this one ends. Where that is the solve of
T_inv and g_cumsum (follows_solve), which itself starts only after everything older is complete, the only threads that
wait for it (`T.pdl_sync`) are those that read these two: load before its first T, gate before its first gate, and
load's prefetch after them. Anything else may have written the other inputs, so all threads wait first.
"""

import tilelang.language as T

from flash_qla import arch as archs

from ..constants import CHUNK_SIZE as C
from . import fused_roles as roles
from . import fused_walks, launch
from .build import BARE_PASS_CONFIGS, build
from .fused_roles import V_TILE, Smem, Spec
from .tiles import fragments, pipeline, program, rows, scores, state
from .tiles.walks import Walk

PASS_CONFIGS = BARE_PASS_CONFIGS


@T.macro
def load_role(spec: Spec, m: Smem, walk: Walk, q, k, v, T_inv, g_cumsum, beta):
    for i in T.serial(walk.chunks):
        stage = i % roles.STAGES
        left = walk.start + i * C
        right = left + C
        T.barrier_wait(m.freed[stage], (i // roles.STAGES + 1) % 2)
        roles.load_chunk(spec, m, walk, i, stage, left, right, q, k, v, T_inv)
        roles.prefetch_gates(walk, i + roles.PREFETCH_CHUNKS, g_cumsum, beta)


@T.macro
def value_role(spec: Spec, m: Smem, walk: Walk, h0, starts, ht, h, first_chunk):
    f = roles.allocate_tiles(spec)
    mode = T.alloc_var("int32")
    last = walk.chunks - 1
    state.load_start(
        f.S, h0, starts, walk.n, walk.slot, walk.segment, walk.v_head, walk.v_col, m.width, spec.head_dim_k
    )
    pipeline.settle(f.S)  # keeps S in one place: bf16 states spilled without
    if last >= 0:
        if spec.store_h:
            roles.store_entering(spec, m, f, walk, h, first_chunk, 0)
        roles.start_walk(spec, m, walk, f, mode)
        for i in T.serial(last):
            roles.next_chunk(spec, m, walk, f, i, mode, h, first_chunk)
        roles.last_chunk(spec, m, walk, f, last, mode)
    if walk.ht_row < ht.shape[0]:
        roles.store_state(spec, f, ht, walk.ht_row, walk)


def make(spec: Spec):
    """Returns the prim_func of a specification."""
    if spec.persistent:
        return fused_walks.make(spec)
    wgs = spec.value_warpgroups
    v_tiles = spec.head_dim_v // (V_TILE * wgs)
    threads = 128 * (2 + wgs)
    load_regs, scores_regs, value_regs = roles.REGISTERS[wgs]
    t = program.Tensors.of(spec)
    num_k_heads, num_v_heads = t.num_k_heads, t.num_v_heads
    start_slots = T.dynamic("start_slots")

    @T.prim_func
    def fused_forward(
        q: t.keys("q"), k: t.keys("k"), v: t.values("v"), T_inv: t.inverse(), g_cumsum: t.per_head(),
        beta: t.gates("beta", spec.beta_dtype), h0: t.state("h0", spec.h0_dtype), starts: t.states(start_slots),
        cu: program.cu_seqlens(), o: t.values("o"), ht: t.state("ht", spec.ht_dtype), h: t.state("h", spec.dtype),
        scale: T.float32, num_seqs: T.int32, cu_step: T.int32, seq_len: T.int32, segment_tokens: T.int32,
        num_slots: T.int32, follows_solve: T.int32, ready: T.int32,
    ):  # fmt: skip
        with T.Kernel(num_slots * num_v_heads * v_tiles, threads=threads) as (block,):
            T.import_source(
                fragments.LEAN_SOURCE + rows.SOURCE + state.LEAN_SOURCE + scores.source(spec.dtype, roles.UNROLL[wgs])
            )
            if follows_solve == 0:
                T.pdl_sync()
            m = roles.allocate(spec)
            n, seq_batch, start, length = (T.alloc_var("int32") for _ in range(4))
            slot, segment, ht_row = (T.alloc_var("int32") for _ in range(3))
            chunks, k_head, v_head, first_chunk = (T.alloc_var("int32") for _ in range(4))
            slot = block // v_tiles // num_v_heads
            v_head = block // v_tiles - slot * num_v_heads
            k_head = v_head // (num_v_heads // num_k_heads)
            flat_tokens = t.batch * t.num_tokens
            lengths = (cu, cu_step, seq_len, flat_tokens, num_seqs)
            program.locate_segment(*lengths, segment_tokens, slot, n, seq_batch, start, length, segment, ht_row)
            chunks = T.ceildiv(length, C)
            if spec.store_h:
                program.first_chunk(*lengths[:-1], C, n, first_chunk)
                first_chunk = first_chunk + segment * (segment_tokens // C)
            walk = Walk(
                n=n, slot=slot, segment=segment, ht_row=ht_row, batch=seq_batch, start=start, length=length,
                k_head=k_head, v_head=v_head, v_col=block % v_tiles * (V_TILE * wgs), chunks=chunks,
            )  # fmt: skip
            tx = T.get_thread_binding()
            if tx < 128:
                pipeline.set_registers(load_regs, threads)
                if tx < 32:
                    load_role(spec, m, walk, q, k, v, T_inv, g_cumsum, beta)
                elif tx < 64:
                    rows.zero_tail(o, *lengths, walk.n, walk.v_head, walk.v_col, m.width)
                    roles.store_role(m, walk, o)
                else:
                    roles.gate_role(spec, m, walk, g_cumsum, beta, scale)
            elif tx < 256:
                pipeline.set_registers(scores_regs, threads)
                roles.scores_role(spec, m, walk, ready)
            else:
                pipeline.set_registers(value_regs, threads)
                value_role(spec, m, walk, h0, starts, ht, h, first_chunk)

    return fused_forward


def specs(dtype, beta_dtype, h0_dtype, ht_dtype, head_dim_k, head_dim_v, store_h=False) -> list[Spec]:
    """Every variant that a configuration can ask for."""
    return [
        Spec(dtype, beta_dtype, h0_dtype, ht_dtype, head_dim_k, head_dim_v, wgs, store_h, persistent)
        for wgs in range(1, head_dim_v // V_TILE + 1)
        for persistent in ((False, True) if wgs == 2 and head_dim_k == 128 and not store_h else (False,))
    ]


def fused_forward(
    o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs, entering=None, follows_solve=False, ready=False
):  # fmt: skip
    """Launches the walk. Equations: F3 to F8.

    Args:
        o: `[B, T, Hv, V]` destination in q's dtype, any strides; rows of no sequence become zero.
        ht: logical `[N, Hv, K, V]` destination of the final state (any strides) or None.
        h: logical `[total_chunks, Hv, K, V]` destination of the states entering the chunks, k's dtype, or None.
        q, k, v: `[B, T, H, D]`, native head sizes; copied when TMA cannot read them through their strides.
        T_inv: `[B, T, Hv, C]` contiguous, the gated inverse without beta.
        g_cumsum: `[B, T, Hv]` fp32 contiguous, natural log.
        beta: `[B, T, Hv]` fp32, bf16 or fp16, any strides.
        scale: factor of q.
        h0: logical `[N, Hv, K, V]` initial state (any strides) or None.
        seqs: the sequences.
        entering: `SegmentStates` where every segment starts at once, None for one walk per sequence.
        follows_solve: the stream's last launch is the solve that makes T_inv and g_cumsum, everything else was there
            before it.
        ready: T_inv is what `solve` makes with `ready`.
    """
    device, num_v_heads, head_dim_v, head_dim_k = v.device, v.shape[2], v.shape[3], k.shape[3]
    if seqs.num_seqs == 0 or num_v_heads == 0:
        o.zero_()
        return
    names = launch.DTYPE_NAMES
    ht_dtype = names[ht.dtype] if ht is not None else "float32"
    num_sms = archs.num_sms(device)
    warpgroups = launch.num_value_warpgroups(launch.num_walks(seqs, entering) * num_v_heads, head_dim_v, num_sms)
    spec = Spec(
        dtype=names[q.dtype],
        beta_dtype=names[beta.dtype],
        h0_dtype=names[h0.dtype] if h0 is not None else ht_dtype,
        ht_dtype=ht_dtype,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        value_warpgroups=warpgroups,
        store_h=h is not None,
        persistent=head_dim_k == 128  # 64 spills
        and h is None
        and entering is None
        and launch.has_persistent_walks(seqs, num_v_heads, warpgroups, num_sms),
    )
    launch_spec(spec, o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs, entering, follows_solve, ready)


def launch_spec(
    spec, o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs, entering=None, follows_solve=False, ready=False
):  # fmt: skip
    """`fused_forward` with the variant chosen by the caller (the planner, tests, tools)."""
    device, trailing = v.device, (v.shape[2], spec.head_dim_k, spec.head_dim_v)
    h0 = launch.present(h0, device, launch.DTYPES[spec.h0_dtype], *trailing)
    ht = launch.present(ht, device, launch.DTYPES[spec.ht_dtype], *trailing)
    h = launch.present(h, device, launch.DTYPES[spec.dtype], *trailing)
    cu, cu_step, seq_len = launch.cu_arguments(seqs, device)
    starts, segment_tokens, num_slots = launch.segment_arguments(
        seqs, entering, device, v.shape[2], spec.head_dim_v, spec.head_dim_k
    )
    grid = ()
    if spec.persistent:
        num_walks = num_slots * v.shape[2] * (spec.head_dim_v // (V_TILE * spec.value_warpgroups))
        grid = (min(num_walks, archs.num_sms(device)),)
    kernel = build(make, spec, archs.of_device(device))
    given = (q, k, v, o)
    q, k, v, target = (launch.tma_ready(x) for x in given)
    if follows_solve:  # a copy made just now is the stream's last launch
        copied = any(x.data_ptr() != y.data_ptr() for x, y in zip(given, (q, k, v, target)))
        follows_solve = not (copied or (seqs.is_varlen and cu.data_ptr() != seqs.cu_seqlens.data_ptr()))
    kernel(
        q, k, v, T_inv, g_cumsum, beta, h0, starts, cu, target, ht, h, scale, seqs.num_seqs, cu_step, seq_len,
        segment_tokens, num_slots, int(follows_solve), int(ready), *grid,
    )  # fmt: skip
    if target.data_ptr() != o.data_ptr():
        o.copy_(target)

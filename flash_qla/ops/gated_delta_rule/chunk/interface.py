"""chunk_gated_delta_rule and its separate halves: defaults, validation, what surrounds the operator, autograd call."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
import torch.nn.functional as F

from flash_qla import env
from flash_qla.utils.guards import no_autocast, reject_transforms

from . import backend, cp, replay
from .autograd import Call, ChunkGatedDeltaRule, NormalizeQK, replayed
from .backward import backward
from .constants import L2NORM_EPS
from .forward import forward
from .problem import SMALL_DTYPES, Problem, check_flags, check_values, require_tensor
from .split import SegmentStates

_ACCEPTED_UNUSED = ("chunk_offsets",)  # some callers pass it along; it is derived from cu_seqlens


_FLAGS = (
    "output_final_state", "use_qk_l2norm_in_kernel", "head_first", "state_v_first", "auto_cp", "enable_fwd_cp_cache",
    "force_intra_cp", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "transpose_state_layout",
)  # fmt: skip
_PLAIN_FLAGS = frozenset((bool, type(None)))


def _reject_unknown(function: str, kwargs: dict) -> None:
    for name in kwargs:
        if name not in _ACCEPTED_UNUSED:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _activate_gate(g, A_log, dt_bias, compute):
    """gate = -exp(A_log) * softplus(g + dt_bias), in the dtype `compute`."""
    logits = g.to(compute)
    if dt_bias is not None:
        logits = logits + dt_bias.to(compute)
    return -A_log.to(compute).exp() * F.softplus(logits)


def _activate_beta(beta, allow_neg_eigval, compute):
    """beta = sigmoid(beta), doubled with allow_neg_eigval, in the dtype `compute`."""
    beta = torch.sigmoid(beta.to(compute))
    return 2 * beta if allow_neg_eigval else beta


def _cast_for_autocast(q, k, v):
    """Returns q, k, v in the autocast dtype where autocast is on, as autocast itself casts: neither float64 nor int.

    What it does not cast is left to the checks.
    """
    kind = q.device.type if isinstance(q, torch.Tensor) else "meta"
    if kind == "meta" or not torch.is_autocast_enabled(kind) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in SMALL_DTYPES else x for x in (q, k, v))


def _check_chunk_indices(x):
    if x is None:
        return
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape[1] != 2:
        got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"chunk_indices must be a tensor of shape [chunks, 2], got {got}")


def _check_gate_parameter(name, x, g):
    if x is None:
        return
    require_tensor(name, x, 1, "[Hv]")
    if tuple(x.shape) != (g.shape[-1],):
        raise ValueError(f"{name} must be a tensor of shape [Hv] = ({g.shape[-1]},), got {tuple(x.shape)}")
    if not x.dtype.is_floating_point or x.device != g.device:
        raise ValueError(f"{name} must be a floating-point tensor on {g.device}, got {x.dtype} on {x.device}")


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    state_v_first: bool = False,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    cp_context=None,
    force_intra_cp: bool = False,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
    out: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked gated delta rule, S_t = a S_{t-1} + k_t beta_t (v_t - k_t a S_{t-1}), o_t = scale q_t S_t, a = e^g_t.

    Differentiable in q, k, v, g, beta, initial_state, A_log and dt_bias. CUDA tensors run the fused kernels where the
    GPU has them (see `flash_qla.supports`), everything else the PyTorch implementation of the same algorithm.

    Args:
        q, k: `[B, T, Hq, K]`, bfloat16, float16, float32 or float64; K from 1 to 256.
        v: `[B, T, Hv, V]`, q's dtype; Hv a multiple of Hq; V from 1 to 256.
        g: `[B, T, Hv]`, log gate (natural log, normally <= 0; values below -100 act as -100, a reset). With
            use_gate_in_kernel: logits.
        beta: `[B, T, Hv]`, write strength. With use_beta_sigmoid_in_kernel: logits.
        scale: factor of q; None means K ** -0.5.
        initial_state: `[N, Hv, K, V]` (`[N, Hv, V, K]` with state_v_first) or None for zeros. Never modified.
        output_final_state: return the state after each sequence's last token.
        use_qk_l2norm_in_kernel: normalise q and k per head, `x * rsqrt(sum(x^2) + 1e-6)`.
        cu_seqlens: `[N + 1]` int32 or int64 offsets of packed sequences (B = 1), starting at 0; empty sequences are
            allowed; tokens after the last offset give zeros. Not read on the host by the kernels.
        head_first: not supported; True raises.
        state_v_first: layout of initial and final state.
        auto_cp: let the planner split sequences inside the card (the kernels only; `cp/planner.py`).
        enable_fwd_cp_cache: keep the states at a split's borders for the backward (memory for time).
        cp_context: a FlashQLACPContext or an object with FLA's fields.
        force_intra_cp: split every sequence of two chunks or more, in PyTorch too (tests, profiling).
        use_gate_in_kernel: gate = -exp(A_log) * softplus(g + dt_bias).
        A_log, dt_bias: `[Hv]` gate parameters; dt_bias optional.
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta).
        allow_neg_eigval: beta = 2 sigmoid(beta); only with use_beta_sigmoid_in_kernel.
        cu_seqlens_cpu: the same offsets on the host, for exact planning without a device read.
        chunk_indices: accepted for FLA's sake, checked for shape `[*, 2]`, not needed.
        chunk_size: None or 64.
        transpose_state_layout: old name of state_v_first.
        out: `[B, T, Hv, V]` tensor to write o into; not with gradients.
        state_dtype: dtype of the final state; None means float32 (float64 for float64 inputs).

    Returns:
        o `[B, T, Hv, V]` in q's dtype, and the final state or None.

    Raises:
        ValueError: an argument's shape, dtype, device or value is not supported; the message names it.
        NotImplementedError: the kernels were demanded and do not cover the call, or a mode is not built yet
            (forward-mode derivatives, torch.func transforms, sequences shared among cards).
        TypeError: an unknown keyword.
        RuntimeError: a gradient of it is differentiated again.
    """
    if torch.compiler.is_dynamo_compiling():  # is_compiling() is true of torch.export too, where nothing is traced out
        from flash_qla.utils import outside_graphs

        return outside_graphs.call(
            chunk_gated_delta_rule, q, k, v, g, beta, scale, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, cu_seqlens, head_first, state_v_first, auto_cp, enable_fwd_cp_cache, cp_context,
            force_intra_cp,
            use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
            cu_seqlens_cpu=cu_seqlens_cpu, chunk_indices=chunk_indices, chunk_size=chunk_size,
            transpose_state_layout=transpose_state_layout, out=out, state_dtype=state_dtype, **kwargs,
        )  # fmt: skip
    flags = (
        output_final_state, use_qk_l2norm_in_kernel, head_first, state_v_first, auto_cp, enable_fwd_cp_cache,
        force_intra_cp, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, transpose_state_layout,
    )  # fmt: skip
    if not _PLAIN_FLAGS.issuperset(map(type, flags)):  # the names cost time: only where there is doubt
        check_flags(**dict(zip(_FLAGS, flags)))
    tensors, key = (q, k, v, g, beta, initial_state, cu_seqlens), None
    if (
        out is None and cp_context is None and A_log is None and dt_bias is None and cu_seqlens_cpu is None
        and chunk_indices is None and chunk_size is None and transpose_state_layout is None and not kwargs
        and not (head_first or force_intra_cp or use_gate_in_kernel or use_beta_sigmoid_in_kernel or allow_neg_eigval)
    ):  # fmt: skip
        options = scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first, auto_cp, enable_fwd_cp_cache
        key = replay.key_of(tensors, (*options, state_dtype))
        known = None if key is None else replay.find(key)
        if known is not None:
            return known(*tensors) if known.context is None else replayed(known, *tensors)
    _reject_unknown("chunk_gated_delta_rule", kwargs)
    if head_first:
        raise ValueError("head_first=True is not supported; pass q, k, v as [B, T, H, D] (head_first=False)")
    if transpose_state_layout is not None:
        if state_v_first and not transpose_state_layout:
            raise ValueError("transpose_state_layout=False contradicts state_v_first=True; it is an old name of that")
        state_v_first = bool(transpose_state_layout)
    _check_chunk_indices(chunk_indices)
    cu_seqlens, cu_seqlens_cpu = cp.resolve_cu_seqlens(cp_context, cu_seqlens, cu_seqlens_cpu)
    q, k, v = _cast_for_autocast(q, k, v)
    problem, seqs = Problem.check(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=state_v_first, state_dtype=state_dtype, chunk_size=chunk_size,
    )  # fmt: skip
    _check_activations(g, A_log, dt_bias, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    reject_transforms("chunk_gated_delta_rule", *inputs, cu_seqlens, cu_seqlens_cpu, out)
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if out is not None:
        names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
        problem.check_out(out, **dict(zip(names, inputs)), cu_seqlens=cu_seqlens)
        if wants_grad:
            raise ValueError("out cannot be combined with gradients; call under torch.no_grad() or leave out=None")
    stages = cp.stages_for(problem)
    request = _split_request(problem, auto_cp, force_intra_cp, cp_context)
    if env.debug():
        check_values(seqs, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias)

    compute = problem.compute_dtype
    with replay.recording(None if wants_grad else key, tensors) as results:
        with no_autocast(q.device.type):
            if use_qk_l2norm_in_kernel and wants_grad:
                q, k = NormalizeQK.apply(q, k, stages, seqs)
            elif use_qk_l2norm_in_kernel:
                q, k = stages.normalize(q, k, L2NORM_EPS)[:2]
            if use_gate_in_kernel:
                g = _activate_gate(seqs.zero_padding(g), A_log, dt_bias, compute)
            if use_beta_sigmoid_in_kernel:
                beta = _activate_beta(seqs.zero_padding(beta), allow_neg_eigval, compute)
        if not wants_grad:
            # Without T_inv kernels round differently: not under no_grad, where a checkpoint's first forward may run.
            _, _, o, _, final_state, _ = forward(
                stages, problem, seqs, q, k, v, g, beta, initial_state, output_final_state=output_final_state, out=out,
                request=request, keep_inverse=not torch.is_inference_mode_enabled(),
            )  # fmt: skip
            if out is not None and not out.is_inference():
                torch.autograd.graph.increment_version(out)  # kernels write behind autograd's back
            results += (o, final_state)
            return o, final_state
    call = Call(
        stages, problem, request, want_ht=bool(output_final_state), keep=bool(enable_fwd_cp_cache),
        normalize=bool(use_qk_l2norm_in_kernel), key=key,
    )  # fmt: skip
    return ChunkGatedDeltaRule.apply(q, k, v, g, beta, initial_state, seqs.cu_seqlens, call, seqs)


def _split_request(problem, auto_cp, force_intra_cp, cp_context) -> cp.Request:
    """The call's request. Raises ValueError for a context whose wishes are none, or of other value heads."""
    request = cp.split_request(auto_cp, force_intra_cp, cp_context)
    length = request.segment_chunks
    if length is not None and (isinstance(length, bool) or not isinstance(length, Integral) or length < 1):
        raise ValueError(f"cp_context.segment_chunks={length!r} is not supported; supported: None or an integer >= 1")
    decays = request.decays
    if decays is not None and not (
        isinstance(decays, tuple) and all(isinstance(x, Real) and 0 <= x < math.inf for x in decays)
    ):
        raise ValueError(f"cp_context.decays={decays!r} is not supported; supported: None or what g made it")
    if request.decays is not None and len(request.decays) != problem.num_v_heads:
        raise ValueError(
            f"cp_context was built with g of {len(request.decays)} value heads, the call has {problem.num_v_heads}; "
            "build it with these heads' gates or without g"
        )
    return request if length is None else request._replace(segment_chunks=int(length))


def _check_activations(g, A_log, dt_bias, use_gate, use_sigmoid, allow_neg_eigval):
    if use_gate and A_log is None:
        raise ValueError("use_gate_in_kernel=True needs A_log, a tensor of shape [Hv]; got None")
    if not use_gate and not (A_log is None and dt_bias is None):
        raise ValueError("A_log and dt_bias are used only with use_gate_in_kernel=True; pass g as logits then")
    _check_gate_parameter("A_log", A_log, g)
    _check_gate_parameter("dt_bias", dt_bias, g)
    if allow_neg_eigval and not use_sigmoid:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; otherwise pass beta up to 2")


def chunk_gated_delta_rule_fwd(
    q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, output_final_state=True, output_h=False,
    auto_cp=True, state_v_first=False, enable_fwd_cp_cache=False, cp_context=None, is_train=None, *,
    cu_seqlens_cpu=None,
):  # fmt: skip
    """The forward alone, not differentiable: arguments as in `chunk_gated_delta_rule`.

    Returns:
        g_cumsum `[B, T, Hv]` (float32, natural log, restarting in each 64-token chunk), A `[B, T, Hv, 64]` (the gated
        inverse, k's dtype), o, h (None unless output_h; `[B, chunks, Hv, K, V]`, V-first accordingly, k's dtype: the
        state entering each chunk; reads cu_seqlens back unless cu_seqlens_cpu is given), final_state (None unless
        output_final_state), and cp_cache: with enable_fwd_cp_cache the states at the segments' borders for
        `chunk_gated_delta_rule_bwd`, None where nothing was split or the backward would split differently. is_train is
        unused: a plan does not depend on gradients.

    Raises:
        ValueError: as in `chunk_gated_delta_rule`.
    """
    check_flags(
        output_final_state=output_final_state, output_h=output_h, auto_cp=auto_cp, state_v_first=state_v_first,
        enable_fwd_cp_cache=enable_fwd_cp_cache,
    )  # fmt: skip
    cu_seqlens, cu_seqlens_cpu = cp.resolve_cu_seqlens(cp_context, cu_seqlens, cu_seqlens_cpu)
    problem, seqs = Problem.check(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=state_v_first,
    )  # fmt: skip
    reject_transforms("chunk_gated_delta_rule_fwd", q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu)
    request = _split_request(problem, auto_cp, False, cp_context)
    if env.debug():
        check_values(seqs, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    with torch.no_grad(), no_autocast(q.device.type):
        g_cumsum, *results = forward(
            cp.stages_for(problem), problem, seqs, q, k, v, g, beta, initial_state,
            output_final_state=output_final_state, output_h=output_h, request=request, keep=bool(enable_fwd_cp_cache),
        )  # fmt: skip
        return g_cumsum.to(problem.compute_dtype), *results


def chunk_gated_delta_rule_bwd(
    q, k, v, g, beta, A, do, dht=None, scale=None, initial_state=None, cu_seqlens=None, state_v_first=False,
    auto_cp=True, cp_cache=None, cp_context=None, *, cu_seqlens_cpu=None,
):  # fmt: skip
    """The backward alone.

    Args:
        g, A: g_cumsum and A as `chunk_gated_delta_rule_fwd` returned them.
        do: `[B, T, Hv, V]` gradient of o, q's dtype.
        dht: gradient of the final state in its layout, or None.
        cp_cache: what the forward returned, or None (recomputed).

    Returns:
        dq, dk, dv in q's dtype, db, dg `[B, T, Hv]` float32 (dg: of the gate, before the clamp at -100), and dh0 (None
        unless an initial state was given).

    Raises:
        ValueError: as in `chunk_gated_delta_rule`; also for an A whose chunk size is not 64, and for a cp_cache of a
            forward of other sizes (of other values nobody can tell).
    """
    check_flags(state_v_first=state_v_first, auto_cp=auto_cp)
    cu_seqlens, cu_seqlens_cpu = cp.resolve_cu_seqlens(cp_context, cu_seqlens, cu_seqlens_cpu)
    problem, seqs = Problem.check(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=state_v_first,
    )  # fmt: skip
    problem.check_inverse(g, A)
    problem.check_like("do", do, "o")
    if dht is not None:
        problem.check_like("dht", dht, "final_state")
    if cp_cache is not None and not isinstance(cp_cache, SegmentStates):
        raise ValueError(f"cp_cache must be what chunk_gated_delta_rule_fwd returned, got {type(cp_cache).__name__}")
    tensors = (q, k, v, g, beta, A, do, dht, initial_state, cu_seqlens, cu_seqlens_cpu)
    reject_transforms("chunk_gated_delta_rule_bwd", *tensors)
    request, stages = _split_request(problem, auto_cp, False, cp_context), cp.stages_for(problem)
    if cp_cache is not None and cp_cache.origin != (stages.__name__, *problem.sizes):
        raise ValueError(
            f"cp_cache is of another forward: {cp_cache.origin}, this call is {(stages.__name__, *problem.sizes)} "
            "(stages, B, T, N, Hq, Hv, K, V, dtype, device); pass that forward's, or None"
        )
    if env.debug():
        check_values(seqs, q=q, k=k, v=v, g=g, beta=beta, A=A, do=do, dht=dht, initial_state=initial_state)
    with torch.no_grad(), no_autocast(q.device.type):
        return backward(
            stages, problem, seqs, q, k, v, A, g, beta, initial_state, do, dht,
            request=request, entering=cp_cache,
        )  # fmt: skip


def supports(
    q, k, v, g=None, beta=None, *, initial_state=None, cu_seqlens=None, state_v_first=False, state_dtype=None
) -> tuple[bool, str]:
    """Whether the fused kernels run a call with these tensors, and why not.

    Args:
        q, k, v, g, beta, initial_state, cu_seqlens, state_v_first, state_dtype: as in `chunk_gated_delta_rule`; g and
            beta may be left out.

    Returns:
        (True, "…") when the kernels run it; (False, reason) when it would raise or run in PyTorch. Never raises.
    """
    try:
        check_flags(state_v_first=state_v_first)
        if isinstance(v, torch.Tensor) and not v.is_nested and v.dim() == 4:
            g, beta = (
                torch.empty(v.shape[:3], dtype=torch.float32, device=v.device) if x is None else x for x in (g, beta)
            )
        problem, _ = Problem.check(
            q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, state_v_first=state_v_first,
            state_dtype=state_dtype,
        )  # fmt: skip
        by_choice = "FLASH_QLA_BACKEND=reference chooses PyTorch" if env.backend() == "reference" else None
        reason = by_choice or backend.why_no_kernels(problem)
    except (ValueError, RuntimeError) as error:
        return False, str(error)
    return (True, "the fused kernels run this call") if reason is None else (False, reason)

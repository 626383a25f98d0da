"""The backward, stage by stage (design and equations: the op's README)."""

import torch

from . import cp
from .problem import Problem
from .sequences import Sequences


def backward(
    stages, problem: Problem, seqs: Sequences, q, k, v, T_inv, g_cumsum, beta, initial_state, do, dht, *,
    request: cp.Request = cp.NO_SPLIT, entering=None, need: bool = True,
):  # fmt: skip
    """Runs the chunked backward.

    Args:
        stages: from `cp.stages_for`.
        request: what the planner may do.
        entering: SegmentStates that the forward kept, or None: computed again where the plan needs them.
        need: False when only dh0 is wanted: the gradients stage is left out.

    Returns:
        dq, dk `[B, T, Hq, K]`, dv `[B, T, Hv, V]` in q's dtype, dbeta, dg `[B, T, Hv]` in the computing precision
        (dg: of the gate itself, not of its cumsum), and dh0 in the caller's layout and dtype (None without an initial
        state).
    """
    cached = None if entering is None else entering.split.segment_chunks
    split = cp.plan_split("bwd", problem, seqs, request, stages, cached)
    h0, dht, dh0, leaving = problem.k_first(initial_state), problem.k_first(dht), None, None
    if initial_state is not None:
        dh0 = problem.empty_state(initial_state.dtype, problem.num_seqs)
    if split is None:
        entering = None
    else:
        if entering is None or entering.split != split:
            entering = stages.entering_states(k, v, T_inv, g_cumsum, beta, h0, seqs, split, for_backward=True)
        leaving = stages.leaving_cotangents(q, k, T_inv, g_cumsum, beta, do, dht, problem.scale, seqs, split, entering)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format) if need else None
    S, dS = stages.backward_states(
        q, k, v, T_inv, g_cumsum, beta, do, problem.scale, h0, dht, problem.k_first(dh0), seqs, entering, leaving,
        dv=dv,
    )  # fmt: skip
    if not need:
        return None, None, None, None, None, dh0
    dq, dk = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    dbeta, dg = (torch.empty_like(g_cumsum, dtype=problem.compute_dtype) for _ in range(2))
    stages.gradients(dq, dk, dv, dbeta, dg, q, k, v, T_inv, g_cumsum, beta, do, problem.scale, S, dS, seqs)
    return dq, dk, dv, dbeta, dg, dh0

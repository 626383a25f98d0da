"""The forward, stage by stage (design and equations: the op's README)."""

from dataclasses import replace

import torch

from . import cp
from .problem import Problem
from .sequences import Sequences


def forward(
    stages, problem: Problem, seqs: Sequences, q, k, v, g, beta, initial_state, *, output_final_state: bool,
    output_h: bool = False, out: torch.Tensor | None = None, request: cp.Request = cp.NO_SPLIT, keep: bool = False,
    keep_inverse: bool = True,
):  # fmt: skip
    """Runs the chunked forward.

    Args:
        stages: from `cp.stages_for`.
        request: what the planner may do.
        keep: return the segments' states for a backward that would split alike.
        keep_inverse: False if the caller has no use for T_inv, which may then be None.

    Returns:
        g_cumsum `[B, T, Hv]`, T_inv `[B, T, Hv, C]` or None, o `[B, T, Hv, V]`, h `[B, chunks, Hv, K, V]` or None,
        final_state `[N, Hv, K, V]` or None, states in the caller's layout, and SegmentStates or None.
    """
    split = cp.plan_split("fwd", problem, seqs, request, stages)
    if keep and split is not None:
        keep = cp.plan_split("bwd", problem, seqs, request, stages, cached=split.segment_chunks) == split
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    final_state = problem.empty_state(problem.state_dtype, problem.num_seqs) if output_final_state else None
    h = problem.empty_state(problem.dtype, seqs.total_chunks()) if output_h else None
    h0, entering = problem.k_first(initial_state), None

    targets = o, problem.k_first(final_state), problem.k_first(h)
    if split is None:
        g_cumsum, T_inv = stages.solve_and_walk(*targets, q, k, v, g, beta, problem.scale, h0, seqs, keep_inverse)
    else:
        ready = not keep_inverse
        g_cumsum, T_inv = stages.solve(k, g, beta, seqs, ready)
        solved = T_inv, g_cumsum, beta
        entering = stages.entering_states(k, v, *solved, h0, seqs, split, for_backward=keep, ready=ready)
        stages.fused_forward(*targets, q, k, v, *solved, problem.scale, h0, seqs, entering, ready)
        T_inv = T_inv if keep_inverse else None
    if h is not None:
        h = h.view(problem.batch, h.shape[0] // max(problem.batch, 1), *h.shape[1:])
    if entering is not None:
        entering = replace(entering, origin=(stages.__name__, *problem.sizes)) if keep else None
    return g_cumsum, T_inv, o, h, final_state, entering

"""The backward, stage by stage (design and equations: the op's README)."""

import torch

from .backend import stages_for
from .problem import Problem
from .sequences import Sequences


def backward(problem: Problem, seqs: Sequences, q, k, v, T_inv, g_cumsum, beta, initial_state, do, dht, *, need=True):
    """Runs the chunked backward.

    Args:
        need: False when only dh0 is wanted: the gradients stage is left out.

    Returns:
        dq, dk `[B, T, Hq, K]`, dv `[B, T, Hv, V]` in q's dtype, dbeta, dg `[B, T, Hv]` in the computing precision
        (dg: of the gate itself, not of its cumsum), and dh0 in the caller's layout and dtype (None without an initial
        state).
    """
    stages = stages_for(problem)
    dh0 = None
    if initial_state is not None:
        dh0 = problem.empty_state(initial_state.dtype, problem.num_seqs)
    S, dS = stages.backward_states(
        q, k, v, T_inv, g_cumsum, beta, do, problem.scale,
        problem.k_first(initial_state), problem.k_first(dht), problem.k_first(dh0), seqs,
    )  # fmt: skip
    if not need:
        return None, None, None, None, None, dh0
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dbeta, dg = (torch.empty_like(g_cumsum) for _ in range(2))
    stages.gradients(dq, dk, dv, dbeta, dg, q, k, v, T_inv, g_cumsum, beta, do, problem.scale, S, dS, seqs)
    return dq, dk, dv, dbeta, dg, dh0

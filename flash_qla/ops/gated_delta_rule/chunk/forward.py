"""The forward, stage by stage (design and equations: the op's README)."""

import torch

from .backend import stages_for
from .problem import Problem
from .sequences import Sequences


def forward(
    problem: Problem, seqs: Sequences, q, k, v, g, beta, initial_state, *,
    output_final_state: bool, output_h: bool = False, out: torch.Tensor | None = None,
):  # fmt: skip
    """Runs the chunked forward.

    Returns:
        g_cumsum `[B, T, Hv]`, T_inv `[B, T, Hv, C]`, o `[B, T, Hv, V]`, h `[B, chunks, Hv, K, V]` or None, and
        final_state `[N, Hv, K, V]` or None, states in the caller's layout.
    """
    stages = stages_for(problem)
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    final_state = problem.empty_state(problem.state_dtype, problem.num_seqs) if output_final_state else None
    h = problem.empty_state(problem.dtype, seqs.total_chunks()) if output_h else None
    h0 = problem.k_first(initial_state)

    g_cumsum, T_inv = stages.solve(k, g, beta, seqs)
    stages.fused_forward(
        o, problem.k_first(final_state), problem.k_first(h), q, k, v, T_inv, g_cumsum, beta, problem.scale, h0, seqs
    )
    if h is not None:
        h = h.view(problem.batch, h.shape[0] // max(problem.batch, 1), *h.shape[1:])
    return g_cumsum, T_inv, o, h, final_state

"""Single stages as public functions, for profilers: kkt_solve, fused_gdr_fwd, fused_gdr_h."""

from __future__ import annotations

import torch

from . import reference
from .backend import stages_for
from .constants import CHUNK_SIZE
from .problem import Problem
from .sequences import Sequences


def _problem(k, v, g, beta, q=None, **options):
    return Problem.check(k if q is None else q, k, v, g, beta, **options)


def _require_tensor(name, x, axes):
    """What has no q is checked as if k were q: errors about k must not speak of q."""
    if not isinstance(x, torch.Tensor) or x.dim() != axes.count(",") + 1:
        got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a torch.Tensor {axes}, got {got}")


def kkt_solve(k, b, chunk_size=64, cu_seqlens=None, g=None) -> torch.Tensor:
    """Inverse of the chunk's triangular system, `(I + L)^-1` with `L_ij = b_i exp(g_i - g_j) k_i·k_j` for i > j.

    Args:
        k: `[B, T, Hq, K]`.
        b: `[B, T, Hv]` beta.
        chunk_size: 64.
        cu_seqlens: `[N + 1]` offsets or None.
        g: `[B, T, Hv]` float32 cumulative log gate of each chunk (natural log), or None for no gate.

    Returns:
        `[B, T, Hv, 64]` in k's dtype; row t belongs to token t.

    Raises:
        ValueError: as in `chunk_gated_delta_rule`.
    """
    _require_tensor("k", k, "[B, T, Hq, K]")
    _require_tensor("b", b, "[B, T, Hv]")
    gate = torch.zeros_like(b, dtype=torch.float32) if g is None else g
    value = k.new_empty((*k.shape[:2], b.shape[-1], 1))  # only its shape is looked at
    problem, seqs = _problem(k, value, gate, b, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    stages = stages_for(problem)
    with torch.no_grad():
        if stages is reference:
            return reference.invert(k, gate, b, seqs)
        return stages.solve(k, gate if g is None else _gate_steps(g, seqs), b, seqs)[1]


def _gate_steps(g_cumsum, seqs: Sequences):
    """The gate whose cumsum in each chunk is g_cumsum, which is what the solve kernel takes. No device read."""
    rows = torch.arange(seqs.num_tokens, device=g_cumsum.device)
    if seqs.is_varlen:
        starts = seqs.cu_seqlens.to(g_cumsum.device, torch.int64)
        rows = rows - starts[(torch.searchsorted(starts, rows, right=True) - 1).clamp(min=0)]
    before = g_cumsum.roll(1, dims=1).masked_fill((rows % seqs.chunk_size == 0).view(-1, 1), 0)
    return g_cumsum - before


def fused_gdr_fwd(
    q, k, v, a, g, b, scale=None, initial_state=None, output_final_state=True, output_h=False, output_o=True,
    cu_seqlens=None, state_v_first=False,
):  # fmt: skip
    """The fused forward stage on a gated inverse `a` and a gate cumsum `g`, as the low-level forward returns them.

    Returns:
        o (None unless output_o), h (None unless output_h), final_state (None unless output_final_state).

    Raises:
        ValueError: as in `chunk_gated_delta_rule_bwd`.
    """
    problem, seqs = _problem(
        k, v, g, b, q, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, state_v_first=state_v_first
    )
    problem.check_inverse(g, a)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_state = problem.empty_state(problem.state_dtype, problem.num_seqs) if output_final_state else None
    h = problem.empty_state(problem.dtype, seqs.total_chunks()) if output_h else None
    with torch.no_grad():
        stages_for(problem).fused_forward(
            o, problem.k_first(final_state), problem.k_first(h), q, k, v, a, g, b, problem.scale,
            problem.k_first(initial_state), seqs,
        )  # fmt: skip
    if h is not None:
        h = h.view(problem.batch, h.shape[0] // max(problem.batch, 1), *h.shape[1:])
    return o if output_o else None, h, final_state


def fused_gdr_h(
    k, v, a, g, b, initial_state=None, output_final_state=True, output_h=True, cu_seqlens=None,
    num_warmup_chunks=None, state_v_first=False,
):  # fmt: skip
    """The state walk alone, on a gated inverse `a` and a gate cumsum `g`.

    Args:
        num_warmup_chunks: walk only the last so many chunks of each sequence; None walks all. Only None is supported.

    Returns:
        h (None unless output_h), final_state (None unless output_final_state), transition (None: only the planner's
        segments have one).

    Raises:
        ValueError: as in `chunk_gated_delta_rule_bwd`.
        NotImplementedError: num_warmup_chunks is given.
    """
    if num_warmup_chunks is not None:
        raise NotImplementedError(f"num_warmup_chunks={num_warmup_chunks} is not supported yet; supported: None")
    _require_tensor("k", k, "[B, T, Hq, K]")
    _, h, final_state = fused_gdr_fwd(
        k, k, v, a, g, b, None, initial_state, output_final_state, output_h, False,
        cu_seqlens, state_v_first,
    )  # fmt: skip
    return h, final_state, None


__all__ = ["CHUNK_SIZE", "fused_gdr_fwd", "fused_gdr_h", "kkt_solve"]

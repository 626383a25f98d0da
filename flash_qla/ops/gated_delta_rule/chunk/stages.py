"""Single stages as public functions, for profilers: kkt_solve, fused_gdr_fwd, fused_gdr_h."""

from __future__ import annotations

import re
from contextlib import contextmanager

import torch

from flash_qla.utils.guards import reject_transforms

from . import reference
from .backend import stages_for
from .constants import CHUNK_SIZE
from .problem import Problem, check_flags, require_tensor
from .sequences import Sequences


@contextmanager
def _named(**names):
    """The checks know the operator's names of the arguments; their errors then speak of the stage's."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if names.get("q") == "k":
            text = text.replace("q, k and v", "k and v").replace("q and k", "k").replace("q, k, v", "k, v")
        raise ValueError(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)) from None


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
    require_tensor("k", k, 4, "[B, T, Hq, K]")
    require_tensor("b", b, 3, "[B, T, Hv]")
    gate = torch.zeros_like(b, dtype=torch.float32) if g is None else g
    value = k.new_empty((*k.shape[:2], b.shape[-1], 1))  # only its shape is looked at
    with _named(q="k", v="b", beta="b", g="b" if g is None else "g"):
        problem, seqs = Problem.check(k, k, value, gate, b, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
        stages = stages_for(problem)
    reject_transforms("kkt_solve", k, b, g, cu_seqlens)
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
    return _walk(
        {"beta": "b", "A": "a"}, q, k, v, a, g, b, scale, initial_state, output_final_state, output_h, output_o,
        cu_seqlens, state_v_first,
    )  # fmt: skip


def _walk(
    names, q, k, v, a, g, b, scale, initial_state, output_final_state, output_h, output_o, cu_seqlens, state_v_first
):
    """`fused_gdr_fwd`, whose arguments are called `names` where they are not called as the operator's."""
    check_flags(
        output_final_state=output_final_state, output_h=output_h, output_o=output_o, state_v_first=state_v_first
    )
    with _named(**names):
        problem, seqs = Problem.check(
            q, k, v, g, b, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, state_v_first=state_v_first
        )
        problem.check_inverse(g, a)
        stages = stages_for(problem)
    reject_transforms("a stage of chunk_gated_delta_rule", q, k, v, a, g, b, initial_state, cu_seqlens)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_state = problem.empty_state(problem.state_dtype, problem.num_seqs) if output_final_state else None
    h = problem.empty_state(problem.dtype, seqs.total_chunks()) if output_h else None
    with torch.no_grad():
        stages.fused_forward(
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
    _, h, final_state = _walk(
        {"beta": "b", "A": "a", "q": "k"}, k, k, v, a, g, b, None, initial_state, output_final_state, output_h, False,
        cu_seqlens, state_v_first,
    )  # fmt: skip
    return h, final_state, None


__all__ = ["CHUNK_SIZE", "fused_gdr_fwd", "fused_gdr_h", "kkt_solve"]

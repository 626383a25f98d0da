"""What the drivers ask: the stages that can run a split, and whether this call is split."""

from __future__ import annotations

from .. import backend, reference
from ..split import Split
from . import planner, segments


def stages_for(problem):
    """`backend.stages_for`, with PyTorch's stages in the form that takes a split (the kernels' do)."""
    stages = backend.stages_for(problem)
    return segments if stages is reference else stages


def plan_split(passes: str, problem, seqs, request: planner.Request, stages, cached: int | None = None) -> Split | None:
    """Returns the split that the planner chose for a pass, None for none.

    Args:
        passes: "fwd" or "bwd".
        request: from `context.split_request`.
        stages: from `stages_for`.
        cached: segment length whose forward results are at hand (bwd).
    """
    return planner.split_of_call(passes, problem, seqs, request, on_kernels=stages is not segments, cached=cached)

"""A split of sequences into segments, and the states at the segments' borders: what stages and drivers hand around."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """Sequences cut into segments of whole chunks; the last segment of a sequence may be shorter.

    Attributes:
        segment_chunks: chunks of a segment, at least 1.
        tolerance: natural log of the largest transition norm that a segment may leave out (equation C6).
        num_segments: how many segments are expected to hold tokens: a hint for launches, never a bound.
    """

    segment_chunks: int
    tolerance: float
    num_segments: int


@dataclass(frozen=True)
class SegmentStates:
    """States at the segments' borders, in the form of the stages that made them (opaque to everyone else).

    Attributes:
        split: what they belong to.
        states: the state entering, or the cotangent of the state leaving, each segment.
        transitions, carries: the segments' transitions and where they count; None where nobody asked for them.
        origin: the stages that made them and `Problem.sizes`, where a caller holds them as a cp_cache.
    """

    split: Split
    states: torch.Tensor
    transitions: torch.Tensor | None = None
    carries: torch.Tensor | None = None
    origin: tuple | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What autograd must save; `SegmentStates(split, *tensors)` is the same object again."""
        return self.states, self.transitions, self.carries

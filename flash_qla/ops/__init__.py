"""Operators."""

from .gated_delta_rule import chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule"]

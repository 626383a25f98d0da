"""Chunked gated delta rule: public functions and single stages."""

from .interface import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd, supports
from .stages import fused_gdr_fwd, fused_gdr_h, kkt_solve

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "fused_gdr_fwd",
    "fused_gdr_h",
    "kkt_solve",
    "supports",
]

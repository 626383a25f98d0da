"""flash_qla: fused kernels for the chunked gated delta rule, forward and backward. See README.md.

Importing touches no GPU and imports no compiler: kernels are built at their first call.
"""

from .ops.gated_delta_rule import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from .ops.gated_delta_rule.chunk.interface import supports
from .ops.gated_delta_rule.chunk.warmup import compile_count, warmup
from .version import __version__

__all__ = [
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "compile_count",
    "supports",
    "warmup",
]

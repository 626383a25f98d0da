"""Context parallelism inside one card: the context object, the planner, and the split of a call.

`planner.py` decides (with `cost.py` and `coefs.py`), `segments.py` is the split's arithmetic in PyTorch, and the
kernels' segment stages have the same names and signatures.
"""

from .context import FlashQLACPContext, build_cp_context, resolve_cu_seqlens, split_request
from .planner import NO_SPLIT, Request
from .states import plan_split, stages_for

__all__ = [
    "NO_SPLIT",
    "FlashQLACPContext",
    "Request",
    "build_cp_context",
    "plan_split",
    "resolve_cu_seqlens",
    "split_request",
    "stages_for",
]

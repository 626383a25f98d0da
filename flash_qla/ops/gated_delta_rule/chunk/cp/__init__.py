"""Context parallelism inside one card: the context object and, with it, the split's arithmetic (`segments.py`)."""

from .context import FlashQLACPContext, build_cp_context, check_supported, resolve_cu_seqlens

__all__ = ["FlashQLACPContext", "build_cp_context", "check_supported", "resolve_cu_seqlens"]

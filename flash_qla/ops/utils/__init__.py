"""Helpers of the operators, any device."""

from flash_qla.ops.utils.cumsum import chunk_local_cumsum

__all__ = ["chunk_local_cumsum"]

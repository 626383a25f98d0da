"""Helpers in plain PyTorch, for any device."""

from flash_qla.utils.l2norm import l2norm, l2norm_bwd, l2norm_fwd

__all__ = ["l2norm", "l2norm_bwd", "l2norm_fwd"]

"""L2 normalisation of query and key heads: y = x · rsqrt(Σ x² + eps), computed in float32 (float64 for float64).

eps lies inside the root, so an all-zero row (padding) gives y = 0 and a finite gradient.
"""

import torch

from flash_qla.utils.guards import first_order_only, reject_transforms

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def l2norm_fwd(x: torch.Tensor, eps: float = 1e-6, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises along `dim`; not differentiable (see `l2norm`).

    Args:
        x: bfloat16, float16, float32 or float64, any shape and strides.
        eps: added to the sum of squares.
        dim: the normalised dimension.

    Returns:
        y: x's shape and dtype.
        rstd: rsqrt(Σ x² + eps), x's shape without `dim`, float32 (float64 for float64 x).

    Raises:
        ValueError: x is no dense tensor, or not of one of these dtypes.
    """
    if not isinstance(x, torch.Tensor) or x.is_nested or x.layout is not torch.strided:
        got = f"one of layout {x.layout}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"x must be a dense torch.Tensor, got {got}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"x must be of a floating-point dtype of {', '.join(map(str, _DTYPES))}, got {x.dtype}")
    with torch.no_grad():
        norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=_compute_dtype(x))
        rstd = torch.rsqrt(norm * norm + eps)
        # Written through `out`, the product is rounded once and needs no float32 copy of x's size.
        y = torch.mul(x, rstd, out=torch.empty_like(x))
        return y, rstd.squeeze(dim)


def l2norm_bwd(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, eps: float = 1e-6, dim: int = -1) -> torch.Tensor:
    """Gradient of `l2norm_fwd`: dx = rstd · (dy − y · Σ y·dy).

    Args:
        y, rstd: what `l2norm_fwd` returned.
        dy: gradient of y, y's shape.
        eps: unused (rstd holds it); kept because callers pass it.
        dim: the normalised dimension.

    Returns:
        dx: y's shape and dtype.
    """
    with torch.no_grad():
        dtype = _compute_dtype(y)
        y_acc, dy_acc = y.to(dtype), dy.to(dtype)
        projection = (y_acc * dy_acc).sum(dim, keepdim=True)
        dx = (dy_acc - y_acc * projection).mul_(rstd.unsqueeze(dim))
        return dx.to(y.dtype)


class _L2Norm(torch.autograd.Function):
    """Saves y, which the operator saves anyway, and rstd."""

    @staticmethod
    def forward(ctx, x, eps):
        y, rstd = l2norm_fwd(x, eps)
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, rstd = ctx.saved_tensors
        return first_order_only("l2norm", l2norm_bwd(y, rstd, dy), y, dy), None


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Normalises the last dimension to length 1; differentiable once.

    Args:
        x: `[..., head_dim]`, bfloat16, float16, float32 or float64.
        eps: added to the sum of squares.

    Returns:
        x · rsqrt(Σ x² + eps), x's shape and dtype.

    Raises:
        ValueError: as in `l2norm_fwd`.
        NotImplementedError: inside a torch.func transform, or for a forward-mode derivative.
    """
    if not torch.compiler.is_compiling():
        reject_transforms("l2norm", x)
    return _L2Norm.apply(x, eps)

"""Guards against silent mistakes."""

from contextlib import nullcontext

import torch


class _FirstOrderOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, grad, *inputs):
        ctx.name = name
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(
            f"{ctx.name} has no second derivative. Its gradient was made with create_graph=True and then "
            "differentiated again; detach that gradient, or use a composition of PyTorch operations instead"
        )


def first_order_only(name: str, grad: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Returns a gradient that refuses to be differentiated again. For the backward of a `torch.autograd.Function`.

    `once_differentiable` refuses only when the incoming gradient is tracked: with a constant one it hands out a
    constant, and a gradient penalty would silently lose the term.

    Args:
        name: what the error calls the operator.
        grad: the gradient to hand out.
        inputs: the operator's saved inputs or outputs; one that requires grad makes `grad` tracked.
    """
    return _FirstOrderOnly.apply(name, grad, *inputs) if torch.is_grad_enabled() else grad


def no_autocast(device_type: str):
    """Context without autocast, which would round the operator's own products; free where none is active."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()

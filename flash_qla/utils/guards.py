"""Guards against silent mistakes."""

from contextlib import nullcontext

import torch
from torch.autograd import forward_ad


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


def reject_transforms(name: str, *tensors) -> None:
    """Refuses what kernels cannot see, and would lose silently: tangents, and torch.func's wrappers around tensors.

    Args:
        name: what the error calls the operator.
        tensors: its inputs; what is no tensor is not looked at.

    Raises:
        NotImplementedError: a tensor carries a tangent, or belongs to a torch.func transform that is active.
    """
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    functorch = torch._C._functorch
    if any(map(functorch.is_legacy_batchedtensor, tensors)) or (  # what autograd's batched gradients are
        torch._C._are_functorch_transforms_active() and any(map(functorch.is_functorch_wrapped_tensor, tensors))
    ):
        raise NotImplementedError(
            f"{name} is not supported inside torch.func transforms (vmap, grad, jvp, …) or for batched gradients; "
            "supported: torch.autograd, and the batch dimension in place of vmap"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{name} has no forward-mode derivative; supported: torch.autograd")


def no_autocast(device_type: str):
    """Context without autocast, which would round the operator's own products; free where none is active."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()

"""Compiling ahead of the first request: every variant of a configuration, and the public compile counter."""

from __future__ import annotations

from numbers import Integral

import torch

from flash_qla import arch as archs

from . import reference
from .backend import stages_for
from .kernels import build
from .problem import Problem, check_flags


def warmup(
    num_k_heads: int, num_v_heads: int, head_dim_k: int = 128, head_dim_v: int = 128, dtype=torch.bfloat16,
    gate_dtype=torch.float32, state_dtype=torch.float32, backward: bool = True, device=None,
) -> int:  # fmt: skip
    """Compiles (or loads from the disk cache) every kernel variant that a model configuration can meet.

    Args:
        num_k_heads, num_v_heads: Hq, Hv. Any number shares the same kernels; only their ratio matters.
        head_dim_k, head_dim_v: K, V.
        dtype: of q, k, v.
        gate_dtype: of g and beta.
        state_dtype: of initial and final states.
        backward: the backward's kernels too.
        device: a CUDA device (default: the current one).

    Returns:
        Number of kernels that were built by this call; 0 when all were there, or where calls run in PyTorch.

    Raises:
        ValueError: heads, head sizes or dtypes that no call accepts, a device that this machine has not, or a
            FLASH_QLA_BACKEND that is none.
        NotImplementedError: FLASH_QLA_BACKEND=kernels where the kernels do not run, as a call would.
    """
    sizes = {"num_k_heads": num_k_heads, "num_v_heads": num_v_heads, "head_dim_k": head_dim_k, "head_dim_v": head_dim_v}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    for name, given in (("dtype", dtype), ("gate_dtype", gate_dtype), ("state_dtype", state_dtype)):
        if not isinstance(given, torch.dtype):
            raise ValueError(f"{name} must be a torch.dtype, got {given!r}")
    check_flags(backward=backward)
    device = _of_this_machine(device)
    q = torch.empty((1, 0, num_k_heads, head_dim_k), dtype=dtype, device=device)
    v = torch.empty((1, 0, num_v_heads, head_dim_v), dtype=dtype, device=device)
    g = torch.empty((1, 0, num_v_heads), dtype=gate_dtype, device=device)
    problem, _ = Problem.check(q, q, v, g, g, state_dtype=state_dtype)
    if stages_for(problem) is reference:
        return 0
    from .kernels import variants

    return build.build_all(variants.of_problem(problem, backward=backward), archs.of_device(device))


def _of_this_machine(device) -> torch.device:
    """Returns the device with its number. Raises ValueError for what is none, or not there."""
    error = None
    try:
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
        found = torch.empty(0, device=found).device  # PyTorch raises for a device that it cannot use, each in its way
        if found.type != "meta":
            return found
    except (RuntimeError, TypeError, AssertionError) as caught:
        error = caught
    supported = "supported: None, the CPU, or a GPU that PyTorch finds on this machine"
    raise ValueError(f"device={device!r} is not supported; {supported}") from error


def compile_count() -> int:
    """Returns how many kernel variants this process has built so far (compiled, or loaded from the disk cache)."""
    return build.compile_count()

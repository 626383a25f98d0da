"""Which implementation runs a problem: the kernels, or the PyTorch stages of the same algorithm.

Both are modules with the same stage functions (`solve`, `fused_forward`, `backward_states`, `gradients`).
"""

import warnings
from functools import lru_cache

import torch

from flash_qla import arch, env

from . import reference
from .problem import Problem

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_SMALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_MAX_HEAD_DIM = 128


def why_no_kernels(problem: Problem) -> str | None:
    """Returns why the kernels do not cover a problem, None when they do."""
    if problem.device.type != "cuda":
        return f"the inputs are on {problem.device.type}; the kernels need an NVIDIA GPU"
    device_arch = arch.of_device(problem.device)
    if not device_arch.has_kernels:
        return f"GPU {device_arch.name}: {device_arch.reason}"
    if problem.dtype not in KERNEL_DTYPES:
        return f"q has dtype {problem.dtype}; the kernels take bfloat16 and float16"
    for axis, size in (("K", problem.head_dim_k), ("V", problem.head_dim_v)):
        if size > KERNEL_MAX_HEAD_DIM:
            return f"head size {axis} = {size}; the kernels take up to {KERNEL_MAX_HEAD_DIM}"
    return None


@lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    warnings.warn(f"flash_qla runs its PyTorch implementation on this GPU: {reason}", RuntimeWarning, stacklevel=6)


def stages_for(problem: Problem):
    """Returns the module whose stage functions run this problem.

    Raises:
        NotImplementedError: FLASH_QLA_BACKEND=kernels and the kernels do not cover the problem.
        ValueError: the tensors are on meta.
    """
    choice = env.backend()
    stages = problem.derived.get(choice)
    if stages is None:
        stages = problem.derived[choice] = _choose(problem, choice)
    return stages


def _choose(problem: Problem, choice: str):
    if problem.device.type == "meta":
        raise ValueError("q is on meta, which holds no values; supported: tensors on a CPU or a GPU")
    if choice == "reference":
        return reference
    reason = why_no_kernels(problem)
    if reason is None:
        from .kernels import stages

        return stages
    if choice == "kernels":
        raise NotImplementedError(f"FLASH_QLA_BACKEND=kernels, but {reason}")
    if problem.device.type == "cuda":
        _warn_once(reason)
    return reference

"""The kernels' host wrappers on CPU tensors: something else is launched in the place of compiled kernels."""

from contextlib import nullcontext

from flash_qla import arch
from flash_qla.ops.gated_delta_rule.chunk.kernels import (
    ends,
    fused_fwd,
    gradients,
    l2norm,
    segments,
    solve,
    stages,
    states,
)

WRAPPERS = (ends, fused_fwd, gradients, l2norm, segments, solve, states)


def replace_launches(monkeypatch, build, num_sms: int) -> None:
    """For one test, wrappers see a Hopper card and launch what `build(make, spec, arch)` returns.

    Args:
        num_sms: multiprocessors of the pretended card; it decides which variants are launched.
    """
    for module in WRAPPERS:
        monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(arch, "of_device", lambda device: arch.SM90)
    monkeypatch.setattr(arch, "num_sms", lambda device: num_sms)
    monkeypatch.setattr(stages, "on_device", lambda device: nullcontext())

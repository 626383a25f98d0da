"""THE table of GPU architectures: compute capability → what the kernels have there, and why not where they have not.

No CUDA call happens at import; a device's capability is read at its first use and cached per device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Arch:
    """One GPU architecture.

    Attributes:
        name: `sm90`, … as in `coefs/<name>.csv`.
        target: nvcc's architecture, None where we compile nothing.
        mma: the tensor-core instruction that the kernels are scheduled for.
        smem_bytes: shared memory one CTA may use.
        num_sms: multiprocessors of the reference part; the real count is read from the device (`num_sms()`).
        reason: why the kernels do not run there, None where they do.
    """

    name: str
    target: str | None
    mma: str
    smem_bytes: int
    num_sms: int
    reason: str | None = None

    @property
    def has_kernels(self) -> bool:
        return self.reason is None


_NO_SCHEDULE = "no kernel schedule for {} yet"
_TOO_OLD = "compute capability below 8.0 has no bfloat16 tensor cores"

ARCHS: dict[tuple[int, int], Arch] = {
    (8, 0): Arch("sm80", None, "mma", 163 * 1024, 108, _NO_SCHEDULE.format("Ampere (8.0)")),
    (8, 6): Arch("sm86", None, "mma", 99 * 1024, 84, _NO_SCHEDULE.format("Ampere (8.6)")),
    (8, 7): Arch("sm87", None, "mma", 163 * 1024, 16, _NO_SCHEDULE.format("Jetson Orin (8.7)")),
    (8, 9): Arch("sm89", None, "mma", 99 * 1024, 128, _NO_SCHEDULE.format("Ada (8.9)")),
    (9, 0): Arch("sm90", "sm_90a", "wgmma", 227 * 1024, 132),
    (10, 0): Arch("sm100", None, "tcgen05", 227 * 1024, 148, _NO_SCHEDULE.format("Blackwell (10.0)")),
    (10, 3): Arch("sm103", None, "tcgen05", 227 * 1024, 148, _NO_SCHEDULE.format("Blackwell Ultra (10.3)")),
    (11, 0): Arch("sm110", None, "tcgen05", 227 * 1024, 20, _NO_SCHEDULE.format("Thor (11.0)")),
    (12, 0): Arch("sm120", None, "mma", 99 * 1024, 170, _NO_SCHEDULE.format("Blackwell RTX (12.0)")),
    (12, 1): Arch("sm121", None, "mma", 99 * 1024, 48, _NO_SCHEDULE.format("DGX Spark (12.1)")),
}

SM90 = ARCHS[9, 0]


def from_capability(major: int, minor: int) -> Arch:
    """Returns the table's row, or a row without kernels and with the reason for a capability that it does not list."""
    known = ARCHS.get((major, minor))
    if known is not None:
        return known
    reason = _TOO_OLD if major < 8 else f"compute capability {major}.{minor} is unknown to this version"
    return Arch(f"sm{major}{minor}", None, "none", 48 * 1024, 1, reason)


@cache
def _of_index(index: int) -> Arch:
    return from_capability(*torch.cuda.get_device_capability(index))


@cache
def _num_sms_of_index(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def of_device(device: torch.device) -> Arch:
    """Returns the arch of a CUDA device (cached per index)."""
    return _of_index(_index(device))


def num_sms(device: torch.device) -> int:
    """Returns the multiprocessor count of a CUDA device (cached per index)."""
    return _num_sms_of_index(_index(device))

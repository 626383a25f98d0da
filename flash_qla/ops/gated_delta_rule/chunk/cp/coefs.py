"""The planner's coefficients: one CSV per GPU architecture, fitted on the card by `tools/fit_coefs.py`."""

from __future__ import annotations

import csv
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from flash_qla import arch as archs

COLUMNS = ("kernel", "a", "b", "c", "P", "chunk", "arch")
_PACKAGE = Path(archs.__file__).resolve().parent
# In a wheel the folder is inside the package; in a checkout it lies at the top level, where the tools write it.
FOLDERS = (_PACKAGE / "coefs", _PACKAGE.parent / "coefs")


class Coefficients(NamedTuple):
    """Of one kernel: `time_ms = a_ms * depth + b_ms * ctas + c_ms`; see `cost.py` for depth and ctas."""

    a_ms: float
    b_ms: float
    c_ms: float


@dataclass(frozen=True)
class Table:
    """One file.

    Attributes:
        arch: the architecture that was measured; another's than was asked for when the table is borrowed.
        num_sms: multiprocessors of the card that was measured.
        kernels: by kernel name.
    """

    arch: str
    num_sms: int
    kernels: MappingProxyType[str, Coefficients]


def read(path: Path) -> Table:
    """Reads a coefficients file; lines that start with # are comments.

    Raises:
        ValueError: other columns, no rows, rows that disagree on arch or P, or a number below 0.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    reader = csv.DictReader(lines)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path}: columns {reader.fieldnames}; expected {list(COLUMNS)}")
    rows = list(reader)
    if len({(row["arch"], row["P"]) for row in rows}) != 1:
        raise ValueError(f"{path}: rows must share one arch and one P, and there must be a row")
    kernels = {row["kernel"]: Coefficients(*(float(row[name]) for name in "abc")) for row in rows}
    for name, coefficients in kernels.items():
        if not all(x >= 0 for x in coefficients):
            raise ValueError(f"{path}: {name} has {coefficients}; times cannot be negative")
    return Table(rows[0]["arch"], int(rows[0]["P"]), MappingProxyType(kernels))


def find(arch_name: str, folders=FOLDERS) -> Path | None:
    """Returns the file of an architecture, None when nobody measured it."""
    return next((path for folder in folders if (path := folder / f"{arch_name}.csv").is_file()), None)


def sibling(arch: archs.Arch, folders=FOLDERS) -> archs.Arch | None:
    """Returns the measured architecture that is most like another: the same tensor-core instruction before the nearest
    number.
    """
    measured = [other for other in archs.ARCHS.values() if find(other.name, folders)]

    def distance(other):
        number = int(other.name.removeprefix("sm")) - int(arch.name.removeprefix("sm"))
        return other.mma != arch.mma, abs(number), number

    return min(measured, key=distance, default=None)


@cache
def load(arch: archs.Arch) -> Table | None:
    """Returns the table of an architecture, or a sibling's with one warning; None when there is no file at all."""
    path = find(arch.name)
    if path is None:
        other = sibling(arch)
        if other is None:
            return None
        warnings.warn(
            f"flash_qla: no coefs/{arch.name}.csv; the planner borrows {other.name}'s (measure {arch.name} with "
            "tools/measure_kernels.py and tools/fit_coefs.py)",
            RuntimeWarning,
            stacklevel=2,
        )
        path = find(other.name)
    return read(path)

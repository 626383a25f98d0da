"""Prints what a run uses: versions, device, backend, compiler. Fails when a dependency does not load."""

import importlib
import importlib.metadata
import platform
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # an installed flash_qla comes first
ADVICE = "run `bash tools/quickstart.sh`, which installs it, or `pip install -e .` in this checkout"


def describe() -> list[tuple[str, str]]:
    """Returns (label, text) pairs. Raises SystemExit with advice when a dependency cannot be imported."""
    for module in ("torch", "tilelang", "flash_qla"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            sys.exit(f"cannot import {module}: {error}\n{ADVICE}")
    import torch

    import flash_qla
    from flash_qla import arch, env
    from flash_qla.testing.compiled import find_nvcc

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "tilelang", "apache-tvm-ffi")]
    lines = [
        ("flash_qla", f"{flash_qla.__version__} in {Path(flash_qla.__file__).parent}"),
        ("versions", f"Python {platform.python_version()}, {', '.join(versions)}"),
    ]
    if not torch.cuda.is_available():
        lines.append(("device", f"CPU, {torch.get_num_threads()} threads; torch sees no CUDA device"))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        row = arch.of_device(torch.device("cuda", index))
        state = "kernels" if row.has_kernels else f"PyTorch only: {row.reason}"
        lines.append(("device", f"cuda:{index} {torch.cuda.get_device_name(index)} ({row.name}): {state}"))
    lines.append(("backend", f"FLASH_QLA_BACKEND={env.backend()}"))
    lines.append(
        ("nvcc", find_nvcc() or "not found; GPU kernels need it: CUDA toolkit, or pip install 'flash-qla[nvcc]'")
    )
    return lines


if __name__ == "__main__":
    for label, text in describe():
        print(f"    {label:<10} {text}")

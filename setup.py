"""Builds flash-qla: pure Python, so neither torch nor CUDA is needed here (kernels compile at their first call).

The version is `flash_qla/version.py`'s, followed by `QLA_VERSION_SUFFIX` or, when that is unset or empty, by `+` and
the short git hash of this checkout (nothing outside one).
"""

import os
import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def base_version() -> str:
    """Returns the release number. Read as text: importing flash_qla would need torch."""
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "flash_qla/version.py").read_text(), re.M).group(1)


def git_hash() -> str:
    """Returns the short hash of the checkout that this folder is the root of, or an empty string."""

    def git(*args: str) -> str:
        return subprocess.check_output(["git", *args], cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()

    try:
        # An unpacked sdist inside someone else's repository must not take that repository's hash.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return ""
        return git("rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return ""


def version() -> str:
    """Returns the full version; a wheel built from an sdist keeps the sdist's."""
    suffix = os.environ.get("QLA_VERSION_SUFFIX", "")
    if suffix:
        return base_version() + suffix
    pkg_info = ROOT / "PKG-INFO"
    if pkg_info.exists():
        return re.search(r"^Version: (.+)$", pkg_info.read_text(), re.M).group(1)
    commit = git_hash()
    return base_version() + (f"+{commit}" if commit else "")


setup(
    name="flash-qla",
    version=version(),
    description="Gated delta rule (linear attention) operators: fused GPU kernels, and the same algorithm in PyTorch",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="flash_qla developers",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    install_requires=["torch>=2.8", "tilelang>=0.1.12", "apache-tvm-ffi", "numpy"],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist",
            "pytest-timeout",
            "hypothesis",
            "ruff",
            "build",
            "setuptools>=70.1",
            "tqdm",
            "matplotlib",
        ],
        "bench": ["pandas", "matplotlib", "tqdm", "rich"],
        "nvcc": ["tilelang[nvcc]"],
    },
    # coefs/ lies at the top level, where tools write it, and is the package folder flash_qla/coefs once installed.
    packages=[*find_packages(include=["flash_qla", "flash_qla.*"]), "flash_qla.coefs"],
    package_dir={"flash_qla.coefs": "coefs"},
    package_data={
        "flash_qla": ["py.typed"],
        "flash_qla.coefs": ["*.csv", "README.md"],
        "flash_qla.ops.gated_delta_rule": ["README.md"],
    },
    zip_safe=False,
)

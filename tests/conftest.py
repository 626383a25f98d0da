"""Shared by all tests: poisoned fresh memory, the GPU marks and their skips, and what makes a run repeatable.

Repeatable on any machine, however slow or busy: fixed seeds, one thread, the same hypothesis examples, no time limit
but pytest.ini's against hangs. Not even a test of speed may ask the clock: it counts work.
"""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # A GPU machine may lack it; only the tests that import it then fail.
    pass
else:
    # Shared cores make deadlines noise, and the too_slow check, which also reads the clock.
    clockless = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
    # The same examples in every run. To look for new ones: pytest --hypothesis-profile=search.
    settings.register_profile("flash_qla", derandomize=True, **clockless)
    settings.register_profile("search", derandomize=False, **clockless)
    settings.load_profile("flash_qla")


def pytest_configure():
    # Small tensors run ten times slower when two threads wait for each other on shared cores, and the number of
    # threads decides how sums are divided, hence bits.
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Seeds the generators: what a test draws depends neither on the tests before it nor on luck."""
    torch.manual_seed(0)


def _poisoned(function):
    """Wraps a tensor factory: what our own modules get from it is NaN, so an output that nobody writes shows."""

    @functools.wraps(function)
    def factory(*args, **kwargs):
        tensor = function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return tensor
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] == "flash_qla" and (tensor.is_floating_point() or tensor.is_complex()):
            # No dispatch mode sees the poison: replay.py's watches what a call does to data.
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                tensor.fill_(float("nan"))
        return tensor

    return factory


@pytest.fixture(scope="session", autouse=True)
def poisoned_empty():
    """`torch.empty`, `empty_like`, `empty_strided`, `Tensor.new_empty` inside flash_qla return NaN all session long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoned(torch.empty))
        patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
        patch.setattr(torch, "empty_strided", _poisoned(torch.empty_strided))
        patch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
        yield


def pytest_collection_modifyitems(items):
    """Marks tests/gpu and tests/dist, and skips what needs a GPU where there is none."""
    for item in items:
        if item.path.is_relative_to(TESTS / "gpu"):
            item.add_marker(pytest.mark.gpu)
        elif item.path.is_relative_to(TESTS / "dist"):
            item.add_marker(pytest.mark.dist)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    # Asked only when a test needs the answer: CPU runs leave the driver alone.
    if on_gpu and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none on this machine")
        for item in on_gpu:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def nvcc() -> str:
    """The compiler's path. Where there is none its tests are skipped, but fail with FLASH_QLA_REQUIRE_NVCC=1."""
    from flash_qla.testing import compiled

    path = compiled.find_nvcc()
    if path is None and os.environ.get("FLASH_QLA_REQUIRE_NVCC", "") not in ("", "0"):
        pytest.fail("nvcc was not found and FLASH_QLA_REQUIRE_NVCC is set")
    if path is None:
        pytest.skip("nvcc was not found on PATH, in CUDA_HOME or in pip's nvidia packages")
    return path

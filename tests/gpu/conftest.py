"""GPU tests run the kernels and nothing else: a call that they do not cover fails instead of running PyTorch."""

import pytest
import torch

from flash_qla.ops.gated_delta_rule.chunk import replay


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    monkeypatch.setenv("FLASH_QLA_BACKEND", "kernels")


@pytest.fixture(autouse=True)
def nothing_recorded():
    """Each test's first calls go the ordinary way, whatever ran before."""
    replay.forget()


@pytest.fixture(autouse=True)
def give_memory_back():
    """Large tests must not starve the next one."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 16 << 30:
        torch.cuda.empty_cache()

"""Single stages as public functions, on the kernels."""

import pytest

from flash_qla.ops.gated_delta_rule.chunk import kkt_solve
from flash_qla.ops.utils import chunk_local_cumsum
from flash_qla.testing.compare import head_errors
from flash_qla.testing.workloads import make_inputs


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("lengths", [[70, 0, 3, 130], (2, 200)], ids=["packed", "dense"])
def test_kkt_solve_is_the_kernel(lengths, gated, monkeypatch):
    """Guards the gate, which comes as a cumsum and goes to the kernel as steps; no PyTorch on the way."""
    inputs = make_inputs(lengths, 2, 4, gate_profile="mixed", device="cuda")
    cu, k, beta = inputs.cu_seqlens, inputs.k, inputs.beta
    g_cumsum = chunk_local_cumsum(inputs.g, cu_seqlens=cu) if gated else None
    actual = kkt_solve(k, beta, cu_seqlens=cu, g=g_cumsum)
    monkeypatch.setenv("FLASH_QLA_BACKEND", "reference")
    exact = kkt_solve(k.double(), beta.double(), cu_seqlens=cu, g=g_cumsum)
    assert actual.dtype == k.dtype and actual.shape == exact.shape
    assert head_errors("T", actual, exact).max() <= 4e-3

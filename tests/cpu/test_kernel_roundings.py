"""The emulation that bounds some results of the GPU tests: exact without its roundings, within the caps with them."""

import pytest
import torch

from flash_qla.testing.compare import assert_close_per_head, head_errors
from flash_qla.testing.workloads import GATE_PROFILES, make_inputs
from tests import kernel_roundings
from tests.case_inputs import truth, without_dht

BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64


def emulate(inputs, dtype=None):
    return kernel_roundings.forward(inputs, dtype) | kernel_roundings.backward(inputs, dtype)


@pytest.mark.parametrize("heads", [(2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("profile", GATE_PROFILES)
def test_exact_without_roundings(profile, heads):
    """Guards the equations, ragged ends, empty sequences, the tail, and the clamp of the gates."""
    inputs = make_inputs([1, 63, 0, 65, 130], *heads, 32, 16, profile, tail_tokens=5)
    for x in (inputs, without_dht(make_inputs((2, 70), *heads, 16, 32, profile, with_state=False))):
        assert_close_per_head(emulate(x, FP64), truth(x), FP64)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("profile", GATE_PROFILES)
def test_roundings_keep_the_caps(profile, dtype):
    """Guards what bounds are made of: an emulation that lost too much would pass anything."""
    inputs = make_inputs([300, 65], 1, 4, gate_profile=profile, dtype=dtype, tail_tokens=5)
    emulated, expected = emulate(inputs), truth(inputs)
    assert_close_per_head(emulated, expected, dtype)
    for name in ("o", "dq", "dk", "dv"):  # rounded themselves
        assert (head_errors(name, emulated[name], expected[name]) > torch.finfo(dtype).eps / 8).all(), name

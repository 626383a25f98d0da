"""The NaN poisoning of conftest.py works: without it, half the suite could not see an unwritten output."""

import torch
from torch.overrides import TorchFunctionMode


class _Recorder(TorchFunctionMode):
    """Notes every fill_."""

    def __init__(self, written):
        super().__init__()
        self.written = written

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.fill_:
            self.written.append("fill_")
        return function(*args, **(kwargs or {}))


def _run_as(module, expression):
    return eval(expression, {"__name__": module, "torch": torch, "x": torch.ones(3, dtype=torch.bfloat16)})


def test_our_modules_get_nan():
    for expression in (
        "torch.empty(3)",
        "torch.empty(3, 2, dtype=torch.float16)",
        "torch.empty_like(x)",
        "torch.empty_strided((3,), (1,))",
        "x.new_empty(4)",
    ):
        assert _run_as("flash_qla.ops.anything", expression).isnan().all(), expression


def test_integers_and_zeros_are_left_alone():
    assert _run_as("flash_qla.ops.anything", "torch.empty(3, dtype=torch.int32)").dtype == torch.int32
    assert _run_as("flash_qla.ops.anything", "torch.zeros(3)").eq(0).all()


def test_other_modules_are_left_alone():
    """torch's own modules see the same functions, and a name that only begins like ours is not ours."""
    written = []
    with _Recorder(written):
        _run_as("flash_qla_other", "torch.empty(3)")
        assert written == []
        _run_as("flash_qla", "torch.empty(3)")
        assert written == ["fill_"]

"""l2norm and chunk_local_cumsum against their definitions in float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_qla.ops.utils import chunk_local_cumsum
from flash_qla.utils import l2norm, l2norm_bwd, l2norm_fwd

EPS = 1e-6
# Half a unit in the last place of the result, and as much again for the float32 arithmetic before it.
RELATIVE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", RELATIVE, ids=lambda d: str(d).removeprefix("torch."))


def _exact(x, dim=-1):
    x = x.double()
    rstd = (x.square().sum(dim, keepdim=True) + EPS).rsqrt()
    return x * rstd, rstd.squeeze(dim)


@DTYPES
@pytest.mark.parametrize("dim", [-1, 1], ids=["last", "middle"])
def test_l2norm_fwd_and_bwd_match_float64(dtype, dim):
    torch.manual_seed(0)
    x = torch.randn(3, 70, 2, 96).to(dtype)
    dy = torch.randn(3, 70, 2, 96).to(dtype)
    exact = x.double().requires_grad_()
    y_exact, rstd_exact = _exact(exact, dim)
    (dx_exact,) = torch.autograd.grad(y_exact, exact, dy.double())

    y, rstd = l2norm_fwd(x, EPS, dim)
    dx = l2norm_bwd(y, rstd, dy, EPS, dim)
    assert y.dtype == dx.dtype == dtype
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert rstd.shape == rstd_exact.shape
    torch.testing.assert_close(rstd.double(), rstd_exact, rtol=max(RELATIVE[dtype] / 8, 1e-6), atol=0)
    torch.testing.assert_close(y.double(), y_exact, rtol=RELATIVE[dtype], atol=1e-7)
    # dx is a difference: its error is relative to the row, not to the element.
    assert (dx.double() - dx_exact).norm() <= RELATIVE[dtype] * dx_exact.norm()


@DTYPES
def test_l2norm_keeps_dtype_and_survives_zero_rows(dtype):
    """Padding rows are all zero; their gradient must be finite and the dtype must stay (cases, row 30)."""
    x = torch.randn(2, 5, 2, 16).to(dtype)
    x[:, 2] = 0
    x.requires_grad_()
    y = l2norm(x)
    y.float().mul(0.01).sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
    assert (y[:, 2] == 0).all()


def test_l2norm_gradcheck():
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: l2norm(t, 1e-3), x)
    assert torch.autograd.gradcheck(l2norm, x)


@pytest.mark.parametrize("tracked", [False, True], ids=["constant_dy", "tracked_dy"])
def test_l2norm_second_derivative_is_refused(tracked):
    """Also where autograd would take the gradient for a constant and silently drop the term."""
    x = torch.randn(2, 3, 5, requires_grad=True)
    dy = torch.randn(2, 3, 5, requires_grad=tracked)
    (dx,) = torch.autograd.grad(l2norm(x), x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="l2norm has no second derivative"):
        (dx.square().sum() + x.sum()).backward()


def test_l2norm_of_strided_views_equals_contiguous():
    packed = torch.randn(2, 9, 3 * 4, 32)
    for view in (packed[:, :, 4:8], packed.transpose(1, 2)[..., ::2]):
        y, rstd = l2norm_fwd(view)
        y_dense, rstd_dense = l2norm_fwd(view.contiguous())
        torch.testing.assert_close(y, y_dense, rtol=1e-6, atol=0)
        torch.testing.assert_close(rstd, rstd_dense, rtol=1e-6, atol=0)


def test_l2norm_leaves_its_input_alone_and_ignores_autocast():
    x = torch.randn(4, 8, 2, 32, requires_grad=True)
    before = x.detach().clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = l2norm(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, l2norm(x)) and torch.equal(x, before)


def _loop_cumsum(g, chunk_size, reverse, bounds):
    """The definition, in float64, over flat rows."""
    flat = g.double().flatten(0, 1)
    out = torch.zeros_like(flat)
    for start, end in bounds:
        for lo in range(start, end, chunk_size):
            part = flat[lo : min(lo + chunk_size, end)]
            out[lo : lo + len(part)] = part.flip(0).cumsum(0).flip(0) if reverse else part.cumsum(0)
    return out.view(g.shape)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("chunk_size", [16, 64], ids="chunk{}".format)
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 200], ids="T{}".format)
def test_cumsum_dense(num_tokens, chunk_size, reverse):
    g = -torch.rand(2, num_tokens, 3)
    bounds = [(n * num_tokens, (n + 1) * num_tokens) for n in range(2)]
    out = chunk_local_cumsum(g, chunk_size, reverse)
    assert out.dtype == torch.float32 and out.shape == g.shape
    torch.testing.assert_close(out.double(), _loop_cumsum(g, chunk_size, reverse, bounds), rtol=1e-5, atol=1e-6)


@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    tail=st.integers(0, 3),
    chunk_size=st.sampled_from([16, 32, 64]),
    reverse=st.booleans(),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_cumsum_varlen(lengths, tail, chunk_size, reverse, index_dtype):
    """Empty sequences anywhere; rows after the last sequence are zero."""
    offsets = list(itertools.accumulate(lengths, initial=0))
    g = -torch.rand(1, offsets[-1] + tail, 2)
    cu_seqlens = torch.tensor(offsets, dtype=index_dtype)
    out = chunk_local_cumsum(g, chunk_size, reverse, cu_seqlens)
    expected = _loop_cumsum(g, chunk_size, reverse, itertools.pairwise(offsets))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert (out[:, offsets[-1] :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_cumsum_is_float32_whatever_the_gate(dtype):
    g = -torch.rand(1, 100, 2).to(dtype)
    out = chunk_local_cumsum(g)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), _loop_cumsum(g, 64, False, [(0, 100)]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "arguments", "words"),
    [
        pytest.param((4, 3), {}, r"g must .*\[B, T, H\].*\(4, 3\)", id="rank"),
        pytest.param((1, 4, 3), {"chunk_size": 0}, "chunk_size.*0", id="chunk_size"),
        pytest.param((2, 4, 3), {"cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens.*B = 2", id="batch"),
    ],
)
def test_cumsum_refuses(shape, arguments, words):
    with pytest.raises(ValueError, match=words):
        chunk_local_cumsum(torch.zeros(shape), **arguments)

"""L2 normalisation of q and k in one launch, forward and backward. Equations N1 and N2 of the op's README.

    y = x * rstd, rstd = rsqrt(sum(x^2) + eps)            dx = rstd * (dy - y * sum(y * dy))

Memory-bound: every row is read once and written once, 16 bytes a thread, reduced by shuffles inside a row's threads;
no shared memory and no barrier. PyTorch's composition reads x twice and takes eight launches.

Grid: 2 * ceil(rows / ROWS) CTAs of THREADS threads, even ones for q, odd ones for k; a row is one (batch, token, head).
"""

from dataclasses import dataclass

import tilelang.language as T
import torch

from flash_qla import arch

from .build import build
from .launch import DTYPE_NAMES, tma_ready
from .tiles import program

ROWS, THREADS = 32, 256


@dataclass(frozen=True)
class Spec:
    """Compile key: dtype of q and k, head size (a multiple of 8), direction."""

    dtype: str
    head_dim: int
    is_backward: bool


def specs(dtype: str, head_dim: int, backward: bool) -> list[Spec]:
    """Every variant that a configuration can meet."""
    return [Spec(dtype, head_dim, False)] + ([Spec(dtype, head_dim, True)] if backward else [])


@T.macro
def _start(spec, bx, tokens, heads):
    """Returns the CTA's tile and its barrier, and where its rows lie: batch, first token, head."""
    tile = T.alloc_shared((ROWS, spec.head_dim), spec.dtype)
    loaded = T.alloc_barrier(1)
    h = T.truncmod(T.truncdiv(bx, 2), heads)
    blocks = T.truncdiv(T.truncdiv(bx, 2), heads)
    first = T.truncmod(blocks, T.ceildiv(tokens, ROWS)) * ROWS
    b = T.truncdiv(blocks, T.ceildiv(tokens, ROWS))
    return tile, loaded, b, first, h


@T.macro
def _load_rows(dest, tile, x, b, first, h, loaded):
    """dest[i, j] = x[b, first + i, h, j]; TMA, because run-time strides hide the alignment of 16-byte loads."""
    if T.get_thread_binding() < 32:
        T.tma_copy(x[b, first : first + ROWS, h, 0 : dest.shape[1]], tile, barrier=loaded)
        if T.shuffle_elect(32):
            T.barrier_arrive(loaded)
    T.barrier_wait(loaded, 0)
    T.copy(tile, dest)


@T.macro
def _normalize(spec, x, y, rstd, tile, loaded, b, first, h, tokens, eps):
    X = T.alloc_fragment((ROWS, spec.head_dim), spec.dtype)
    squares = T.alloc_fragment((ROWS, spec.head_dim), "float32")
    total = T.alloc_fragment((ROWS,), "float32")
    _load_rows(X, tile, x, b, first, h, loaded)
    for i, j in T.Parallel(ROWS, spec.head_dim):
        squares[i, j] = T.cast(X[i, j], "float32") * T.cast(X[i, j], "float32")
    T.reduce_sum(squares, total, dim=1)
    for i in T.Parallel(ROWS):
        total[i] = T.rsqrt(total[i] + eps)
    for i, j in T.Parallel(ROWS, spec.head_dim):
        X[i, j] = T.cast(T.cast(X[i, j], "float32") * total[i], spec.dtype)
    T.copy(X, y[b, first : first + ROWS, h, 0 : spec.head_dim])
    for i in T.Parallel(ROWS):
        if first + i < tokens:
            rstd[b, first + i, h] = total[i]


@T.macro
def _differentiate(spec, dx, dy, y, rstd, tile, loaded, b, first, h):
    Y = T.alloc_fragment((ROWS, spec.head_dim), spec.dtype)
    dY = T.alloc_fragment((ROWS, spec.head_dim), spec.dtype)
    products = T.alloc_fragment((ROWS, spec.head_dim), "float32")
    total = T.alloc_fragment((ROWS,), "float32")
    scale = T.alloc_fragment((ROWS,), "float32")
    T.copy(y[b, first : first + ROWS, h, 0 : spec.head_dim], Y)
    for i in T.Parallel(ROWS):
        scale[i] = rstd[b, first + i, h]
    _load_rows(dY, tile, dy, b, first, h, loaded)
    for i, j in T.Parallel(ROWS, spec.head_dim):
        products[i, j] = T.cast(Y[i, j], "float32") * T.cast(dY[i, j], "float32")
    T.reduce_sum(products, total, dim=1)
    for i, j in T.Parallel(ROWS, spec.head_dim):
        dY[i, j] = T.cast((T.cast(dY[i, j], "float32") - T.cast(Y[i, j], "float32") * total[i]) * scale[i], spec.dtype)
    T.copy(dY, dx[b, first : first + ROWS, h, 0 : spec.head_dim])


def make(spec: Spec):
    """Returns the prim_func of a variant: `l2norm_forward` or `l2norm_backward`."""
    dims = T.dynamic("batch"), T.dynamic("tokens"), T.dynamic("heads")
    batch, tokens, heads = dims

    def source(name):
        return program.strided_rows(name, (*dims, spec.head_dim), spec.dtype)

    def output():  # one object per parameter: parameters that share one would be one buffer
        return T.Tensor((*dims, spec.head_dim), spec.dtype)

    def rstd():
        return T.Tensor(dims, "float32")

    num_ctas = 2 * heads * T.ceildiv(tokens, ROWS) * batch

    @T.prim_func
    def l2norm_forward(
        q: source("q"), k: source("k"), yq: output(), yk: output(), rstd_q: rstd(), rstd_k: rstd(), eps: T.float32
    ):
        with T.Kernel(num_ctas, threads=THREADS) as block:
            tile, loaded, b, first, h = _start(spec, block, tokens, heads)
            if block % 2 == 0:
                _normalize(spec, q, yq, rstd_q, tile, loaded, b, first, h, tokens, eps)
            else:
                _normalize(spec, k, yk, rstd_k, tile, loaded, b, first, h, tokens, eps)

    @T.prim_func
    def l2norm_backward(
        dq: output(), dk: output(), dyq: source("dyq"), dyk: source("dyk"), yq: output(), yk: output(),
        rstd_q: rstd(), rstd_k: rstd(),
    ):  # fmt: skip
        with T.Kernel(num_ctas, threads=THREADS) as block:
            tile, loaded, b, first, h = _start(spec, block, tokens, heads)
            if block % 2 == 0:
                _differentiate(spec, dq, dyq, yq, rstd_q, tile, loaded, b, first, h)
            else:
                _differentiate(spec, dk, dyk, yk, rstd_k, tile, loaded, b, first, h)

    return l2norm_backward if spec.is_backward else l2norm_forward


def normalize(q: torch.Tensor, k: torch.Tensor, eps: float):
    """Returns yq, yk and their rstd `[B, T, Hq]` float32."""
    yq, yk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    rstd_q, rstd_k = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    kernel = build(make, Spec(DTYPE_NAMES[q.dtype], q.shape[-1], False), arch.of_device(q.device))
    kernel(tma_ready(q), tma_ready(k), yq, yk, rstd_q, rstd_k, eps)
    return yq, yk, rstd_q, rstd_k


def normalize_backward(dyq, dyk, yq, yk, rstd_q, rstd_k):
    """Returns dq, dk."""
    dq, dk = torch.empty_like(yq), torch.empty_like(yk)
    kernel = build(make, Spec(DTYPE_NAMES[yq.dtype], yq.shape[-1], True), arch.of_device(yq.device))
    kernel(dq, dk, tma_ready(dyq), tma_ready(dyk), yq, yk, rstd_q, rstd_k)
    return dq, dk

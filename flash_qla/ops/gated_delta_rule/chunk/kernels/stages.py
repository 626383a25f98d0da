"""The kernels as stage functions, the twins of those in `reference.py`: pads head sizes and skips empty launches.

Zero padding of head sizes is exact: padded columns of k and v only ever meet zeros.
"""

import torch
import torch.nn.functional as F

from ..constants import CHUNK_SIZE
from ..sequences import Sequences
from ..split import SegmentStates, Split
from . import fused_fwd as _fused_fwd
from . import gradients as _gradients
from . import l2norm as _l2norm
from . import segments as _segments
from . import solve as _solve
from . import states as _states
from .launch import native_head_dim, on_device, tma_ready


def _pad(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))


def _pad_state(state, head_dim_k, head_dim_v):
    if state is None or state.shape[-2:] == (head_dim_k, head_dim_v):
        return state
    return F.pad(state, (0, head_dim_v - state.shape[-1], 0, head_dim_k - state.shape[-2]))


class _Padded:
    """Destination tensors at native sizes; `write_back` copies the caller's part. No copy where sizes are native."""

    def __init__(self):
        self._pairs = []

    def __call__(self, target, *sizes):
        """Returns target, or a stand-in whose last axes have `sizes`."""
        if target is None or target.shape[-len(sizes) :] == sizes:
            return target
        stand_in = target.new_empty((*target.shape[: -len(sizes)], *sizes))
        self._pairs.append((target, stand_in))
        return stand_in

    def write_back(self):
        for target, stand_in in self._pairs:
            target.copy_(stand_in[tuple(slice(0, n) for n in target.shape)])


def _is_empty(seqs: Sequences) -> bool:
    return seqs.flat_tokens == 0 or seqs.num_seqs == 0


def _pass_state_through(target, source):
    if target is not None:
        if source is None:
            target.zero_()
        else:
            target.copy_(source)


def normalize(q, k, eps: float):
    if q.numel() == 0:
        return q, k, *(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    head_dim = q.shape[-1]
    aligned = -(-head_dim // 8) * 8  # TMA moves rows of 16 bytes
    with on_device(q.device):
        yq, yk, rstd_q, rstd_k = _l2norm.normalize(_pad(q, aligned), _pad(k, aligned), eps)
    return yq[..., :head_dim], yk[..., :head_dim], rstd_q, rstd_k


def normalize_backward(dyq, dyk, yq, yk, rstd_q, rstd_k):
    if yq.numel() == 0:
        return torch.zeros_like(yq), torch.zeros_like(yk)
    head_dim = yq.shape[-1]
    aligned = -(-head_dim // 8) * 8
    padded = (_pad(x, aligned).contiguous() for x in (dyq, dyk, yq, yk))
    with on_device(yq.device):
        dq, dk = _l2norm.normalize_backward(*padded, rstd_q, rstd_k)
    return dq[..., :head_dim], dk[..., :head_dim]


def solve(k, g, beta, seqs: Sequences, ready=False):
    if _is_empty(seqs):
        batch, num_tokens, num_v_heads = g.shape
        g_cumsum = g.new_zeros(g.shape, dtype=torch.float32)
        return g_cumsum, k.new_zeros((batch, num_tokens, num_v_heads, CHUNK_SIZE))
    with on_device(k.device):
        return _solve.solve(_pad(k, native_head_dim(k.shape[-1])), g, beta, seqs, ready)


def solve_and_walk(o, ht, h, q, k, v, g, beta, scale, h0, seqs: Sequences, keep_inverse=True):
    if _is_empty(seqs):
        g_cumsum, T_inv = solve(k, g, beta, seqs)
        fused_forward(o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs)
        return g_cumsum, T_inv if keep_inverse else None
    dim_k, dim_v, padded = native_head_dim(k.shape[-1]), native_head_dim(v.shape[-1]), _Padded()
    with on_device(k.device):
        # Whatever else is launched comes before solve: the walk starts while solve ends.
        q, k, v = (tma_ready(_pad(x, dim)) for x, dim in ((q, dim_k), (k, dim_k), (v, dim_v)))
        h0 = _pad_state(h0, dim_k, dim_v)
        targets = padded(o, dim_v), padded(ht, dim_k, dim_v), padded(h, dim_k, dim_v)
        ready = not keep_inverse
        g_cumsum, T_inv = _solve.solve(k, g, beta, seqs, ready)
        _fused_fwd.fused_forward(
            *targets, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs, follows_solve=True, ready=ready
        )  # fmt: skip
        padded.write_back()
    return g_cumsum, T_inv if keep_inverse else None


def entering_states(
    k, v, T_inv, g_cumsum, beta, h0, seqs: Sequences, split: Split, for_backward=False, ready=False
):  # fmt: skip
    if _is_empty(seqs):
        return SegmentStates(split, k.new_empty(0))
    dim_k, dim_v = native_head_dim(k.shape[-1]), native_head_dim(v.shape[-1])
    with on_device(k.device):
        return _segments.entering_states(
            _pad(k, dim_k), _pad(v, dim_v), T_inv, g_cumsum, beta, _pad_state(h0, dim_k, dim_v), seqs, split,
            for_backward, ready,
        )  # fmt: skip


def leaving_cotangents(q, k, T_inv, g_cumsum, beta, do, dht, scale, seqs: Sequences, split: Split, entering):
    if _is_empty(seqs):
        return SegmentStates(split, k.new_empty(0))
    dim_k, dim_v = native_head_dim(k.shape[-1]), native_head_dim(do.shape[-1])
    with on_device(k.device):
        return _segments.leaving_cotangents(
            _pad(q, dim_k), _pad(k, dim_k), T_inv, g_cumsum, beta, _pad(do, dim_v), _pad_state(dht, dim_k, dim_v),
            scale, seqs, split, entering,
        )  # fmt: skip


def fused_forward(
    o, ht, h, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs: Sequences, entering=None, ready=False
):  # fmt: skip
    if _is_empty(seqs):
        o.zero_()
        return _pass_state_through(ht, h0)
    dim_k, dim_v, padded = native_head_dim(k.shape[-1]), native_head_dim(v.shape[-1]), _Padded()
    with on_device(k.device):
        _fused_fwd.fused_forward(
            padded(o, dim_v), padded(ht, dim_k, dim_v), padded(h, dim_k, dim_v), _pad(q, dim_k), _pad(k, dim_k),
            _pad(v, dim_v), T_inv, g_cumsum, beta, scale, _pad_state(h0, dim_k, dim_v), seqs, entering,
            ready=ready,
        )  # fmt: skip
        padded.write_back()


def backward_states(
    q, k, v, T_inv, g_cumsum, beta, do, scale, h0, dht, dh0, seqs: Sequences, entering=None, leaving=None, dv=None
):
    """As `reference.backward_states`. The first result is (S, the rest of it): the rest lies in dv, v's gradient to be,
    or in as much memory where dv is None or has no native head size.
    """
    if _is_empty(seqs):
        _pass_state_through(dh0, dht)
        return None, None
    dim_k, dim_v, padded = native_head_dim(k.shape[-1]), native_head_dim(v.shape[-1]), _Padded()
    if dv is None or dv.shape[-1] != dim_v:
        dv = v.new_empty((*v.shape[:3], dim_v))
    with on_device(k.device):
        S, dS = _states.backward_states(
            _pad(q, dim_k), _pad(k, dim_k), _pad(v, dim_v), T_inv, g_cumsum, beta, _pad(do, dim_v), scale,
            _pad_state(h0, dim_k, dim_v), _pad_state(dht, dim_k, dim_v), padded(dh0, dim_k, dim_v), seqs,
            entering, leaving, dv=dv,
        )  # fmt: skip
        padded.write_back()
    return (S, dv), dS


def gradients(dq, dk, dv, dbeta, dg, q, k, v, T_inv, g_cumsum, beta, do, scale, S, dS, seqs: Sequences):
    if _is_empty(seqs):
        for target in (dq, dk, dv, dbeta, dg):
            target.zero_()
        return
    dim_k, dim_v, padded = native_head_dim(k.shape[-1]), native_head_dim(v.shape[-1]), _Padded()
    inputs = (tma_ready(_pad(x, dim)) for x, dim in ((q, dim_k), (k, dim_k), (v, dim_v), (do, dim_v)))
    S, room = S
    with on_device(k.device):
        q, k, v, do = inputs
        _gradients.gradients(
            padded(dq, dim_k), padded(dk, dim_k), room, dbeta, dg, q, k, v, T_inv, g_cumsum, beta, do,
            scale, S, dS, seqs,
        )  # fmt: skip
        padded.write_back()
        if room is not dv:
            dv.copy_(room[..., : dv.shape[-1]])

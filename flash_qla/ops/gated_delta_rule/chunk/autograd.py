"""The operator as one autograd node.

Saved for backward: the inputs, g_cumsum and T_inv, and of a split the states at the segments' borders (and no others)
where the backward splits alike.
"""

import torch

from flash_qla.utils.guards import first_order_only, no_autocast

from . import cp
from .backward import backward
from .constants import GATE_FLOOR, L2NORM_EPS
from .forward import forward
from .problem import Problem
from .sequences import Sequences
from .split import SegmentStates


class ChunkGatedDeltaRule(torch.autograd.Function):
    """o, final_state = apply(q, k, v, g, beta, initial_state, cu_seqlens, stages, problem, seqs, output_final_state,
    request, keep): the last two as in `forward`.
    """

    @staticmethod
    def forward(
        ctx, q, k, v, g, beta, initial_state, cu_seqlens, stages, problem: Problem, seqs: Sequences, want_ht,
        request: cp.Request, keep: bool,
    ):  # fmt: skip
        with no_autocast(q.device.type):
            g_cumsum, T_inv, o, _, final_state, entering = forward(
                stages, problem, seqs, q, k, v, g, beta, initial_state, output_final_state=want_ht, request=request,
                keep=keep,
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        # cu_seqlens is saved too: autograd then refuses a backward after it was overwritten, which would be wrong
        # The segments' states too, not as attributes: checkpointing drops what is saved, and only that.
        border = (None,) * 3 if entering is None else entering.tensors
        ctx.save_for_backward(q, k, v, g, beta, initial_state, g_cumsum, T_inv, cu_seqlens, *border)
        ctx.stages, ctx.problem, ctx.seqs, ctx.request = stages, problem, seqs, request
        ctx.split = None if entering is None else entering.split
        return o, final_state

    @staticmethod
    def backward(ctx, do, dht):
        if do is None and dht is None:
            return (None,) * len(ctx.needs_input_grad)
        inputs = ctx.saved_tensors
        with torch.no_grad(), no_autocast(inputs[0].device.type):
            grads = _gradients(ctx, inputs, do, dht)
        cotangents = [x for x in (do, dht) if x is not None]
        grads = [
            x if x is None else first_order_only("chunk_gated_delta_rule", x, *cotangents, *inputs[:6]) for x in grads
        ]
        return *grads, *(None,) * (len(ctx.needs_input_grad) - len(grads))


class NormalizeQK(torch.autograd.Function):
    """y_q, y_k = apply(q, k, stages): both L2 norms in one pass; saves what the operator saves anyway, and rstd."""

    @staticmethod
    def forward(ctx, q, k, stages):
        yq, yk, rstd_q, rstd_k = stages.normalize(q, k, L2NORM_EPS)
        ctx.save_for_backward(yq, yk, rstd_q, rstd_k)
        ctx.stages = stages
        return yq, yk

    @staticmethod
    def backward(ctx, dyq, dyk):
        saved = ctx.saved_tensors
        with torch.no_grad():
            grads = ctx.stages.normalize_backward(dyq, dyk, *saved)
        return *(first_order_only("l2norm", x, dyq, dyk, *saved[:2]) for x in grads), None


def _gradients(ctx, saved, do, dht):
    """Gradients of q, k, v, g, beta, initial_state in their dtypes; None for those that nobody needs."""
    q, k, v, g, beta, initial_state, g_cumsum, T_inv, _, *border = saved
    needs = ctx.needs_input_grad
    entering = None if ctx.split is None else SegmentStates(ctx.split, *border)
    do = torch.zeros_like(v) if do is None else do.to(v.dtype)
    dq, dk, dv, dbeta, dg, dh0 = backward(
        ctx.stages, ctx.problem, ctx.seqs, q, k, v, T_inv, g_cumsum, beta, initial_state, do, dht,
        request=ctx.request, entering=entering, need=any(needs[:5]),
    )  # fmt: skip
    if needs[3]:
        dg = dg.masked_fill_(g < GATE_FLOOR, 0).to(g.dtype)  # the clamp's own gradient
    if needs[4]:
        dbeta = dbeta.to(beta.dtype)
    return [x if wanted else None for x, wanted in zip((dq, dk, dv, dg, dbeta, dh0), needs)]

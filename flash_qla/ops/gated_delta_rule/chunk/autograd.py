"""The operator as one autograd node.

Saved for backward: the inputs, g_cumsum and T_inv, and of a split the states at the segments' borders (and no others)
where the backward splits alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_qla.utils.guards import first_order_only, no_autocast, reject_transforms

from . import cp, replay
from .backward import backward
from .constants import CHUNK_SIZE, GATE_FLOOR, L2NORM_EPS
from .forward import forward
from .problem import Problem
from .sequences import Sequences
from .split import SegmentStates, Split


@dataclass
class Call:
    """What the node needs besides tensors; the same for every call that is recorded under one key.

    Attributes:
        want_ht, request, keep: as in `forward`.
        normalize: whether q and k are normalised before.
        key: from `replay.key_of`, or None.
        split: of the forward, where its segments' states are kept.
    """

    stages: object
    problem: Problem
    request: cp.Request
    want_ht: bool
    keep: bool
    normalize: bool
    key: tuple | None
    split: Split | None = None


def replayed(known: replay.Replay, q, k, v, g, beta, initial_state, cu_seqlens):
    """Returns o and the final state of a call with gradients whose forward was recorded."""
    call = known.context
    seqs = Sequences.build(call.problem.batch, call.problem.num_tokens, CHUNK_SIZE, cu_seqlens)
    if call.normalize:
        q, k = NormalizeQK.apply(q, k, call.stages, seqs)
    return ChunkGatedDeltaRule.apply(q, k, v, g, beta, initial_state, cu_seqlens, call, seqs, known)


class ChunkGatedDeltaRule(torch.autograd.Function):
    """o, final_state = apply(q, k, v, g, beta, initial_state, cu_seqlens, call, seqs, known): the recorded forward or
    None.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, cu_seqlens, call: Call, seqs: Sequences, known=None):
        tensors = q, k, v, g, beta, initial_state, cu_seqlens
        if known is None:
            with no_autocast(q.device.type), replay.recording(call.key, tensors) as results:
                g_cumsum, T_inv, o, _, final_state, entering = forward(
                    call.stages, call.problem, seqs, *tensors[:6], output_final_state=call.want_ht,
                    request=call.request, keep=call.keep,
                )  # fmt: skip
                call.split = None if entering is None else entering.split
                results.context = call
                results += (o, final_state, g_cumsum, T_inv, *((None,) * 3 if entering is None else entering.tensors))
        else:
            results = known(*tensors)
        o, final_state, *saved = results
        ctx.set_materialize_grads(False)
        # cu_seqlens is saved too: autograd then refuses a backward after it was overwritten, which would be wrong
        # The segments' states too, not as attributes: checkpointing drops what is saved, and only that.
        ctx.save_for_backward(*tensors, *saved)
        ctx.call, ctx.seqs = call, seqs
        return o, final_state

    @staticmethod
    def backward(ctx, do, dht):
        if do is None and dht is None:
            return (None,) * len(ctx.needs_input_grad)
        inputs = ctx.saved_tensors
        reject_transforms("chunk_gated_delta_rule", do, dht)
        with torch.no_grad(), no_autocast(inputs[0].device.type):
            grads = _gradients(ctx, inputs, do, dht)
        cotangents = [x for x in (do, dht) if x is not None]
        grads = [
            x if x is None else first_order_only("chunk_gated_delta_rule", x, *cotangents, *inputs[:6]) for x in grads
        ]
        return *grads, *(None,) * (len(ctx.needs_input_grad) - len(grads))


class NormalizeQK(torch.autograd.Function):
    """y_q, y_k = apply(q, k, stages, seqs): both norms in one pass; saves what the operator saves anyway, and rstd."""

    @staticmethod
    def forward(ctx, q, k, stages, seqs: Sequences):
        yq, yk, rstd_q, rstd_k = stages.normalize(q, k, L2NORM_EPS)
        ctx.save_for_backward(yq, yk, rstd_q, rstd_k)
        ctx.stages, ctx.seqs = stages, seqs
        return yq, yk

    @staticmethod
    def backward(ctx, dyq, dyk):
        saved = ctx.saved_tensors
        with torch.no_grad():
            grads = ctx.stages.normalize_backward(dyq, dyk, *saved)
            ctx.seqs.zero_padding_(*grads)  # normalising goes by rows, those of no sequence too
        return *(first_order_only("l2norm", x, dyq, dyk, *saved[:2]) for x in grads), None, None


def _gradients(ctx, saved, do, dht):
    """Gradients of q, k, v, g, beta, initial_state in their dtypes; None for those that nobody needs."""
    needs = ctx.needs_input_grad
    # A gradient may be a lazily negated view, and kernels read memory.
    do = torch.zeros_like(saved[2]) if do is None else do.to(saved[2].dtype).resolve_neg()
    dht = None if dht is None else dht.resolve_neg()
    dq, dk, dv, dbeta, dg, dh0 = _backward(ctx.call, ctx.seqs, (*saved, do, dht), any(needs[:5]))
    if needs[3]:
        g = saved[3]
        dg.masked_fill_(g < GATE_FLOOR, 0)  # the clamp's own gradient
        dg = dg.to(g.dtype)
    if needs[4]:
        dbeta = dbeta.to(saved[4].dtype)
    return [x if wanted else None for x, wanted in zip((dq, dk, dv, dg, dbeta, dh0), needs)]


def _backward(call: Call, seqs: Sequences, tensors, need: bool):
    """`backward`, replayed where an equal one was recorded."""
    key = None if call.key is None else replay.key_of(tensors, (need,))
    key = None if key is None else (key, call.key)
    known = None if key is None else replay.find(key)
    if known is not None:
        return known(*tensors)
    q, k, v, g, beta, initial_state, _, g_cumsum, T_inv, *border, do, dht = tensors
    entering = None if call.split is None else SegmentStates(call.split, *border)
    with replay.recording(key, tensors) as results:
        grads = backward(
            call.stages, call.problem, seqs, q, k, v, T_inv, g_cumsum, beta, initial_state, do, dht,
            request=call.request, entering=entering, need=need,
        )  # fmt: skip
        results += grads
    return grads

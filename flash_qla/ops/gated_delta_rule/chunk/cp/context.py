"""The context-parallel context: FLA's fields plus which kind of splitting it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch

from flash_qla.utils.guards import reject_transforms

from ..constants import CHUNK_SIZE, GATE_FLOOR
from ..problem import Problem, check_flags, require_tensor
from ..sequences import Sequences
from .planner import AUTO, Request


@dataclass(eq=False)  # its tensors have no truth value: two contexts are equal when they are the same
class FlashQLACPContext:
    """What a context-parallel caller says about its sequences.

    Attributes:
        group: process group of the cards that share the sequences, None inside one card.
        cu_seqlens, cu_seqlens_cpu: `[N + 1]` offsets of this card's part.
        is_first_rank, is_last_rank, pre_num_ranks, post_num_ranks: this card's place among those of its sequence.
        conv1d_kernel_size, pre_num_conv_tokens: of the short convolution before the operator.
        is_inter, is_intra: split across cards; split inside the card.
        force_intra: split even where the planner would not.
        decays: by how much each value head's gate decays in a chunk, natural logs >= 0; None when nobody measured.
        segment_chunks: chunks of a segment in place of the planner's choice (measurements, tests).
    """

    group: object | None = None
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    is_first_rank: bool = True
    is_last_rank: bool = True
    pre_num_ranks: int = 0
    post_num_ranks: int = 0
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int = 0
    is_inter: bool = False
    is_intra: bool = False
    force_intra: bool = False
    decays: tuple[float, ...] | None = None
    segment_chunks: int | None = None


def build_cp_context(
    cu_seqlens=None, *, enable_inter=False, enable_intra=False, group=None, num_v_heads=None, chunk_size=None,
    conv1d_kernel_size=None, cu_seqlens_cpu=None, g=None, is_train=False, force_intra_cp=False,
) -> FlashQLACPContext:  # fmt: skip
    """Describes how sequences are shared; pass the result as cp_context.

    Args:
        cu_seqlens, cu_seqlens_cpu: `[N + 1]` offsets, on the device and on the host.
        enable_intra: the planner may split sequences inside the card, whatever auto_cp says.
        force_intra_cp: split every sequence of two chunks or more.
        enable_inter, group: sharing sequences among cards: not built yet.
        g: `[B, T, Hv]` natural-log gates like those to come. The planner then knows how fast each value head decays,
            where it would assume that a quarter never do. **Reads the device once**, here and not in the calls.
        num_v_heads: checked against g.
        chunk_size: None or 64.
        is_train: accepted and unused: a plan does not depend on gradients.

    Raises:
        NotImplementedError: enable_inter, or a group of several cards.
        ValueError: a chunk_size other than 64, a group that is none, offsets that no call would take, a g that does not
            fit or holds NaN.
    """
    check_flags(enable_inter=enable_inter, enable_intra=enable_intra, is_train=is_train, force_intra_cp=force_intra_cp)
    if enable_inter:
        raise NotImplementedError("enable_inter=True: context parallelism across cards is not supported yet")
    if chunk_size is not None and not (isinstance(chunk_size, Real) and chunk_size == CHUNK_SIZE):
        raise ValueError(f"chunk_size={chunk_size!r} is not supported; supported: None or {CHUNK_SIZE}")
    _refuse_several_cards(group)
    reject_transforms("build_cp_context", cu_seqlens, cu_seqlens_cpu, g)
    if g is None:  # whose batch and device the offsets must fit otherwise
        Problem.check_cu_seqlens(1, getattr(cu_seqlens, "device", None), cu_seqlens, cu_seqlens_cpu)
    return FlashQLACPContext(
        group=group, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, conv1d_kernel_size=conv1d_kernel_size,
        is_intra=bool(enable_intra), force_intra=bool(force_intra_cp),
        decays=None if g is None else _decays_per_chunk(g, num_v_heads, cu_seqlens, cu_seqlens_cpu),
    )  # fmt: skip


def _decays_per_chunk(g, num_v_heads, cu_seqlens, cu_seqlens_cpu) -> tuple[float, ...]:
    """By how much each value head decays in a chunk on average, to two digits: plans are kept by value."""
    require_tensor("g", g, 3, "[B, T, Hv]")
    if num_v_heads is not None and g.shape[2] != num_v_heads:
        raise ValueError(f"g must be a tensor of shape [B, T, Hv], Hv = {num_v_heads!r}, got {tuple(g.shape)}")
    if not g.is_floating_point() or g.device.type == "meta":
        raise ValueError(f"g must be of a floating-point dtype, on a CPU or a GPU, got {g.dtype} on {g.device}")
    batch, num_tokens, _ = g.shape
    Problem.check_cu_seqlens(batch, g.device, cu_seqlens, cu_seqlens_cpu)
    g = Sequences.build(batch, num_tokens, CHUNK_SIZE, cu_seqlens).zero_padding(g.detach())
    sums = g.float().clamp(min=GATE_FLOOR).flatten(0, 1).sum(0)
    if cu_seqlens is None:
        tokens = sums.new_full((1,), batch * num_tokens)
    else:
        tokens = (cu_seqlens[-1:] - cu_seqlens[:1]).to(sums)
    decays = (-CHUNK_SIZE * sums / tokens.clamp(min=1)).tolist()  # the one device read
    if any(decay != decay for decay in decays):
        raise ValueError("g holds NaN; build the context with gates like those of the calls, or without g")
    return tuple(float(f"{max(0.0, decay):.1e}") for decay in decays)


def _refuse_several_cards(group) -> None:
    if group is not None and not hasattr(group, "size"):
        raise ValueError(f"group must be a torch.distributed.ProcessGroup or None, got {group!r}")
    if group is not None and group.size() > 1:
        raise NotImplementedError(
            f"cp_context.group has {group.size()} ranks: context parallelism across cards is not supported yet"
        )


def resolve_cu_seqlens(cp_context, cu_seqlens, cu_seqlens_cpu):
    """Returns (cu_seqlens, cu_seqlens_cpu): the call's own, or else the context's. Accepts FLA's context objects.

    Raises:
        ValueError: cp_context has none of the fields.
        NotImplementedError: the context spans several cards.
    """
    if cp_context is None:
        return cu_seqlens, cu_seqlens_cpu
    if not (hasattr(cp_context, "group") or hasattr(cp_context, "cu_seqlens")):
        raise ValueError(
            f"cp_context must be a FlashQLACPContext or have its fields (group, cu_seqlens, …), got {cp_context!r}"
        )
    _refuse_several_cards(getattr(cp_context, "group", None))
    of_context = getattr(cp_context, "cu_seqlens", None)
    if cu_seqlens is None:
        cu_seqlens = of_context
    # The context's host copy belongs to the context's offsets, not to others that the call brings.
    # One that comes without offsets is handed on too: the checks refuse it, and nobody takes the input for dense.
    if cu_seqlens_cpu is None and cu_seqlens is of_context:
        cu_seqlens_cpu = getattr(cp_context, "cu_seqlens_cpu", None)
    return cu_seqlens, cu_seqlens_cpu


def split_request(auto_cp: bool, force_intra_cp: bool, cp_context) -> Request:
    """What a call asks of the planner, from its own arguments and its context's."""

    def of_context(name):
        return getattr(cp_context, name, None)

    if cp_context is None:
        return AUTO if auto_cp and not force_intra_cp else Request(bool(auto_cp), bool(force_intra_cp))
    check_flags(**{f"cp_context.{name}": of_context(name) for name in ("is_intra", "force_intra")})
    return Request(
        allowed=bool(auto_cp or of_context("is_intra")),
        forced=bool(force_intra_cp or of_context("force_intra")),
        segment_chunks=of_context("segment_chunks"),
        decays=of_context("decays"),
    )

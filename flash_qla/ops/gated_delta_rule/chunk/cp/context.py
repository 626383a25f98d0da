"""The context-parallel context: FLA's fields plus which kind of splitting it asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class FlashQLACPContext:
    """What a context-parallel caller says about its sequences.

    Attributes:
        group: process group of the cards that share the sequences, None inside one card.
        cu_seqlens, cu_seqlens_cpu: `[N + 1]` offsets of this card's part.
        is_first_rank, is_last_rank, pre_num_ranks, post_num_ranks: this card's place among those of its sequence.
        conv1d_kernel_size, pre_num_conv_tokens: of the short convolution before the operator.
        is_inter, is_intra: split across cards; split inside the card.
        force_intra: split even where the planner would not.
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


def build_cp_context(
    cu_seqlens=None, *, enable_inter=False, enable_intra=False, group=None, num_v_heads=None, chunk_size=None,
    conv1d_kernel_size=None, cu_seqlens_cpu=None, g=None, is_train=False, force_intra_cp=False,
) -> FlashQLACPContext:  # fmt: skip
    """Describes how sequences are shared; pass the result as cp_context.

    Args:
        cu_seqlens, cu_seqlens_cpu: `[N + 1]` offsets, on the device and on the host.
        enable_intra, force_intra_cp: splitting inside the card (planned; forced).
        enable_inter, group: sharing sequences among cards: not built yet.
        num_v_heads, chunk_size, g, is_train: what the planner may use.

    Raises:
        NotImplementedError: enable_inter, or a group of several cards.
        ValueError: a chunk_size other than 64, a group that is none.
    """
    if enable_inter:
        raise NotImplementedError("enable_inter=True: context parallelism across cards is not supported yet")
    if chunk_size not in (None, 64):
        raise ValueError(f"chunk_size={chunk_size!r} is not supported; supported: None or 64")
    _refuse_several_cards(group)
    return FlashQLACPContext(
        group=group, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, conv1d_kernel_size=conv1d_kernel_size,
        is_intra=bool(enable_intra), force_intra=bool(force_intra_cp),
    )  # fmt: skip


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
    if cu_seqlens_cpu is None and cu_seqlens is not None and cu_seqlens is of_context:
        cu_seqlens_cpu = getattr(cp_context, "cu_seqlens_cpu", None)
    return cu_seqlens, cu_seqlens_cpu


def check_supported(force_intra_cp: bool, stages) -> None:
    """Refuses a forced split where no implementation splits yet.

    Raises:
        NotImplementedError: force_intra_cp=True.
    """
    if force_intra_cp:
        raise NotImplementedError(
            f"force_intra_cp=True: {stages.__name__.rpartition('.')[2]} does not split sequences yet; "
            "leave force_intra_cp=False (the result is the same)"
        )

"""Which kernel variants exist: those of one configuration (warm-up), and corners of every key (lowering test, reports).

Compile keys, all of them: arch, dtype of q/k/v, dtypes of g, beta, initial and final state, native head sizes, value
warpgroups per CTA, whether per-chunk states are written, for segment_ends the form of T, and for solve how many key
heads four neighbouring value heads have (1, 2 or 4: all that the group size decides). Heads, batch, tokens, number and
lengths of sequences, strides, state layouts and the presence of states are run-time values.
"""

from itertools import product

import torch

from flash_qla.arch import ARCHS

from . import ends, fused_fwd, gradients, l2norm, segments, solve, states
from .launch import DTYPE_NAMES, native_head_dim

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def of_configuration(
    dtype, gate_dtypes, beta_dtypes, state_pairs, head_dim_k, head_dim_v, *, backward, store_h=False, group=None
):  # fmt: skip
    """Returns [(make, spec)] without repeats, in a fixed order.

    Args:
        dtype: of q, k, v (TileLang's name, as all dtypes here).
        gate_dtypes, beta_dtypes: of g and beta.
        state_pairs: (initial, final) dtypes.
        head_dim_k, head_dim_v: native head sizes.
        backward: the backward's kernels too.
        store_h: also the forward that writes per-chunk states.
        group: Hv / Hq; None for any.
    """
    found = [
        (solve.make, spec)
        for g, b in product(gate_dtypes, beta_dtypes)
        for spec in solve.specs(dtype, g, b, head_dim_k, group)
    ]
    for b, (h0, ht) in product(beta_dtypes, state_pairs):
        for h in (False, True) if store_h else (False,):
            found += [(fused_fwd.make, spec) for spec in fused_fwd.specs(dtype, b, h0, ht, head_dim_k, head_dim_v, h)]
        if backward:
            found += [(states.make, spec) for spec in states.specs(dtype, head_dim_k, head_dim_v, b, h0, ht)]
    for b in beta_dtypes:
        found += ends.specs(dtype, head_dim_k, head_dim_v, b, backward=backward)
    state_dtypes = [dtype for pair in state_pairs for dtype in pair]
    found += [(segments.make_scan, spec) for spec in segments.scan_specs(state_dtypes, head_dim_k, head_dim_v)]
    if backward:
        for b in beta_dtypes:
            found += [(gradients.make, spec) for spec in gradients.specs(dtype, b, head_dim_k, head_dim_v)]
    found += [(l2norm.make, spec) for spec in l2norm.specs(dtype, head_dim_k, backward)]
    return list(dict.fromkeys(found))


def of_problem(problem, *, backward):
    """Returns [(make, spec)] that a model with this problem's dtypes and head sizes can meet.

    Beta may come in the gate's dtype or in q's (as Hugging Face's layers pass it); a final state is fp32 or the
    problem's state dtype; states may be absent.
    """
    gate, dtype = DTYPE_NAMES[problem.gate_dtype], DTYPE_NAMES[problem.dtype]
    state = DTYPE_NAMES[problem.state_dtype]
    default = DTYPE_NAMES[torch.float32]
    return of_configuration(
        dtype, [gate], list(dict.fromkeys([gate, dtype])), [(state, state), (state, default), (default, default)],
        native_head_dim(problem.head_dim_k), native_head_dim(problem.head_dim_v), backward=backward,
        group=problem.group_size,
    )  # fmt: skip


def _name(make, spec) -> str:
    module = make.__module__.rpartition(".")[2] + make.__name__.removeprefix("make")
    fields = [_SHORT.get(v, f"{n.removeprefix('head_dim_')}{v}" if n.startswith("head_dim") else f"{n}={v}")
              for n, v in vars(spec).items()]  # fmt: skip
    return "-".join([module, *map(str, fields)])


def all_variants():
    """Returns [(name, make, spec, arch)]: every kernel at every corner of its keys, one key off the usual at a time."""
    bf16, fp16, fp32 = "bfloat16", "float16", "float32"
    usual = {"dtype": bf16, "gate_dtypes": [fp32], "beta_dtypes": [fp32], "state_pairs": [(fp32, fp32)],
             "head_dim_k": 128, "head_dim_v": 128, "backward": True}  # fmt: skip
    corners = [
        {"store_h": True},
        {"dtype": fp16},
        {"beta_dtypes": [bf16], "gate_dtypes": [bf16], "state_pairs": [(bf16, bf16)]},
        {"head_dim_k": 64, "head_dim_v": 64},
        {"head_dim_k": 64},
        {"head_dim_v": 64},
    ]
    found = dict.fromkeys(pair for corner in corners for pair in of_configuration(**{**usual, **corner}))
    return [
        (f"{arch.name}-{_name(make, spec)}", make, spec, arch)
        for arch in ARCHS.values()
        if arch.has_kernels
        for make, spec in found
    ]

"""Errors against float64, and the only table of tolerances.

The error of a tensor is the relative L2 norm *per head*: one head with a strong gate hides in a norm over all of them.
A head whose expected values are all but zero (dg under saturated gates) has no meaningful relative error: where its
largest value is below NEAR_ZERO of the largest value of its kind in the same problem (all gradients are one kind, all
outputs the other), its largest absolute error must be below that as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flash_qla.ops.gated_delta_rule.chunk import reference as stages

NEAR_ZERO = 1e-6

# The axis of the heads; anything else is a gradient of `[B, T, H, ...]`.
HEAD_AXIS = {"ht": 1, "dh0": 1, "h0": 1, "dA_log": 0, "ddt_bias": 0}

# Caps by the dtype of q, k, v: (o and states, dq dk dv dbeta dh0, dg and what is made of it).
# bf16: the project's caps. fp16 has three bits more; what is left over 1/8 of bf16's caps is for its small exponent.
# fp32: measured worst head 5e-7, 1.1e-6 and 2.2e-5 with A = 16; resets are no worse, as gates are summed in fp64.
# fp64: the algebra is the same, so rounding alone.
_CAPS = {
    torch.bfloat16: (5e-3, 8e-3, 1e-2),
    torch.float16: (1.5e-3, 2.5e-3, 3e-3),
    torch.float32: (1e-5, 1e-5, 2e-4),
    torch.float64: (1e-9, 1e-9, 1e-9),
}
_GATE_GRADIENTS = ("dg", "dA_log", "ddt_bias")
# A kernel may be this much worse than the chunked PyTorch version in the same dtypes.
REFERENCE_FACTOR = 2.0


def is_gradient(name: str) -> bool:
    return name.startswith("d")


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Returns the cap on the relative L2 error per head of the tensor `name`, for q, k, v of this dtype.

    Raises:
        KeyError: for a dtype without a row.
    """
    output, gradient, gate = _CAPS[dtype]
    if name in _GATE_GRADIENTS:
        return gate
    return gradient if is_gradient(name) else output


def _by_head(name, x):
    x = x.detach().double()
    return x.movedim(HEAD_AXIS.get(name, 2), 0).flatten(1) if x.dim() > 1 else x.unsqueeze(-1)


def head_errors(name: str, actual, expected) -> torch.Tensor:
    """Returns float64 `[H]`: relative L2 error per head; 0 where both are zero, infinite where only expected is."""
    expected = _by_head(name, expected)
    difference = (_by_head(name, actual).to(expected.device) - expected).norm(dim=-1)
    norm = expected.norm(dim=-1)
    return torch.where((difference == 0) & (norm == 0), 0.0, difference / norm)


@dataclass(frozen=True)
class Comparison:
    """One tensor's errors per head.

    Attributes:
        name: of the tensor.
        errors: `[H]` relative L2, or for near-zero heads the largest absolute error over the kind's largest value.
        limits: `[H]` what they may be.
        near_zero: `[H]` bool, whether the head was judged absolutely.
    """

    name: str
    errors: torch.Tensor
    limits: torch.Tensor
    near_zero: torch.Tensor

    @property
    def failed_heads(self) -> list[int]:
        # Negated so that NaN fails.
        return (~(self.errors <= self.limits)).nonzero().flatten().tolist()

    @property
    def passed(self) -> bool:
        return not self.failed_heads

    @property
    def worst_head(self) -> int:
        """The head nearest to, or farthest over, its limit; NaN counts as farthest."""
        return int((self.errors / self.limits).nan_to_num(nan=torch.inf).argmax())

    def __str__(self) -> str:
        if not self.errors.numel():
            return f"{self.name}: no heads"
        head = self.worst_head
        how = "absolute error / largest of its kind" if self.near_zero[head] else "relative L2 error"
        text = f"{self.name}: {how} {self.errors[head]:.3e} in head {head}, limit {self.limits[head]:.1e}"
        failed = self.failed_heads
        return text + (f"; {len(failed)} of {self.errors.numel()} heads fail: {failed[:16]}" if failed else "")


def compare(name, actual, expected, dtype, *, largest=None, reference=None, cap=None) -> Comparison:
    """Compares one tensor with its float64 value, per head.

    Args:
        name: decides the head axis and the cap.
        actual: what is judged.
        expected: float64 ground truth of the same shape.
        dtype: of q, k, v: the row of the table.
        largest: largest absolute expected value of the tensor's kind in this problem; the tensor's own if None.
        reference: the chunked PyTorch version's result in the same dtypes: its error times REFERENCE_FACTOR bounds
            the error as well as the cap does.
        cap: in place of the table's, tighter only.

    Raises:
        AssertionError: when the shapes differ.
        ValueError: when cap is looser than the table's.
    """
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    allowed = tolerance(name, dtype)
    if cap is not None:
        if cap > allowed:
            raise ValueError(f"{name}: cap {cap} is looser than the table's {allowed}")
        allowed = cap
    errors = head_errors(name, actual, expected)
    limits = torch.full_like(errors, allowed)
    if reference is not None:
        limits = limits.minimum(REFERENCE_FACTOR * head_errors(name, reference, expected))
    wanted = _by_head(name, expected)
    if wanted.shape[1] == 0:
        return Comparison(name, torch.zeros_like(errors), limits, torch.zeros_like(errors, dtype=torch.bool))
    difference = (_by_head(name, actual).to(wanted.device) - wanted).abs().amax(-1)
    if largest is None:
        largest = float(wanted.abs().max())
    near_zero = wanted.abs().amax(-1) <= NEAR_ZERO * largest
    absolute = difference / largest if largest else torch.where(difference == 0, 0.0, torch.inf)
    return Comparison(
        name, torch.where(near_zero, absolute, errors), torch.where(near_zero, NEAR_ZERO, limits), near_zero
    )


def compare_all(actual: Mapping, expected: Mapping, dtype, *, reference: Mapping | None = None, caps=None):
    """Compares every tensor of `actual`; returns a Comparison each. A None on either side must be None on both.

    Raises:
        AssertionError: when a tensor is missing on one side or shapes differ.
    """
    largest = {}
    for name, x in expected.items():
        if x is not None and x.numel():
            kind = is_gradient(name)
            largest[kind] = max(largest.get(kind, 0.0), float(x.detach().abs().max()))
    results = []
    for name, x in actual.items():
        wanted = expected.get(name)
        if (x is None) != (wanted is None):
            raise AssertionError(f"{name}: {'missing' if x is None else 'not expected'}")
        if x is None:
            continue
        results.append(
            compare(
                name,
                x,
                wanted,
                dtype,
                largest=largest.get(is_gradient(name), 0.0),
                reference=None if reference is None else reference[name],
                cap=None if caps is None else caps.get(name),
            )
        )
    return results


def assert_close_per_head(actual: Mapping, expected: Mapping, dtype, *, reference=None, caps=None, label=""):
    """Asserts that every tensor is within its tolerance in every head.

    Args:
        actual: name -> tensor, names as in the code (o, ht, dq, dk, dv, dbeta, dg, dh0, ...).
        expected: name -> float64 tensor, as `ground_truth` returns; names that `actual` lacks are not compared.
        dtype: of q, k, v.
        reference, caps: name -> as in `compare`.
        label: the case, for the message.

    Raises:
        AssertionError: with every tensor's worst head, and the failing ones marked.
    """
    results = compare_all(actual, expected, dtype, reference=reference, caps=caps)
    if not all(result.passed for result in results):
        lines = [f"{'  ' if result.passed else '! '}{result}" for result in results]
        raise AssertionError("\n".join([f"errors against float64, {label or 'no label'}, {dtype}:", *lines]))


def block_errors(actual, expected, block_rows: int = 64) -> torch.Tensor:
    """Returns float64 `[B, blocks, H]`: relative L2 error of each block of rows and head of `[B, T, H, ...]`.

    A block that is all but zero beside the tensor's largest block is measured against NEAR_ZERO of that one.
    """
    actual, expected = actual.detach().double(), expected.detach().double()

    def norms(x):
        x = x.flatten(3).pow(2).sum(-1) if x.dim() > 3 else x.pow(2)
        pad = -x.shape[1] % block_rows
        return torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(1, (-1, block_rows)).sum(2).sqrt()

    wanted = norms(expected)
    floor = NEAR_ZERO * wanted.max() if wanted.numel() else 0.0
    return norms(actual - expected) / wanted.clamp(min=max(float(floor), torch.finfo(torch.float64).tiny))


def ground_truth(inputs, *, gradients: bool = True) -> dict:
    """Runs the float64 recurrence, and autograd through it.

    Args:
        inputs: a `workloads.Inputs`.
        gradients: whether to differentiate <o, do> + <ht, dht>.

    Returns:
        o, ht and, with gradients, dq, dk, dv, dg, dbeta, dh0 (None without an initial state), all float64.
    """
    names = ("q", "k", "v", "g", "beta", "initial_state")
    leaves = {n: getattr(inputs, n) for n in names}
    leaves = {n: x.detach().double().clone().requires_grad_(gradients) for n, x in leaves.items() if x is not None}
    arguments = [leaves[n] for n in names[:5]]
    o, ht = stages.recurrence(*arguments, inputs.scale, leaves.get("initial_state"), inputs.seqs)
    results = {"o": o.detach(), "ht": ht.detach()}
    if gradients:
        # Without tokens and without an initial state the final state is a constant.
        outputs = [(x, d.double()) for x, d in ((o, inputs.do), (ht, inputs.dht)) if x.requires_grad]
        grads = torch.autograd.grad(
            [x for x, _ in outputs], list(leaves.values()), [d for _, d in outputs], materialize_grads=True
        )
        results["dh0"] = None
        for name, grad in zip(leaves, grads, strict=True):
            results["dh0" if name == "initial_state" else f"d{name}"] = grad
    return results


def chunked_reference(inputs, *, gradients: bool = True) -> dict:
    """Runs the chunked PyTorch stages in the inputs' own dtypes; same names as `ground_truth`."""
    q, k, v, g, beta, h0 = inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state
    scale, seqs = inputs.scale, inputs.seqs
    g_cumsum, T_inv = stages.solve(k, g, beta, seqs)
    o, ht = torch.empty_like(v), torch.empty_like(inputs.dht)
    stages.fused_forward(o, ht, None, q, k, v, T_inv, g_cumsum, beta, scale, h0, seqs)
    results = {"o": o, "ht": ht}
    if gradients:
        dh0 = None if h0 is None else torch.empty_like(h0)
        S = stages.forward_states(k, v, T_inv, g_cumsum, beta, h0, seqs)
        dS = stages.reverse_states(q, k, T_inv, g_cumsum, beta, inputs.do, inputs.dht, scale, dh0, seqs)
        dq, dk, dv, dbeta, dg = (torch.empty_like(x) for x in (q, k, v, beta, g))
        stages.gradients(dq, dk, dv, dbeta, dg, q, k, v, T_inv, g_cumsum, beta, inputs.do, scale, S, dS, seqs)
        results |= {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, "dh0": dh0}
    return results

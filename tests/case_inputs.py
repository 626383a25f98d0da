"""What test_cases.py, test_gdr*.py, tests/cpu and tests/gpu share: devices, the public call, float64 truth, judging."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import flash_qla
from flash_qla.ops.gated_delta_rule.chunk import reference as stages
from flash_qla.ops.gated_delta_rule.chunk.constants import GATE_FLOOR
from flash_qla.testing.compare import assert_close_per_head, chunked_reference, ground_truth, tolerance
from flash_qla.testing.workloads import Inputs

ROOT = Path(__file__).resolve().parents[1]
# conftest.py skips what is marked gpu, with the reason, where there is none.
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
FLOATING = ("q", "k", "v", "g", "beta", "initial_state", "do", "dht")
INPUT_NAMES = ("q", "k", "v", "g", "beta", "initial_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
# Only a hang takes a child process this long, on the slowest and busiest machine too. Below pytest.ini's limit, so that
# the child's output is shown.
HANG_S = 900
# What the token recurrence takes in about a second: (tokens of the longest sequence, state elements times all tokens).
_RECURRENCE_LIMITS = {"cpu": (260, 200 * 4 * 128 * 128), "cuda": (520, 600 * 64 * 128 * 128)}


def gradient_name(name: str) -> str:
    """The name that errors are reported under: dq for q, dh0 for initial_state."""
    return "dh0" if name == "initial_state" else f"d{name}"


def run_public(inputs: Inputs, *, gradients: bool = True, use_dht: bool = True, v_first: bool = False, **options):
    """Calls `flash_qla.chunk_gated_delta_rule` and differentiates <o, do> (+ <ht, dht>), as a user does.

    Args:
        use_dht: whether the final state takes part in the loss.
        v_first: hands the states over V-first, and the results back K-first.
        options: further keyword arguments of the call.

    Returns:
        o, ht and, with gradients, dq dk dv dg dbeta dh0 (None without an initial state), all detached.
    """
    inputs = inputs.differentiable() if gradients else inputs
    kwargs, dht = inputs.kwargs, inputs.dht
    if v_first:
        options["state_v_first"] = True
        if kwargs["initial_state"] is not None:
            kwargs["initial_state"] = kwargs["initial_state"].detach().mT.contiguous().requires_grad_(gradients)
        dht = dht.mT.contiguous()
    kwargs = {"output_final_state": True, **kwargs, **options}
    leaves = {name: kwargs[name] for name in INPUT_NAMES if kwargs[name] is not None}
    o, ht = flash_qla.chunk_gated_delta_rule(**kwargs)
    results = {"o": o.detach(), "ht": None if ht is None else ht.detach()}
    if gradients:
        outputs, cotangents = [o], [inputs.do.to(o.dtype)]
        if use_dht and ht is not None:
            outputs, cotangents = [o, ht], [*cotangents, dht.to(ht.dtype)]
        grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
        results |= {"dh0": None} | dict(zip(map(gradient_name, leaves), grads, strict=True))
    if v_first:
        results |= {name: results[name].mT for name in ("ht", "dh0") if results.get(name) is not None}
    return results


def as_float64(inputs: Inputs) -> Inputs:
    """The same values in float64 throughout."""
    tensors = {name: getattr(inputs, name) for name in FLOATING}
    return replace(inputs, **{name: x.double() for name, x in tensors.items() if x is not None})


def truth(inputs: Inputs, *, gradients: bool = True) -> dict:
    """Float64 results: the token recurrence, or, where it takes too long, the chunked stages in float64.

    tests/cpu/test_reference.py proves the two equal to 1e-9.
    """
    longest, work = _RECURRENCE_LIMITS[inputs.q.device.type]
    state = inputs.v.shape[2] * inputs.q.shape[-1] * inputs.v.shape[-1]
    steps = max(inputs.lengths, default=0)
    # The recurrence pads all sequences to the longest.
    if steps <= longest and len(inputs.lengths) * steps * state <= 8 * work and sum(inputs.lengths) * state <= work:
        return ground_truth(inputs, gradients=gradients)
    wide = as_float64(inputs)
    results = chunked_reference(wide, gradients=gradients)
    if gradients:
        results["dg"] = results["dg"].masked_fill(wide.g < GATE_FLOOR, 0)  # the clamp's own gradient
    return results


def without_dht(inputs: Inputs) -> Inputs:
    """The same problem with a final state that nobody differentiates."""
    return replace(inputs, dht=torch.zeros_like(inputs.dht))


def check(inputs: Inputs, *, gradients: bool = True, caps=None, label="", **options) -> dict:
    """Runs the public function and asserts every tensor, per head, against float64. Returns what was computed."""
    actual = run_public(inputs, gradients=gradients, **options)
    assert_close_per_head(actual, truth(inputs, gradients=gradients), inputs.q.dtype, caps=caps, label=label)
    return actual


def capture(call):
    """Warms up on a side stream and captures, as PyTorch's notes ask for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


def truth_of_activations(inputs, A_log, dt_bias, sigmoid, negative, l2norm):
    """The float64 recurrence on activations applied outside, and its gradients for what the user handed in."""
    leaves = {n: getattr(inputs, n).double().clone().requires_grad_() for n in INPUT_NAMES}
    extra = {
        n: x.double().clone().requires_grad_() for n, x in (("A_log", A_log), ("dt_bias", dt_bias)) if x is not None
    }
    q, k, v, g, beta, h0 = leaves.values()
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if A_log is not None:
        g = -extra["A_log"].exp() * F.softplus(g + extra.get("dt_bias", 0.0))
    if sigmoid:
        beta = beta.sigmoid() * (2 if negative else 1)
    o, ht = stages.recurrence(q, k, v, g, beta, inputs.scale, h0, inputs.seqs)
    grads = torch.autograd.grad([o, ht], [*leaves.values(), *extra.values()], [inputs.do.double(), inputs.dht.double()])
    names = [gradient_name(name) for name in (*leaves, *extra)]
    return {"o": o.detach(), "ht": ht.detach(), **dict(zip(names, grads, strict=True))}


def run_activations(inputs, A_log, dt_bias, sigmoid, negative, l2norm):
    """The public function with its flags."""
    leaves = inputs.differentiable()
    extra = {n: x.clone().requires_grad_() for n, x in (("A_log", A_log), ("dt_bias", dt_bias)) if x is not None}
    o, ht = flash_qla.chunk_gated_delta_rule(
        **leaves.kwargs, output_final_state=True, use_qk_l2norm_in_kernel=l2norm, use_gate_in_kernel=A_log is not None,
        use_beta_sigmoid_in_kernel=sigmoid, allow_neg_eigval=negative, **extra,
    )  # fmt: skip
    torch.autograd.backward([o, ht], [inputs.do, inputs.dht.to(ht.dtype)])
    results = {"o": o.detach(), "ht": ht.detach()}
    results |= {gradient_name(n): getattr(leaves, n).grad for n in INPUT_NAMES}
    return results | {gradient_name(n): x.grad for n, x in extra.items()}


def assert_close_of_activations(actual: dict, expected: dict, dtype) -> None:
    """Asserts a result of `run_activations`.

    dA_log and ddt_bias are sums over the tokens whose terms cancel, to a twentieth and less, so a head's relative error
    says nothing: their error is measured against the terms' norm, for which dg's serves (a logit's gradient is a term
    of ddt_bias, and within softplus/sigmoid, 1 to 5 here, one of dA_log).
    """
    sums = {name: expected[name] for name in ("dA_log", "ddt_bias") if name in expected}
    assert_close_per_head({n: x for n, x in actual.items() if n not in sums}, expected, dtype)
    for name, wanted in sums.items():
        error = (actual[name].double() - wanted).abs()
        terms = expected["dg"].flatten(0, -2).norm(dim=0).maximum(wanted.abs())
        # Independent errors of the terms add up like the terms' norm does.
        assert (error <= tolerance(name, dtype) * terms).all(), f"{name}: {error / terms}"


def logits(inputs):
    """The same problem with g and beta as logits on both sides of 0."""
    generator = torch.Generator(inputs.g.device).manual_seed(5)
    shape = inputs.g.shape
    draw = (torch.randn(shape, generator=generator, dtype=torch.float64, device=inputs.g.device) for _ in range(2))
    g, beta = (x.to(inputs.g.dtype) for x in draw)
    return replace(inputs, g=g, beta=beta)


def assert_same_bits(actual: dict, expected: dict, label: str = "") -> None:
    """Asserts that two runs gave the same tensors, bit for bit (NaN equals NaN)."""
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        y = expected[name]
        if x is None or y is None:
            assert x is None and y is None, f"{label} {name}: only one of the two is None"
            continue
        assert x.dtype == y.dtype and x.shape == y.shape, f"{label} {name}: {x.dtype} {x.shape}, {y.dtype} {y.shape}"
        same = (x == y) | (x.isnan() & y.isnan())
        assert bool(same.all()), f"{label} {name}: {int((~same).sum())} of {x.numel()} values differ"


def digest(x: torch.Tensor | None) -> str | None:
    """Hash of a tensor's values as they lie in memory, padding between rows left out."""
    if x is None:
        return None
    return hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def strided_copy(x: torch.Tensor, pad: int = 8) -> torch.Tensor:
    """The same values with unit last stride inside a wider buffer whose padding is NaN: no kernel may read it."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + pad), float("nan"), dtype=x.dtype, device=x.device)
    view = wide[..., : x.shape[-1]]
    view.copy_(x)
    return view


def sizes(device: str, cpu, cuda):
    """The row's size: full on a GPU, reduced where the PyTorch implementation runs on a CPU."""
    return cuda if device == "cuda" else cpu


def run_python(code: str, *flags: str, cwd=ROOT, **environment: str) -> str:
    """Runs code in a fresh interpreter that finds this checkout. Returns its output; a failure shows it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=cwd,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout

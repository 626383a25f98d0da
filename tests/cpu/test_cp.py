"""Splitting inside the card through the public functions, in PyTorch: forced, because nothing else splits there.

`tests/gpu/test_cp_gpu.py` runs the same calls on the kernels.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flash_qla
from flash_qla import env
from flash_qla.ops.gated_delta_rule.chunk import cp, reference
from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context, planner, segments
from flash_qla.testing.compare import block_errors
from flash_qla.testing.workloads import Workload, make_inputs

C = 64
GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state")


@pytest.fixture
def splits(monkeypatch):
    """Every split that a stage was handed, in order: (stage, segment_chunks)."""
    seen = []
    for name in ("entering_states", "leaving_cotangents"):
        run = getattr(segments, name)

        def watched(*args, _run=run, _name=name, **kwargs):
            split = next(x for x in args if isinstance(x, segments.Split))
            seen.append((_name, split.segment_chunks))
            return _run(*args, **kwargs)

        monkeypatch.setattr(segments, name, watched)
    return seen


def run(inputs, **options):
    """Outputs and gradients of the public function by name."""
    x = inputs.differentiable()
    o, ht = flash_qla.chunk_gated_delta_rule(**x.kwargs, output_final_state=True, **options)
    leaves = {name: getattr(x, name) for name in GRADIENTS if getattr(x, name) is not None}
    loss = [(o, inputs.do), (ht, inputs.dht.to(ht.dtype))]
    grads = torch.autograd.grad([y for y, _ in loss], list(leaves.values()), [d for _, d in loss])
    return {"o": o.detach(), "ht": ht.detach(), **{f"d{n}": grad for n, grad in zip(leaves, grads)}}


CASES = {
    "one": [20 * C],
    "ragged": [300, 0, 130, 7, 0, 64],
    "dense_batch": (2, 300),
    "one_chunk": [C],
    "nothing": [0, 0],
}


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "recomputed"])
def test_forced_split_changes_nothing(lengths, cached, splits, monkeypatch):
    monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", "-1e9")
    tail = {} if isinstance(lengths, tuple) else {"tail_tokens": 3}
    inputs = make_inputs(lengths, 1, 2, 8, 6, "mixed", torch.float64, **tail)
    expected, actual = run(inputs, auto_cp=False), run(inputs, force_intra_cp=True, enable_fwd_cp_cache=cached)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=1e-10, atol=1e-10, msg=name)
    names = [name for name, _ in splits]
    again = [] if cached else ["entering_states"]
    assert names == ["entering_states", *again, "leaving_cotangents"]


@pytest.mark.parametrize(
    "options", [{}, {"auto_cp": True}, {"cp_context": build_cp_context(enable_intra=True)}], ids=str
)
def test_pytorch_splits_only_when_forced(options, splits):
    inputs = make_inputs([20 * C], 1, 2, 8, 8, "mild", torch.float32)
    flash_qla.chunk_gated_delta_rule(**inputs.kwargs, **options)
    assert splits == []


FORCED = {
    "argument": {"force_intra_cp": True},
    "without_auto": {"force_intra_cp": True, "auto_cp": False},
    "context": {"cp_context": build_cp_context(force_intra_cp=True)},
    "chosen": {"cp_context": FlashQLACPContext(segment_chunks=5)},
    "chosen_by_numpy": {"cp_context": FlashQLACPContext(segment_chunks=np.int64(5))},
}


@pytest.mark.parametrize("options", FORCED.values(), ids=FORCED)
def test_every_way_to_force_a_split(options, splits):
    inputs = make_inputs([20 * C], 1, 2, 8, 8, "mild", torch.float32)
    flash_qla.chunk_gated_delta_rule(**inputs.kwargs, **options)
    assert splits == [("entering_states", 5)]


def test_segments_do_not_depend_on_gradients(splits):
    """A checkpointed forward (no gradients) and its recomputation (gradients) must be the same computation."""
    inputs = make_inputs([20 * C], 1, 2, 8, 8, "mild", torch.float32)
    with torch.no_grad():
        alone, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, force_intra_cp=True)
    recorded, _ = flash_qla.chunk_gated_delta_rule(**inputs.differentiable().kwargs, force_intra_cp=True)
    assert len(set(splits)) == 1
    assert torch.equal(alone, recorded)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved_tensor_hooks"])
def test_checkpointed_calls_are_bit_equal(reentrant):
    inputs = make_inputs([20 * C], 1, 2, 8, 8, "mixed", torch.float32)

    def call(q, k, v, g, beta, h0):
        arguments = {**inputs.kwargs, "q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": h0}
        o, ht = flash_qla.chunk_gated_delta_rule(**arguments, output_final_state=True, force_intra_cp=True)
        return o + ht.mean()

    results = []
    for function in (call, lambda *args: checkpoint(call, *args, use_reentrant=reentrant)):
        x = inputs.differentiable()
        leaves = [getattr(x, name) for name in GRADIENTS]
        out = function(*leaves)
        out.backward(inputs.do)  # a reentrant checkpoint refuses autograd.grad
        results.append([out, *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_what_the_backward_keeps_can_be_dropped():
    """The states at the borders are saved tensors: hooks (checkpointing, offloading) see them."""
    inputs = make_inputs([20 * C], 1, 2, 8, 8, "mild", torch.float32)
    kept = {}
    for options in ({}, {"force_intra_cp": True}, {"force_intra_cp": True, "enable_fwd_cp_cache": False}):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, seen=packed: seen.append(x) or x, lambda x: x):
            o, _ = flash_qla.chunk_gated_delta_rule(**inputs.differentiable().kwargs, **options)
        kept[tuple(options.values())] = len(packed)
        assert not any(isinstance(x, torch.Tensor) for x in vars(o.grad_fn).values())
    assert kept[()] == kept[True, False] == kept[True,] - 3


# --- the low-level halves


def low_level(inputs, context=None, *, with_cache=True, cache=None, h=False):
    arguments = {"scale": inputs.scale, "initial_state": inputs.initial_state, "cu_seqlens": inputs.cu_seqlens}
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    forward = flash_qla.chunk_gated_delta_rule_fwd(
        *tensors, **arguments, enable_fwd_cp_cache=with_cache, cp_context=context, output_h=h
    )
    g_cumsum, A, _, _, _, found = forward
    backward = flash_qla.chunk_gated_delta_rule_bwd(
        *tensors[:3], g_cumsum, inputs.beta, A, inputs.do, inputs.dht, **arguments, cp_context=context,
        cp_cache=found if cache is None else cache,
    )  # fmt: skip
    return forward, backward


@pytest.mark.parametrize("lengths", [[300, 0, 200], (2, 300)], ids=["packed", "dense"])
def test_low_level_with_and_without_the_cache(lengths, splits, monkeypatch):
    monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", "-1e9")
    inputs = make_inputs(lengths, 1, 2, 8, 6, "mixed", torch.float64)
    expected = low_level(inputs, h=True)
    assert expected[0][5] is None
    forced = build_cp_context(force_intra_cp=True)
    for with_cache in (True, False):
        splits.clear()
        actual = low_level(inputs, forced, with_cache=with_cache, h=True)
        assert (actual[0][5] is not None) == with_cache
        assert len(splits) == (2 if with_cache else 3)
        for a, b in zip((*actual[0][:5], *actual[1]), (*expected[0][:5], *expected[1])):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_cache_of_another_split_is_computed_again(splits):
    inputs = make_inputs([20 * C], 1, 2, 8, 8, "mild", torch.float32)
    (*_, cache), expected = low_level(inputs, FlashQLACPContext(segment_chunks=4))
    splits.clear()
    _, actual = low_level(inputs, FlashQLACPContext(segment_chunks=5), cache=cache)
    assert [x for x in splits if x[0] == "entering_states"] == [("entering_states", 5)] * 2
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_cache_that_is_none_of_ours():
    inputs = make_inputs([2 * C], 1, 2, 8, 8, "mild", torch.float32)
    with pytest.raises(ValueError, match="cp_cache must be what chunk_gated_delta_rule_fwd returned, got dict"):
        low_level(inputs, cache={})


def test_a_cache_that_is_not_used_is_not_kept(monkeypatch):
    """Where the backward would split differently, the forward keeps nothing."""
    inputs = make_inputs([20 * C], 1, 2, 8, 8, "mild", torch.float32)
    plan = planner.split_of_call
    for_backward = {"fwd": 4, "bwd": 5}

    def choose(passes, problem, seqs, request, **options):
        return plan(passes, problem, seqs, request._replace(segment_chunks=for_backward[passes]), **options)

    monkeypatch.setattr(planner, "split_of_call", choose)
    forward, backward = low_level(inputs)
    assert forward[5] is None
    assert all(torch.isfinite(x).all() for x in backward)


def test_context_of_other_heads():
    inputs = make_inputs([2 * C], 1, 2, 8, 8, "mild", torch.float32)
    context = build_cp_context(g=torch.zeros(1, 9, 4))
    with pytest.raises(ValueError, match="g of 4 value heads, the call has 2"):
        flash_qla.chunk_gated_delta_rule(**inputs.kwargs, cp_context=context)
    with pytest.raises(ValueError, match="g of 4 value heads, the call has 2"):
        low_level(inputs, context)


# --- how exact


@pytest.mark.parametrize("profile", ["none", "mild", "strong", "mixed", "extreme"])
def test_blocks_agree_to_bf16_rounding(profile):
    """Off against on at the default tolerance, per 64-row block and head, gradients included."""
    inputs = Workload([24 * C, 10 * C + 5], 1, 4, 32, 32, profile).make(seed=3)
    inputs = replace(inputs, k=(1.2 * inputs.k.float()).bfloat16())
    expected, actual = run(inputs, auto_cp=False), run(inputs, force_intra_cp=True)
    for name in ("o", "dq", "dk", "dv", "dbeta", "dg"):
        assert block_errors(actual[name], expected[name]).max() <= 1e-2, name
    assert (actual["ht"] - expected["ht"]).norm() <= 1e-2 * expected["ht"].norm()


def reflecting(tolerance, num_chunks=20):
    """Keys of norm 1 and beta = 2 reflect: only the gate changes norms, so the bound on what is cut off is attained.

    The gate reaches the tolerance with the last of five chunks, by a hair.
    """
    inputs = make_inputs([num_chunks * C], 1, 1, 8, 8, "none", torch.float64)
    rate = -tolerance / (5 * C) + 1e-12
    return replace(inputs, g=torch.full_like(inputs.g, -rate), beta=torch.full_like(inputs.beta, 2.0))


@pytest.mark.parametrize("loosened", [False, True], ids=["as_stated", "loosened_tenfold"])
def test_cut_off_is_the_stated_bound(loosened, monkeypatch):
    """The states' error is within exp(FLASH_QLA_CP_TOLERANCE) of the state that is cut off; ten times that is not."""
    tolerance = -9.6
    inputs = reflecting(tolerance)
    context = FlashQLACPContext(segment_chunks=8)
    if loosened:
        monkeypatch.setattr(cp.states.planner.env, "cp_tolerance", lambda: tolerance + math.log(10))
    else:
        monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", str(tolerance))
    arguments = {"initial_state": inputs.initial_state, "cu_seqlens": inputs.cu_seqlens, "output_h": True}
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    h, split = (flash_qla.chunk_gated_delta_rule_fwd(*tensors, **arguments, cp_context=c)[3][0, :, 0]
                for c in (None, context))  # fmt: skip
    error, largest = torch.linalg.matrix_norm(split - h, 2), torch.linalg.matrix_norm(h, 2).max()
    assert error[:8].max() == 0
    assert (error.max() > math.exp(tolerance) * largest) == loosened
    # The bound is attained, so that a looser one would show.
    assert error.max() > 0.5 * math.exp(tolerance) * largest


@pytest.mark.parametrize("loosened", [False, True], ids=["default", "loosened_tenfold"])
def test_default_tolerance_hides_an_outlier(loosened, monkeypatch):
    """A value 1000 times the others just before the warm-up: no block of o is off by more than bf16's rounding at the
    default tolerance; with one ten times looser a block is.
    """
    assert env.cp_tolerance() == -12.0
    if loosened:
        monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", str(-12 + math.log(10)))
    # Two a chunk: six chunks reach -12, five are enough for the looser one. The segment has eight.
    position = (8 - (5 if loosened else 6)) * C - 1
    inputs = make_inputs([20 * C], 1, 1, 16, 16, "none", torch.float64, with_state=False)
    k, q, v = inputs.k.clone(), inputs.q.clone(), inputs.v.clone()
    k[..., -1] = 0  # nobody overwrites the outlier's direction; only the gate takes it away
    k = torch.nn.functional.normalize(k, dim=-1)
    axis = torch.eye(16, dtype=torch.float64)[-1]
    k[:, position], q[:, 8 * C] = axis, axis
    v[:, position] *= 1000
    inputs = replace(inputs, q=q, k=k, v=v, g=torch.full_like(inputs.g, -2 / C - 1e-9))
    whole, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs)
    o, _ = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, cp_context=FlashQLACPContext(segment_chunks=8))
    worst = block_errors(o, whole).max().item()
    assert (worst > 1e-2) == loosened, worst


def test_stages_of_pytorch_are_the_reference():
    """What a split does not touch is `reference`'s, looked up at each use."""
    assert segments.solve is reference.solve
    with pytest.raises(AttributeError):
        segments.no_such_stage  # noqa: B018

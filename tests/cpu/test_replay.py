"""Replayed calls launch what ordinary ones do: the same kernels, arguments of the same form, from their own tensors.

On the CPU, with stand-ins for the kernels; tests/gpu/test_replay_gpu.py compares bits.
"""

import contextlib
from dataclasses import replace

import pytest
import torch

import flash_qla
from flash_qla import arch
from flash_qla.ops.gated_delta_rule.chunk import backend, problem, replay
from flash_qla.ops.gated_delta_rule.chunk.kernels import build, stages
from flash_qla.testing.workloads import make_inputs

BF16 = torch.bfloat16


class Stub:
    """A kernel that notes the form and the place of its arguments."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __call__(self, *arguments):
        self.log.append((self.name, arguments))


@pytest.fixture
def launched(monkeypatch):
    """The kernels' calls, on a machine that takes its CPU for an H200."""
    log = []
    monkeypatch.setattr(backend, "why_no_kernels", lambda _: None)
    monkeypatch.setattr(arch, "of_device", lambda device: arch.SM90)
    monkeypatch.setattr(arch, "num_sms", lambda device: 132)
    monkeypatch.setattr(stages, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(build, "_kernels", {})
    monkeypatch.setattr(build, "compile_now", lambda make, spec, *rest: Stub(f"{make.__module__} {spec}", log))
    monkeypatch.setattr(replay, "_is_current", lambda device: True)
    monkeypatch.setattr(replay, "_known", {})
    # Validated problems remember their stages: those with stand-ins must not meet later tests.
    monkeypatch.setattr(problem, "_known", {})
    return log


def call(inputs, **options):
    with torch.no_grad():
        return flash_qla.chunk_gated_delta_rule(**inputs.kwargs, **{"output_final_state": True, **options})


def form(argument, inputs):
    """What an argument is: a number, or a tensor's geometry and, inside an input, its place there."""
    if not isinstance(argument, torch.Tensor):
        return argument
    place = None
    for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"):
        x = getattr(inputs, name)
        if x is not None and x.numel() and argument.numel() and replay._is_view(argument, x):
            place = place or (name, argument.data_ptr() - x.data_ptr())
    return tuple(argument.shape), argument.stride(), argument.dtype, place


def forms(log, inputs):
    return [(name, [form(x, inputs) for x in arguments]) for name, arguments in log]


def packed(inputs):
    """q, k and v as views of one buffer, as a split projection gives them."""
    parts = [x.flatten(2) for x in (inputs.q, inputs.k, inputs.v)]
    views = torch.cat(parts, -1).split([x.shape[-1] for x in parts], -1)
    q, k, v = (view.unflatten(-1, x.shape[2:]) for view, x in zip(views, (inputs.q, inputs.k, inputs.v)))
    return replace(inputs, q=q, k=k, v=v)


CASES = {
    "varlen": (lambda seed: make_inputs([70, 0, 3], 2, 4, seed=seed), {}),
    "dense": (lambda seed: make_inputs((2, 100), 2, 4, seed=seed), {}),
    "one_head_one_batch": (lambda seed: make_inputs((1, 100), 1, 1, seed=seed), {}),
    "packed": (lambda seed: packed(make_inputs([70, 5], 2, 4, seed=seed)), {}),
    "int64_offsets": (lambda seed: make_inputs([70, 3], 2, 4, seed=seed, index_dtype=torch.int64), {}),
    "v_first": (lambda seed: make_inputs([70, 3], 2, 4, seed=seed), {"state_v_first": True, "initial_state": None}),
    "v_first_state": (lambda seed: make_inputs([70, 3], 2, 4, seed=seed), {"state_v_first": True}),
    "no_states": (lambda seed: make_inputs([70], 2, 2, seed=seed, with_state=False), {"output_final_state": False}),
    "l2norm": (lambda seed: make_inputs([70, 3], 2, 4, seed=seed), {"use_qk_l2norm_in_kernel": True}),
    "bf16": (lambda seed: make_inputs([70], 2, 4, seed=seed, beta_dtype=BF16, state_dtype=BF16), {"state_dtype": BF16}),
    "heads_of_64": (lambda seed: make_inputs([70], 2, 4, 64, 64, seed=seed), {}),
    "long": (lambda seed: make_inputs([4096], 1, 1, seed=seed), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_replay_launches_what_an_ordinary_call_does(case, launched, monkeypatch):
    make, options = CASES[case]
    first, second = make(0), make(1)
    if "initial_state" in options:
        options = dict(options)
        options.pop("initial_state")
        first, second = (_without_state(x) for x in (first, second))
    # The host's copy of the offsets would keep these calls from being recorded: on a GPU there is none.
    monkeypatch.setattr(type(first), "kwargs", property(_gpu_like))
    for _ in range(2):  # the first call only says that there may be more
        launched.clear()
        o, _ = call(first, **options)
    assert [type(x) for x in replay._known.values()] == [replay.Replay]
    ordinary = forms(launched, first)
    launched.clear()
    again, ht = call(second, **options)
    assert forms(launched, second) == ordinary and ordinary
    assert (again.shape, again.stride(), again.dtype) == (o.shape, o.stride(), o.dtype) and again is not o
    assert any(x is again for _, arguments in launched for x in arguments)
    assert (ht is None) == (not options.get("output_final_state", True))


def _without_state(inputs):
    return replace(inputs, initial_state=None)


def differentiate(inputs, wanted, with_dht, **options):
    """Forward and backward through autograd. Returns the gradients of the inputs named in `wanted`."""
    names = ("q", "k", "v", "g", "beta", "initial_state")
    leaves = {n: getattr(inputs, n).detach().clone() for n in names if getattr(inputs, n) is not None}
    wanted = [name for name in wanted if name in leaves]
    for name in wanted:
        leaves[name].requires_grad_()
    o, ht = flash_qla.chunk_gated_delta_rule(
        **leaves, scale=inputs.scale, cu_seqlens=inputs.cu_seqlens, **{"output_final_state": True, **options}
    )
    outputs, cotangents = ([o, ht], [inputs.do, inputs.dht]) if with_dht else ([o], [inputs.do])
    return dict(zip(wanted, torch.autograd.grad(outputs, [leaves[name] for name in wanted], cotangents), strict=True))


GRADIENT_CASES = {
    # id: (case, wanted gradients, whether the final state is differentiated)
    "varlen": ("varlen", "q k v g beta initial_state", True),
    "dense": ("dense", "q k v g beta initial_state", True),
    "no_dht": ("varlen", "q k v g beta initial_state", False),
    "only_the_state": ("varlen", "initial_state", True),
    "only_v": ("varlen", "v", True),
    "no_states": ("no_states", "q k v g beta", False),
    "l2norm": ("l2norm", "q k v g beta initial_state", True),
    "bf16": ("bf16", "q k v g beta initial_state", True),
    "long": ("long", "q k v g beta initial_state", True),
}


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_replay_with_gradients_launches_what_an_ordinary_call_does(case, launched):
    """Guards forward and backward of a training step; the split's kept states too (long)."""
    name, wanted, with_dht = GRADIENT_CASES[case]
    make, options = CASES[name]
    first, second = make(0), make(1)

    def run(inputs):
        launched.clear()
        grads = differentiate(inputs, wanted.split(), with_dht, **options)
        memory = {}  # which arguments share memory, in order of appearance; the log keeps all of it alive
        for _, arguments in launched:
            for x in arguments:
                if isinstance(x, torch.Tensor) and x.numel():
                    memory.setdefault(x.untyped_storage().data_ptr(), len(memory))
        shared = [
            memory.get(x.untyped_storage().data_ptr()) for _, arguments in launched for x in arguments
            if isinstance(x, torch.Tensor)
        ]  # fmt: skip
        return forms(launched, inputs), shared, {name: (x.shape, x.stride(), x.dtype) for name, x in grads.items()}

    run(first)
    ordinary = run(first)
    assert [type(x) for x in replay._known.values()] == [replay.Replay] * 2
    assert run(second) == ordinary and ordinary[0]


def test_kernels_see_no_lazily_negated_gradient(launched):
    """Guards the backward's own inputs, which nobody checks: the memory of such a view holds the negative values."""
    inputs = CASES["varlen"][0](0)
    negated = replace(inputs, do=torch._neg_view(inputs.do), dht=torch._neg_view(inputs.dht))
    for _ in range(3):
        differentiate(negated, ["q"], True)
    tensors = [x for _, arguments in launched for x in arguments if isinstance(x, torch.Tensor)]
    assert tensors and not any(x.is_neg() for x in tensors)


def test_gradients_or_none_are_two_calls(launched):
    """Guards saved tensors: a call recorded without gradients keeps nothing for a backward."""
    inputs = CASES["varlen"][0](0)
    kwargs = _gpu_like(inputs)
    for _ in range(3):
        with torch.no_grad():
            flash_qla.chunk_gated_delta_rule(**kwargs)
    for _ in range(3):
        assert set(differentiate(inputs, ["q"], False)) == {"q"}
    kinds = [(type(x), x.context is None) for x in replay._known.values()]
    assert sorted(kind for _, kind in kinds) == [False, True, True]


def _gpu_like(self):
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "scale")
    return {name: getattr(self, name) for name in names}


REFUSED = {
    "padded_heads": (lambda: make_inputs([70], 2, 4, 48, 48), {}),
    "copied_rows": (lambda: _odd_strides(make_inputs([70], 2, 4)), {}),
    "empty": (lambda: make_inputs([0, 0], 2, 4), {}),
}


def _odd_strides(inputs):
    wide = torch.zeros(*inputs.v.shape[:3], 131, dtype=inputs.v.dtype)
    wide[..., :128] = inputs.v
    return replace(inputs, v=wide[..., :128])


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_copy_are_not_replayed(case, launched):
    make, options = REFUSED[case]
    for _ in range(3):
        call(make(), **options)
    assert replay._known and [x for x in replay._known.values() if isinstance(x, replay.Replay)] == []


def test_kernels_that_write_into_out_count_as_a_change(launched):
    """Guards whoever saved `out` for a backward: autograd sees no write of a kernel's."""
    inputs = make_inputs([70, 3], 2, 4)
    out = torch.empty_like(inputs.v)
    before = out._version
    call(inputs, out=out)
    assert launched and out._version > before


def test_what_is_not_recorded(launched, monkeypatch):
    inputs = make_inputs([70, 3], 2, 4)

    def known_after(**changes):
        replay.forget()
        call(inputs, **changes)
        return len(replay._known)

    assert known_after() == 1
    assert known_after(out=torch.empty_like(inputs.v)) == 0
    assert known_after(use_beta_sigmoid_in_kernel=True) == 0
    assert known_after(cu_seqlens_cpu=inputs.cu_seqlens) == 0
    monkeypatch.setenv("FLASH_QLA_DEBUG", "1")
    assert known_after() == 0
    monkeypatch.delenv("FLASH_QLA_DEBUG")
    replay.forget()
    with torch.no_grad():
        flash_qla.chunk_gated_delta_rule(inputs.q, inputs.q, inputs.v, inputs.g, inputs.beta)
    assert len(replay._known) == 0


def test_what_only_looks_alike_is_not_replayed(launched):
    """Guards tensors whose metadata is that of a recorded call and whose memory is not their values."""
    inputs = make_inputs([70, 3], 2, 4)
    kwargs = _gpu_like(inputs)
    for _ in range(3):
        call(inputs)
    assert [type(x) for x in replay._known.values()] == [replay.Replay]
    launched.clear()
    with torch.no_grad():
        with pytest.raises(ValueError, match="g must .*negated"):
            flash_qla.chunk_gated_delta_rule(**{**kwargs, "g": torch._neg_view(inputs.g)}, output_final_state=True)
        with torch.autograd.forward_ad.dual_level():
            g = torch.autograd.forward_ad.make_dual(inputs.g, inputs.g)
            with pytest.raises(NotImplementedError, match="forward-mode"):
                flash_qla.chunk_gated_delta_rule(**{**kwargs, "g": g}, output_final_state=True)
        with pytest.raises(NotImplementedError, match="torch.func"):
            torch.func.vmap(lambda v: flash_qla.chunk_gated_delta_rule(**{**kwargs, "v": v}, output_final_state=True))(
                inputs.v[None]
            )
    assert launched == []


def test_other_metadata_is_another_call(launched, monkeypatch):
    inputs = make_inputs([70, 3], 2, 4)
    call(inputs)
    call(inputs, output_final_state=False)
    call(inputs, auto_cp=False)
    call(make_inputs([70, 4], 2, 4))
    call(make_inputs([4, 70], 2, 4))
    monkeypatch.setenv("FLASH_QLA_CP_TOLERANCE", "-9")
    call(inputs)
    assert len(replay._known) == 5
    monkeypatch.setenv("FLASH_QLA_BACKEND", "nothing")
    with pytest.raises(ValueError, match="FLASH_QLA_BACKEND"):
        call(inputs)


def test_wrong_arguments_still_raise(launched):
    inputs = make_inputs([70, 3], 2, 4)
    call(inputs)
    with torch.no_grad(), pytest.raises(ValueError, match="scale"):
        flash_qla.chunk_gated_delta_rule(**{**inputs.kwargs, "scale": True})
    with pytest.raises(TypeError, match="nonsense"):
        call(inputs, nonsense=1)
    with pytest.raises(ValueError, match="head_first"):
        call(inputs, head_first=True)

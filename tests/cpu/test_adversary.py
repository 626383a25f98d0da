"""Faults that an outside tester found in the foundation, one test for each kind of fault."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

import flash_qla
from flash_qla import env
from flash_qla.ops.gated_delta_rule.chunk import fused_gdr_h, kkt_solve, reference
from flash_qla.ops.gated_delta_rule.chunk.cp import build_cp_context
from flash_qla.ops.gated_delta_rule.chunk.sequences import Sequences
from flash_qla.ops.utils import chunk_local_cumsum
from flash_qla.utils import l2norm

B, T, HQ, HV, D = 2, 70, 2, 4, 8


def arguments(batch=1, dtype=torch.float32) -> dict:
    """Valid arguments of chunk_gated_delta_rule, dense."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(batch, T, HQ, D), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(batch, T, HV, D).to(dtype)
    return {"q": q, "k": k, "v": v, "g": -torch.rand(batch, T, HV), "beta": torch.rand(batch, T, HV)}


# --- out that shares memory


def _shared(name, offset=0):
    """A change: `name` and out lie in one buffer, out `offset` elements later."""

    def change(a):
        x = a[name]
        buffer = torch.zeros(a["v"].numel() + x.numel() + offset)
        a[name] = buffer[: x.numel()].view(x.shape).copy_(x)
        return buffer[offset : offset + a["v"].numel()].view(a["v"].shape)

    return change


OVERLAPS = {
    "is_v": ("v", lambda a: a["v"]),
    "one_token_after_v": ("v", _shared("v", HV * D)),
    "over_q": ("q", _shared("q")),
    "over_k": ("k", _shared("k", 3)),
    "over_g": ("g", _shared("g")),
    "over_beta": ("beta", _shared("beta", 7)),
    "expanded": ("strides", lambda a: torch.zeros(1, 1, HV, D).expand(a["v"].shape)),
    "windows": ("strides", lambda a: torch.zeros(a["v"].numel()).as_strided(a["v"].shape, (T * HV * D, 1, D, 1))),
}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("word", "make_out"), OVERLAPS.values(), ids=OVERLAPS)
def test_out_sharing_memory_is_refused(word, make_out, packed):
    a = arguments(1 if packed else B)
    out = make_out(a)
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 5, T])
    with pytest.raises(ValueError, match=f"out .*{word}"):
        flash_qla.chunk_gated_delta_rule(**a, out=out)


def test_out_over_the_offsets_is_refused():
    a = arguments()
    memory = torch.tensor([0, T] + [0] * (T * HV * D // 2))
    out = memory.view(torch.float32)[: T * HV * D].view(1, T, HV, D)
    with pytest.raises(ValueError, match="out shares memory with cu_seqlens"):
        flash_qla.chunk_gated_delta_rule(**a, cu_seqlens=memory[:2], out=out)
    assert memory[:2].tolist() == [0, T]


def _beside(columns):
    """Columns of the rows of one `[B, T, ...]` buffer: v's, then out's."""

    def make(a):
        buffer = torch.zeros(B, T, 2 * HV * D + columns)
        a["v"] = buffer[..., : HV * D].view(a["v"].shape).copy_(a["v"])
        return buffer[..., HV * D : 2 * HV * D].view(a["v"].shape)

    return make


@pytest.mark.parametrize(
    "make_out",
    [
        pytest.param(_beside(0), id="beside_v"),
        pytest.param(_beside(5), id="beside_v_with_a_gap"),
        pytest.param(_shared("v", B * T * HV * D), id="right_after_v"),
        pytest.param(lambda a: torch.zeros(B, T, D, HV).mT, id="transposed"),
        pytest.param(lambda a: torch.zeros(B, 2 * T, HV, 2 * D)[:, ::2, :, ::2], id="every_second"),
    ],
)
def test_out_of_its_own_memory_is_taken(make_out):
    a = arguments(B)
    expected, _ = flash_qla.chunk_gated_delta_rule(**a)
    out = make_out(a)
    o, _ = flash_qla.chunk_gated_delta_rule(**a, out=out)
    assert o is out and torch.equal(o, expected)


# --- two arguments that contradict each other


def _context(*offsets):
    cu = torch.tensor(offsets)
    return SimpleNamespace(group=None, cu_seqlens=cu, cu_seqlens_cpu=cu.clone())


@pytest.mark.parametrize("offsets", [(0, 30, T), (0, T)], ids=["as_many", "fewer"])
def test_own_offsets_with_a_context_that_has_others(offsets):
    """The call's offsets win; the context's host copy, which the planning reads, must not stay behind."""
    a, cu = arguments(), torch.tensor([0, 5, T])
    expected, _ = flash_qla.chunk_gated_delta_rule(**a, cu_seqlens=cu)
    o, _ = flash_qla.chunk_gated_delta_rule(**a, cu_seqlens=cu, cp_context=_context(*offsets))
    assert torch.equal(o, expected)


def test_context_offsets_named_twice_keep_their_host_copy(monkeypatch):
    context, seen = _context(0, 5, T), []
    build = Sequences.build
    monkeypatch.setattr(Sequences, "build", lambda *args: seen.append(args[4]) or build(*args))
    for cu in (None, context.cu_seqlens):
        flash_qla.chunk_gated_delta_rule(**arguments(), cu_seqlens=cu, cp_context=context)
    assert [x is context.cu_seqlens_cpu for x in seen] == [True, True]


def test_state_layout_under_both_names():
    a = arguments() | {"initial_state": torch.randn(1, HV, D, D), "output_final_state": True}
    with pytest.raises(ValueError, match="transpose_state_layout=False.*state_v_first=True"):
        flash_qla.chunk_gated_delta_rule(**a, state_v_first=True, transpose_state_layout=False)
    both = flash_qla.chunk_gated_delta_rule(**a, state_v_first=True, transpose_state_layout=True)
    one = flash_qla.chunk_gated_delta_rule(**a, state_v_first=True)
    assert all(map(torch.equal, both, one))


# --- precision


def test_float64_with_narrow_logits_is_float64_throughout():
    """float64 in, float64 inside: the fused activations too, whatever the dtype of their logits."""
    a = arguments(dtype=torch.float64)
    logits, A_log, dt_bias = torch.randn(1, T, HV), torch.randn(HV), torch.randn(HV)
    a |= {"g": logits, "beta": logits.bfloat16()}
    o, _ = flash_qla.chunk_gated_delta_rule(
        **a, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True
    )
    g = -A_log.double().exp() * torch.nn.functional.softplus(logits.double() + dt_bias.double())
    seqs = Sequences.build(1, T, 64)
    beta = a["beta"].double().sigmoid()
    expected, _ = reference.recurrence(a["q"], a["k"], a["v"], g, beta, D**-0.5, None, seqs)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda a: {n: a[n].int() for n in "qkv"}, "q has dtype int32", id="integers"),
        pytest.param(lambda a: {"k": a["k"].int()}, "k has dtype int32", id="one_integer"),
        pytest.param(lambda a: {"v": a["v"].double()}, "v has dtype float64", id="one_float64"),
    ],
)
def test_autocast_hides_no_wrong_dtype(change, words):
    a = arguments()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=words):
        flash_qla.chunk_gated_delta_rule(**a | change(a))


# --- padding


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("l2norm", [False, True], ids=["plain", "l2norm"])
@pytest.mark.parametrize("activations", [False, True], ids=["gate", "logits"])
@pytest.mark.parametrize("offsets", [(0, 5, 40), (3, 40), (0,)], ids=["after", "around", "everywhere"])
def test_nan_in_padding_reaches_no_gradient(offsets, activations, l2norm, place, monkeypatch):
    """Rows of no sequence are often torch.empty: their own gradients are zero, and what sums over tokens, as dA_log
    does, must not see them.
    """
    if place == "device":  # the host does not know the offsets of a GPU
        monkeypatch.setattr(Sequences, "lengths_on_host", property(lambda seqs: not seqs.is_varlen))
    a = arguments() | {"cu_seqlens": torch.tensor(offsets)}
    outside = torch.ones(T, dtype=torch.bool)
    outside[offsets[0] : offsets[-1]] = False

    def gradients(padding):
        names = ("q", "k", "v", "g", "beta")
        leaves = {n: a[n].masked_fill(outside.view(-1, *[1] * (a[n].dim() - 2)), padding) for n in names}
        options = {"use_qk_l2norm_in_kernel": l2norm}
        if activations:
            leaves |= {"A_log": torch.zeros(HV), "dt_bias": torch.ones(HV)}
            options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        o, _ = flash_qla.chunk_gated_delta_rule(**a | leaves, **options)
        return {"o": o} | dict(zip(leaves, torch.autograd.grad(o.square().sum(), list(leaves.values()))))

    actual, expected = gradients(torch.nan), gradients(0.0)
    if l2norm and place == "device":  # README, limits: those rows' own dq and dk keep their NaN, no other row's
        for name in ("q", "k"):
            actual[name][:, outside] = 0
    assert [name for name, x in actual.items() if not torch.equal(x, expected[name])] == []
    assert not any(actual[name][:, outside].any() for name in ("q", "k", "v", "g", "beta"))


# --- what surrounds the call


def test_default_device_does_not_reach_the_tables():
    """Tables are made on the host, whatever torch.set_default_device says."""
    a = arguments() | {"cu_seqlens": torch.tensor([0, 5, 5, T])}
    expected = flash_qla.chunk_gated_delta_rule(**a, output_final_state=True)
    a["v"].requires_grad_()
    with torch.device("meta"):
        actual = flash_qla.chunk_gated_delta_rule(**a, output_final_state=True)
        actual[0].sum().backward()
        chunk_local_cumsum(a["g"])
        kkt_solve(a["k"], a["beta"], cu_seqlens=torch.tensor([0], device="cpu"))
    assert all(map(torch.equal, actual, expected)) and a["v"].grad.isfinite().all()


def test_a_group_of_sequences_does_not_go_through_all_of_them(monkeypatch):
    """Large heads make small groups of sequences; many empty ones then took time quadratic in their number."""
    q, v, g = torch.zeros(1, 1, 16, 128), torch.zeros(1, 1, 32, 128), torch.zeros(1, 1, 32)
    calls, bounds = [], Sequences.bounds
    monkeypatch.setattr(Sequences, "bounds", lambda seqs: calls.append(seqs) or bounds(seqs))

    def passes(num_seqs):
        calls.clear()
        flash_qla.chunk_gated_delta_rule(q, q, v, g, g, cu_seqlens=torch.zeros(num_seqs + 1, dtype=torch.int64))
        return len(calls)

    assert passes(400) == passes(4)


# --- errors that named nothing

UNUSUAL = {
    "sparse": ("q", lambda a: a["q"].to_sparse(), "sparse_coo"),
    "sparse_state": ("initial_state", lambda a: torch.zeros(1, HV, D, D).to_sparse(), "sparse_coo"),
    "nested": ("q", lambda a: torch.nested.as_nested_tensor(list(a["q"]), layout=torch.jagged), "jagged"),
}


@pytest.mark.parametrize(("name", "make", "layout"), UNUSUAL.values(), ids=UNUSUAL)
def test_tensor_that_is_not_dense_is_named(name, make, layout):
    a = arguments()
    with pytest.raises(ValueError, match=f"{name} must be a torch.Tensor .*{layout}"):
        flash_qla.chunk_gated_delta_rule(**a | {name: make(a)})


def _call(function, **change):
    return lambda: function(**change)


UNNAMED = {
    "unhashable_chunk_size": (
        lambda: flash_qla.chunk_gated_delta_rule(**arguments(), chunk_size=[64]),
        r"chunk_size=\[64\]",
    ),
    "walk_without_k": (
        lambda: fused_gdr_h(None, arguments()["v"], None, arguments()["g"], arguments()["beta"]),
        "^k must be a torch.Tensor",
    ),
    "cumsum_of_a_list": (_call(chunk_local_cumsum, g=[1.0]), "g must be .*list"),
    "cumsum_chunk_size": (_call(chunk_local_cumsum, g=torch.zeros(1, 5, 2), chunk_size="64"), "chunk_size .*'64'"),
    "cumsum_offsets_list": (_call(chunk_local_cumsum, g=torch.zeros(1, 5, 2), cu_seqlens=[0, 5]), "cu_seqlens .*list"),
    "cumsum_offsets_float": (
        _call(chunk_local_cumsum, g=torch.zeros(1, 5, 2), cu_seqlens=torch.tensor([0.0, 5.0])),
        "cu_seqlens .*float32",
    ),
    "cumsum_offsets_2d": (
        _call(chunk_local_cumsum, g=torch.zeros(1, 5, 2), cu_seqlens=torch.tensor([[0, 5]])),
        "cu_seqlens .*1 dimensions",
    ),
    "context_group": (_call(build_cp_context, group=2), "group .*2"),
    "warmup_heads": (_call(flash_qla.warmup, num_k_heads=-1, num_v_heads=4), "num_k_heads .*-1"),
    "warmup_head_dim": (_call(flash_qla.warmup, num_k_heads=2, num_v_heads=4, head_dim_v=-3), "head_dim_v .*-3"),
    "warmup_dtype": (_call(flash_qla.warmup, num_k_heads=2, num_v_heads=4, dtype="bfloat16"), "dtype .*'bfloat16'"),
    "warmup_no_gate_dtype": (
        _call(flash_qla.warmup, num_k_heads=2, num_v_heads=4, gate_dtype=None),
        "gate_dtype .*None",
    ),
}


@pytest.mark.parametrize(("call", "words"), UNNAMED.values(), ids=UNNAMED)
def test_error_names_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# --- derivatives that would be lost


TRANSFORMS = {
    "vmap": lambda call, v: torch.func.vmap(call)(torch.stack([v, v])),
    "grad": lambda call, v: torch.func.grad(lambda v: call(v).sum())(v),
    "jvp": lambda call, v: torch.func.jvp(call, (v,), (v,)),
    "vjp": lambda call, v: torch.func.vjp(call, v)[0],
}


@pytest.mark.parametrize("l2norm", [False, True], ids=["plain", "l2norm"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functional_transforms_are_refused_by_name(transform, l2norm):
    """The kernels see neither wrappers nor tangents: a silent constant would come out."""
    a = arguments()

    def call(v):
        return flash_qla.chunk_gated_delta_rule(**a | {"v": v}, use_qk_l2norm_in_kernel=l2norm)[0]

    with pytest.raises(NotImplementedError, match=r"chunk_gated_delta_rule .*torch\.func"):
        TRANSFORMS[transform](call, a["v"])
    # What a transform around the call does not touch is an ordinary call.
    inside = torch.func.vmap(lambda x: (call(a["v"]), x)[1])(torch.ones(2))
    assert torch.equal(inside, torch.ones(2))


def test_the_low_level_functions_refuse_transforms():
    """A derivative of the forward alone would silently be zero."""
    a = arguments()
    g_cumsum, T_inv, o, *_ = flash_qla.chunk_gated_delta_rule_fwd(**a)

    def forward(v):
        return flash_qla.chunk_gated_delta_rule_fwd(**{**a, "v": v})[2]

    def backward(do):
        return flash_qla.chunk_gated_delta_rule_bwd(**{**a, "g": g_cumsum}, A=T_inv, do=do)[0]

    def walk(v):
        return fused_gdr_h(a["k"], v, T_inv, g_cumsum, a["beta"])[1]

    for call in (forward, backward, walk):
        with pytest.raises(NotImplementedError, match="torch.func"):
            torch.func.vmap(call)(torch.stack([o, o]))
        with pytest.raises(NotImplementedError, match="torch.func"):
            torch.func.grad(lambda x, call=call: call(x).sum())(o)


OFFSETS = {
    "public": lambda a, cu: flash_qla.chunk_gated_delta_rule(**a, cu_seqlens=cu)[0],
    "host_copy": lambda a, cu: flash_qla.chunk_gated_delta_rule(
        **a, cu_seqlens=torch.tensor([0, 5, T]), cu_seqlens_cpu=cu
    )[0],
    "context": lambda a, cu: flash_qla.chunk_gated_delta_rule(**a, cp_context=SimpleNamespace(cu_seqlens=cu))[0],
    "out": lambda a, cu: flash_qla.chunk_gated_delta_rule(**a, out=a["v"] + cu[0])[0],
    "fwd": lambda a, cu: flash_qla.chunk_gated_delta_rule_fwd(**a, cu_seqlens=cu)[2],
    "kkt": lambda a, cu: kkt_solve(a["k"], a["beta"], cu_seqlens=cu),
    "cumsum": lambda a, cu: chunk_local_cumsum(a["g"], cu_seqlens=cu),
    "build_cp_context": lambda a, cu: build_cp_context(cu, g=a["g"]).decays,
    "l2norm": lambda a, cu: l2norm(a["q"] + cu[0]),
}


@pytest.mark.parametrize("call", OFFSETS.values(), ids=OFFSETS)
def test_transforms_over_what_has_no_gradient_are_refused_by_name(call):
    a = arguments()
    with pytest.raises(NotImplementedError, match=r"is not supported inside torch\.func"):
        torch.func.vmap(lambda cu: call(a, cu))(torch.tensor([[0, 5, T], [0, 6, T]]))


@pytest.mark.parametrize("l2norm", [False, True], ids=["plain", "l2norm"])
def test_batched_gradients_are_refused_by_name(l2norm):
    """autograd's vectorised Jacobians send vmap's wrappers into the backward."""
    a = arguments()
    a["v"].requires_grad_()
    o, _ = flash_qla.chunk_gated_delta_rule(**a, use_qk_l2norm_in_kernel=l2norm)
    with pytest.raises(NotImplementedError, match="chunk_gated_delta_rule .*batched gradients"):
        torch.autograd.grad(o, a["v"], torch.ones(2, *o.shape), is_grads_batched=True)


@pytest.mark.parametrize("tracked", [False, True], ids=["constant", "tracked"])
@pytest.mark.parametrize("name", ["v", "g", "A_log"])
def test_forward_mode_is_refused(name, tracked):
    a = arguments() | {"A_log": torch.zeros(HV), "use_gate_in_kernel": True}
    a["q"].requires_grad_(tracked)
    with torch.autograd.forward_ad.dual_level():
        flash_qla.chunk_gated_delta_rule(**a)
        a[name] = torch.autograd.forward_ad.make_dual(a[name], torch.ones_like(a[name]))
        with pytest.raises(NotImplementedError, match="chunk_gated_delta_rule has no forward-mode derivative"):
            flash_qla.chunk_gated_delta_rule(**a)


def test_out_counts_as_changed():
    """Whoever saved `out` for a backward of their own is told that it changed, as by any in-place operation."""
    a, factor = arguments(), torch.ones(1, requires_grad=True)
    out = torch.ones_like(a["v"])
    product = factor * out
    flash_qla.chunk_gated_delta_rule(**a, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        out = torch.empty_like(a["v"])
        assert flash_qla.chunk_gated_delta_rule(**a, out=out)[0] is out


def test_out_that_requires_gradients_is_fine_where_nobody_tracks():
    out = torch.ones_like(arguments()["v"]).requires_grad_()
    with torch.no_grad():
        assert flash_qla.chunk_gated_delta_rule(**arguments(), out=out)[0] is out


# --- tracing without dynamo


def test_export():
    """torch.export says that it is compiling, dynamo or not: the call between graphs called itself for ever."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)[0]

    a = arguments()
    exported = torch.export.export(Layer(), tuple(a.values()), strict=False).module()
    a["v"] = 2 * a["v"]
    assert torch.equal(exported(*a.values()), flash_qla.chunk_gated_delta_rule(**a)[0])


# --- contexts are values that callers keep


def test_contexts_can_be_compared_kept_and_copied():
    """Their tensors have no truth value: == raised, and a context could be no key."""
    one, other = (build_cp_context(torch.tensor([0, 5, T]), g=-torch.ones(1, T, HV)) for _ in range(2))
    assert one == one and one != other and len({one, other, one}) == 2
    for copied in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert copied.decays == one.decays and torch.equal(copied.cu_seqlens, one.cu_seqlens)
        flash_qla.chunk_gated_delta_rule(**arguments(), cp_context=copied)


# --- a cache of another forward

OTHER_FORWARDS = {
    "tokens": ({"tokens": 600}, {}),
    "heads": ({"heads": 2}, {}),
    "head_size": ({"head_dim": 4}, {}),
    "dtype": ({"dtype": torch.bfloat16}, {}),
    "sequences": ({}, {"cu_seqlens": torch.tensor([0, 100, 300])}),
}


@pytest.mark.parametrize(("sizes", "options"), OTHER_FORWARDS.values(), ids=OTHER_FORWARDS)
def test_cache_of_another_forward_is_refused(sizes, options):
    """Its states would be read for others, and beyond their end."""

    def halves(sizes, options, cache=None):
        tokens, heads, dim, dtype = (
            {"tokens": 300, "heads": 1, "head_dim": 8, "dtype": torch.float32} | sizes
        ).values()
        q, g = torch.ones(1, tokens, heads, dim, dtype=dtype) / dim, -torch.ones(1, tokens, heads)
        options = options | {"cp_context": build_cp_context(force_intra_cp=True)}
        g_cumsum, A, *_, made = flash_qla.chunk_gated_delta_rule_fwd(
            q, q, q, g, -g, **options, enable_fwd_cp_cache=True
        )
        flash_qla.chunk_gated_delta_rule_bwd(q, q, q, g_cumsum, -g, A, q, **options, cp_cache=cache or made)
        return made

    other = halves(sizes, options)
    assert other is not None
    with pytest.raises(ValueError, match="cp_cache is of another forward"):
        halves({}, {}, other)
    halves({}, {}, copy.deepcopy(halves({}, {})))


# --- environment variables with odd values


@pytest.mark.parametrize("name", ["FLASH_QLA_BACKEND", "FLASH_QLA_DEBUG", "FLASH_QLA_CP_TOLERANCE"])
def test_empty_variable_counts_as_not_set(name, monkeypatch):
    """`NAME= command` is how a shell user turns a variable off."""
    monkeypatch.setenv(name, "")
    assert env.read(name) == env.VARIABLES[name][0]
    a = arguments()
    a["v"][0, 0, 0, 0] = torch.nan  # debug mode would find it
    flash_qla.chunk_gated_delta_rule(**a, force_intra_cp=True)


@pytest.mark.parametrize("read", [env.debug, env.print_plan], ids=["debug", "print_plan"])
def test_switches(read, monkeypatch):
    """`false` turned the debug mode on."""
    name = f"FLASH_QLA_{read.__name__.upper()}"
    for value, wanted in {"0": False, "1": True, "false": False, "OFF": False, "no": False, "True": True}.items():
        monkeypatch.setenv(name, value)
        assert read() is wanted, value
    for value in ("2", " ", "maybe", "0.0"):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            read()

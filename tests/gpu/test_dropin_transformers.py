"""A Gated DeltaNet layer of Hugging Face transformers runs on this package through FLA, as right as its PyTorch path.

Small random layers in bf16 and a float32 twin with transformers' own PyTorch function as the yardstick: through us, the
error may not be larger than what that PyTorch function itself makes of the same bf16 layer, but for a quarter.
"""

import contextlib
import copy
import importlib
import os
import sys
from dataclasses import dataclass

import pytest
import torch

import flash_qla

DEVICE = "cuda"
# Relative L2 error against the float32 layer: at most this factor over the bf16 PyTorch path's, plus rounding.
FACTOR, SLACK = 1.25, 2e-3
# Sums of one number per token that all but cancel, for four heads: measured 2.7e-2 here, 1.3e-2 in PyTorch, by chance.
SLACK_OF = {"A_log": 3e-2, "dt_bias": 3e-2}

FAMILIES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet"),
}


@dataclass
class Family:
    """A model family: its modeling module, a small config, a layer in bf16 and its float32 twin."""

    module: object
    config: object
    layer: torch.nn.Module
    exact: torch.nn.Module


@pytest.fixture(params=FAMILIES)
def family(request, monkeypatch):
    folder = os.environ.get("PEER_FLA")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        pytest.skip(f"flash-linear-attention is not here: {error}")
    try:
        module = importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")
    except ImportError as error:
        pytest.skip(f"transformers has no {request.param}: {error}")
    if not hasattr(getattr(module, "torch_chunk_gated_delta_rule", None), "__wrapped__"):
        pytest.skip("this transformers release chooses its gated delta rule in another way")
    monkeypatch.delenv("FLA_FLASH_QLA", raising=False)
    config_name, layer_name = FAMILIES[request.param]
    config = getattr(module, config_name)(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        intermediate_size=256, vocab_size=64, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    torch.manual_seed(0)
    exact = getattr(module, layer_name)(config, 0).to(DEVICE)
    with torch.no_grad():
        for parameter in exact.parameters():  # both twins hold the same numbers
            parameter.copy_(parameter.bfloat16())
    return Family(module, config, copy.deepcopy(exact).bfloat16(), exact)


@pytest.fixture
def our_calls(monkeypatch):
    calls, function = [], flash_qla.chunk_gated_delta_rule

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule", spy)
    return calls


@pytest.fixture
def pytorch_path(family):
    """Makes contexts in which the layer's calls stay in transformers' own PyTorch function."""
    plain = family.module.torch_chunk_gated_delta_rule.__wrapped__

    @contextlib.contextmanager
    def path():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(family.module, "torch_chunk_gated_delta_rule", _without_unknown(plain))
            yield

    return path


def _without_unknown(function):
    """transformers' wrapper drops None arguments such as cu_seqlens; the plain function takes **kwargs or not."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    return lambda *args, **kwargs: function(*args, **{k: v for k, v in kwargs.items() if k in names})


def _inputs(batch, num_tokens, width=256):
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(batch, num_tokens, width, device=DEVICE, generator=generator).bfloat16()
    cotangent = torch.randn(batch, num_tokens, width, device=DEVICE, generator=generator).bfloat16()
    return x, cotangent


def _forward_backward(layer, x, cotangent):
    """Returns the output and every gradient, by name."""
    dtype = next(layer.parameters()).dtype
    x = x.to(dtype, copy=True).requires_grad_()
    parameters = dict(layer.named_parameters())
    y = layer(x)
    grads = torch.autograd.grad(y, [x, *parameters.values()], cotangent.to(dtype))
    return {"y": y.detach(), **dict(zip(["x", *parameters], grads, strict=True))}


def _error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def _limit(name, pytorch_error):
    return FACTOR * pytorch_error + SLACK_OF.get(name, SLACK)


def _assert_no_worse(ours, plain, exact):
    report = {name: (_error(ours[name], exact[name]), _error(plain[name], exact[name])) for name in exact}
    bad = {name: pair for name, pair in report.items() if not pair[0] <= _limit(name, pair[1])}
    assert not bad, f"error through flash_qla, error of the PyTorch path (both against float32): {bad}; all: {report}"


@pytest.mark.parametrize("batch, num_tokens", [(2, 192), (1, 333)], ids=["batch", "ragged"])
def test_layer_forward_and_backward(batch, num_tokens, family, our_calls, pytorch_path):
    x, cotangent = _inputs(batch, num_tokens)
    ours = _forward_backward(family.layer, x, cotangent)
    assert len(our_calls) == 1, "the layer's call did not reach flash_qla"
    with pytorch_path():
        plain = _forward_backward(family.layer, x, cotangent)
        exact = _forward_backward(family.exact, x, cotangent)
    assert len(our_calls) == 1, "the PyTorch path went through flash_qla: nothing was compared"
    _assert_no_worse(ours, plain, exact)


def test_prefill_and_continued_prefill_with_cache(family, our_calls, pytorch_path):
    from transformers.cache_utils import DynamicCache

    x, _ = _inputs(2, 230)
    pieces = (100, 65, 65)

    def in_pieces(layer):
        cache = DynamicCache(config=family.config)
        dtype = next(layer.parameters()).dtype
        with torch.no_grad():
            outputs = [layer(piece, cache_params=cache) for piece in x.to(dtype).split(pieces, dim=1)]
        return {"y": torch.cat(outputs, 1), "state": cache.layers[0].recurrent_states[0]}

    ours = in_pieces(family.layer)
    assert len(our_calls) == len(pieces)
    assert our_calls[0]["initial_state"] is None and our_calls[1]["initial_state"] is not None
    with torch.no_grad():
        whole = family.layer(x)
    assert len(our_calls) == len(pieces) + 1
    with pytorch_path():
        plain, exact = in_pieces(family.layer), in_pieces(family.exact)
    assert len(our_calls) == len(pieces) + 1
    _assert_no_worse(ours, plain, exact)
    assert _error(ours["y"], whole) <= 1e-2, "the cache's state does not continue the sequence"

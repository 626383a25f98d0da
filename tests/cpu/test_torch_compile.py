"""torch.compile leaves the operator alone: one clean break between the caller's graphs, nothing of ours in either."""

import inspect

import torch

import flash_qla
from flash_qla.testing.workloads import make_inputs
from flash_qla.utils import outside_graphs
from tests.case_inputs import run_python


def layer(q, k, v, g, beta, state, factor):
    o, ht = flash_qla.chunk_gated_delta_rule(q * 1.0, k, v, g, beta, initial_state=state, output_final_state=True)
    return o * factor, ht


def test_the_operator_is_called_between_graphs():
    """Guards two lengths, forward and backward: the caller's two products are all that is ever compiled."""
    graphs = []

    def backend(module, _):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    compiled = torch.compile(layer, backend=backend)
    for num_tokens in (70, 130):
        x = make_inputs((1, num_tokens), 1, 2, 16, 16).differentiable()
        arguments = (x.q, x.k, x.v, x.g, x.beta, x.initial_state, 2.0)
        results, expected = compiled(*arguments), layer(*arguments)
        for actual, wanted in zip(results, expected, strict=True):
            assert torch.equal(actual, wanted)
        grads, wanted = (torch.autograd.grad([o, ht], arguments[:6], [x.do, x.dht]) for o, ht in (results, expected))
        for actual, expected_grad in zip(grads, wanted, strict=True):
            assert torch.equal(actual, expected_grad)
    assert len(graphs) in (2, 4)  # the second length may compile both again, for any length
    assert all(len(graph) == 1 for graph in graphs), graphs


def test_every_argument_reaches_the_call_between_graphs(monkeypatch):
    """Guards the list of arguments that is written down a second time there: a new one could be forgotten."""
    signature = inspect.signature(flash_qla.chunk_gated_delta_rule)
    values = {name: object() for name in signature.parameters if name != "kwargs"}
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    monkeypatch.setattr(outside_graphs, "call", lambda function, *args, **kwargs: (function, args, kwargs))
    function, args, kwargs = flash_qla.chunk_gated_delta_rule(**values, chunk_offsets=1)
    assert function is flash_qla.chunk_gated_delta_rule
    assert signature.bind(*args, **kwargs).arguments == {**values, "kwargs": {"chunk_offsets": 1}}


def test_the_compiler_is_not_loaded_without_need():
    """Guards the first call's time: loading it takes a second."""
    code = """
import sys, torch, flash_qla
q = torch.randn(1, 3, 1, 8)
flash_qla.chunk_gated_delta_rule(q, q, q, -torch.rand(1, 3, 1), torch.rand(1, 3, 1))
print("torch._dynamo" in sys.modules)
"""
    assert run_python(code).split() == ["False"]

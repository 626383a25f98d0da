"""Streams and devices: work goes where the caller's current stream is."""

import pytest
import torch

import flash_qla
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import INPUT_NAMES, assert_same_bits, gradient_name, run_public

BF16 = torch.bfloat16
# Long enough (tens of milliseconds) that work which does not wait for it overtakes it.
SLEEP_CYCLES = 50_000_000


def make(lengths=(100, 0, 400), seed=0, **kwargs):
    return make_inputs(list(lengths), 4, 8, 128, 128, "mild", BF16, device=kwargs.pop("device", "cuda"), seed=seed)


def blank(inputs):
    """The same problem with zeros for data, to be filled late."""
    leaves = inputs.differentiable()
    with torch.no_grad():
        for name in INPUT_NAMES:
            getattr(leaves, name).zero_()
    return leaves


def fill_and_run(target, source):
    """On the current stream: wait, copy the data in, call, differentiate."""
    torch.cuda._sleep(SLEEP_CYCLES)
    with torch.no_grad():
        for name in INPUT_NAMES:
            getattr(target, name).copy_(getattr(source, name), non_blocking=True)
    o, ht = flash_qla.chunk_gated_delta_rule(**target.kwargs, output_final_state=True)
    grads = torch.autograd.grad([o, ht], [getattr(target, n) for n in INPUT_NAMES], [source.do, source.dht])
    results = {"o": o.detach(), "ht": ht.detach()} | dict(zip(map(gradient_name, INPUT_NAMES), grads, strict=True))
    return results, torch.cuda.current_stream().record_event()


def in_order(results, expected):
    return {name: results[name] for name in expected}


def test_case22_side_stream():
    """Guards launches on the default stream: they would run before the copies, on zeros."""
    inputs = make()
    expected, target = run_public(inputs), blank(inputs)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        results, done = fill_and_run(target, inputs)
    done.synchronize()
    assert_same_bits(in_order(results, expected), expected)


def test_case22_two_streams():
    """Guards shared scratch: two streams at once with different data, several rounds."""
    problems = [make(seed=n) for n in range(2)]
    expected = [run_public(inputs) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(3):
        targets = [blank(inputs) for inputs in problems]
        torch.cuda.synchronize()
        runs = []
        for stream, target, source in zip(streams, targets, problems, strict=True):
            with torch.cuda.stream(stream):
                runs.append(fill_and_run(target, source))
        for (results, done), wanted in zip(runs, expected, strict=True):
            done.synchronize()
            assert_same_bits(in_order(results, wanted), wanted)


def test_case22_capture_is_not_empty():
    """Guards a capture that records nothing because the kernels went elsewhere."""
    inputs = make()
    expected = run_public(inputs, gradients=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, ht = flash_qla.chunk_gated_delta_rule(**inputs.kwargs, output_final_state=True)
    o.fill_(float("nan"))
    graph.replay()
    assert torch.equal(o, expected["o"]) and torch.equal(ht, expected["ht"])


def test_threads_with_streams():
    """Guards the launcher's caches: four threads, a stream each."""
    from concurrent.futures import ThreadPoolExecutor

    problems = [make((70 + n, n, 300), seed=n) for n in range(4)]
    expected = [run_public(inputs) for inputs in problems]
    torch.cuda.synchronize()

    def work(n):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            runs = [run_public(problems[n]) for _ in range(5)]
        stream.synchronize()
        return runs

    with ThreadPoolExecutor(4) as pool:
        for n, runs in enumerate(pool.map(work, range(4))):
            for results in runs:
                assert_same_bits(results, expected[n])


def test_device_of_the_tensors():
    """Guards the device index: the tensors' device counts, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    expected = run_public(make())
    inputs = make(device="cuda:1")
    with torch.cuda.device(0):
        results = run_public(inputs)
    assert all(x.device.index == 1 for x in results.values())
    assert_same_bits({name: x.to("cuda:0") for name, x in results.items()}, expected)


def test_explicit_index_equals_the_current_device():
    inputs = make(device=f"cuda:{torch.cuda.current_device()}")
    assert_same_bits(run_public(inputs), run_public(make()))

"""Compiles: warm-up covers what serving meets, and a second process loads from disk."""

import os
import random
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

import flash_qla
from flash_qla.testing.workloads import make_inputs
from tests.case_inputs import ROOT, run_public, run_python

BF16, FP32 = torch.bfloat16, torch.float32
MIB = 1 << 20


def warm(ratio, gate_dtype=FP32, state_dtype=FP32):
    return flash_qla.warmup(2, 2 * ratio, gate_dtype=gate_dtype, state_dtype=state_dtype, device="cuda")


def test_case38_no_compile_after_warmup():
    """Guards the compile keys: batch, tokens, sequences and heads are run-time values, whatever serving brings."""
    for gate_dtype in (FP32, BF16):
        for state_dtype in (FP32, BF16):
            warm(4, gate_dtype, state_dtype)
            assert warm(4, gate_dtype, state_dtype) == 0
    compiled = flash_qla.compile_count()
    draw = random.Random(0)
    for n in range(100):
        heads = draw.choice((1, 2, 4, 16))
        num_seqs = draw.choice((1, 2, 5, 128))
        dense = draw.random() < 0.3
        if dense:
            lengths = (draw.choice((1, 3)), draw.choice((1, 63, 64, 777, 2048)))
        else:
            lengths = [draw.randint(0, draw.choice((3, 100, 16384 // num_seqs))) for _ in range(num_seqs)]
        inputs = make_inputs(
            lengths, heads, 4 * heads, gate_profile="mild", device="cuda", with_state=draw.random() < 0.5,
            gate_dtype=draw.choice((FP32, BF16)), state_dtype=draw.choice((FP32, BF16)),
            index_dtype=draw.choice((torch.int32, torch.int64)), tail_tokens=0 if dense else draw.choice((0, 100)),
        )  # fmt: skip
        if inputs.g.dtype == BF16:
            inputs = replace(inputs, beta=inputs.beta.bfloat16())
        # Warmed: (in, out) in the state's dtype, out in float32, and no state in.
        into = BF16 if inputs.initial_state is None else inputs.initial_state.dtype
        run_public(
            inputs, gradients=n % 4 == 0, v_first=draw.random() < 0.5, state_dtype=draw.choice((FP32, into)),
            use_qk_l2norm_in_kernel=draw.random() < 0.5,
        )  # fmt: skip
        assert flash_qla.compile_count() == compiled, f"call {n} compiled: {lengths}, {heads} heads"


def test_heads_do_not_compile():
    """Guards Hv = 6 after Hv = 48 with the same group, whichever way the load divides V among CTAs."""
    warm(3)
    compiled = flash_qla.compile_count()
    for heads, lengths in ((16, [100]), (1, [100, 3]), (2, [3000]), (5, (2, 64)), (16, [500] * 8)):
        run_public(make_inputs(lengths, heads, 3 * heads, device="cuda"))
    assert flash_qla.compile_count() == compiled


def test_case33_offsets_do_not_compile():
    """Guards int32 and int64 offsets, dense and packed: one kernel."""
    run_public(make_inputs([100, 28], 2, 4, device="cuda"))
    compiled = flash_qla.compile_count()
    run_public(make_inputs([100, 28], 2, 4, device="cuda", index_dtype=torch.int64))
    run_public(make_inputs((2, 64), 2, 4, device="cuda"))
    assert flash_qla.compile_count() == compiled


def test_case38_warmup_gives_memory_back():
    warm(2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    warm(2)
    assert torch.cuda.memory_allocated() - before < MIB
    code = """
    import torch, flash_qla
    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    flash_qla.warmup(2, 4)
    torch.cuda.synchronize()
    print((free - torch.cuda.mem_get_info()[0]) >> 20)
    """
    assert int(run_python(textwrap.dedent(code)).split()[-1]) < 64


FIRST_RESULT = """
import time, torch
torch.zeros(1, device="cuda")
start = time.perf_counter()
import flash_qla
x = torch.randn(1, 256, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
g = torch.zeros(1, 256, 2, device="cuda")
o, _ = flash_qla.chunk_gated_delta_rule(x, x, x, g, g)
o.sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def test_case37_second_process_is_fast():
    """Guards the disk cache: with it, import to first gradient takes less than 5 s."""
    run_python(FIRST_RESULT)
    assert float(run_python(FIRST_RESULT).split()[-1]) < 5.0


@pytest.mark.slow
def test_processes_share_an_empty_cache(tmp_path):
    """Guards the cache against two processes that fill it at once."""
    environment = {**os.environ, "TILELANG_CACHE_DIR": str(tmp_path), "TVM_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", FIRST_RESULT]
    running = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
        for _ in range(2)
    ]
    for process in running:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output

"""Checks the operator over a set of workloads and prints a table of errors.

    python tests/test_gdr.py --set develop|varlen|profile|product [--num-heads N] [--ref-dtype float32]

Per row and tensor, worst head: our error against float64, that of the chunked PyTorch version in the same dtypes, their
ratio, and the limit (flash_qla/testing/compare.py). The exit status is 1 when a bound fails. Under pytest the script's
own behaviour is tested.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import flash_qla
from flash_qla.testing import compare, workloads
from tests.case_inputs import as_float64, run_public, truth

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
CPU_TOKENS, CPU_HEADS = 512, 4


def parse(arguments=None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=list(workloads.CHECK_SETS), default="develop")
    parser.add_argument("--num-heads", type=int, help="query/key heads of every row; its Hv/Hq ratio is kept")
    parser.add_argument(
        "--ref-dtype",
        choices=["float64", "float32"],
        default="float64",
        help="of the truth; float32 is faster, blurred",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of q, k, v")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-tokens", type=int, help=f"shorten longer rows (default: {CPU_TOKENS} on a CPU)")
    parser.add_argument("--forward-only", action="store_true")
    options = parser.parse_args(arguments)
    if options.num_heads is not None and options.num_heads < 1:
        parser.error(f"--num-heads {options.num_heads}: must be at least 1")
    return options


def fit(row: workloads.Workload, options) -> workloads.Workload:
    """The row with the heads and tokens that were asked for, or that a CPU can do."""
    on_cpu = options.device == "cpu"
    max_tokens = options.max_tokens or (CPU_TOKENS if on_cpu else None)
    num_k_heads = options.num_heads or (min(row.num_k_heads, CPU_HEADS) if on_cpu else row.num_k_heads)
    num_v_heads = num_k_heads * (row.num_v_heads // row.num_k_heads)
    lengths = row.lengths
    if max_tokens and row.num_tokens > max_tokens:
        share = max_tokens / row.num_tokens
        scaled = [max(1, int(length * share)) if length else 0 for length in lengths]
        lengths = (lengths[0], scaled[1]) if isinstance(lengths, tuple) else scaled
    return replace(row, lengths=lengths, num_k_heads=num_k_heads, num_v_heads=num_v_heads)


def check_row(row: workloads.Workload, options) -> list[tuple[compare.Comparison, float, bool]]:
    """Runs one row. Returns per tensor: our comparison, the plain version's worst head error, whether it passed."""
    inputs = row.make(dtype=DTYPES[options.dtype], device=options.device)
    gradients = not options.forward_only
    actual = run_public(inputs, gradients=gradients)
    plain = compare.chunked_reference(inputs, gradients=gradients)
    if options.ref_dtype == "float64":
        expected = truth(inputs, gradients=gradients)
    else:
        wide = as_float64(inputs)
        names = ("q", "k", "v", "g", "beta", "initial_state", "do", "dht")
        wide = replace(wide, **{name: getattr(wide, name).float() for name in names})
        expected = compare.chunked_reference(wide, gradients=gradients)
    results = []
    for comparison in compare.compare_all(actual, expected, inputs.q.dtype):
        errors = compare.head_errors(comparison.name, plain[comparison.name], expected[comparison.name])
        theirs = float(errors[comparison.worst_head]) if errors.numel() else 0.0
        results.append((comparison, theirs, comparison.passed))
    return results


def progress(rows, **options):
    """tqdm's bar where there is tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return rows
    return tqdm(rows, **options)


def main(arguments=None) -> int:
    """Runs a set. Returns the exit status."""
    options = parse(arguments)
    rows = [fit(row, options) for row in workloads.check_rows(options.set)]
    rows = list({row.id: row for row in rows}.values())
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    versions = f"flash_qla {flash_qla.__version__}, torch {torch.__version__}"
    print(f"{versions}, {name}, q/k/v {options.dtype}, set {options.set}")
    reduced = sum(a != b for a, b in zip(rows, workloads.check_rows(options.set), strict=False))
    if reduced:
        print(f"{reduced} rows have other heads or fewer tokens than the set's (--num-heads, --max-tokens, CPU)")
    header = f"{'row':<34} {'tensor':<6} {'head':>4} {'ours':>10} {'plain':>10} {'ratio':>6} {'limit':>9}"
    lines, failures, start = [], 0, time.perf_counter()
    for row in progress(rows, desc=options.set, unit="row", file=sys.stderr):
        for comparison, theirs, passed in check_row(row, options):
            failures += not passed
            head = comparison.worst_head if comparison.errors.numel() else 0
            ours, limit = (float(x[head]) if x.numel() else 0.0 for x in (comparison.errors, comparison.limits))
            absolute = bool(comparison.near_zero.numel() and comparison.near_zero[head])
            ratio = "abs" if absolute else "-" if not theirs else f"{ours / theirs:.2f}"
            label = row.id.removeprefix("fwdbwd-")[:34]
            errors = f"{ours:>10.2e} {theirs:>10.2e} {ratio:>6} {limit:>9.1e}{'' if passed else '  FAIL'}"
            lines.append(f"{label:<34} {comparison.name:<6} {head:>4} {errors}")
    print(header, *lines, sep="\n")
    print(f"{len(rows)} rows, {len(lines)} tensors, {failures} over their limit, {time.perf_counter() - start:.1f} s")
    return 1 if failures else 0


@pytest.mark.parametrize("name", workloads.CHECK_SETS)
def test_first_row_of_each_set(name, monkeypatch, capsys):
    """Guards the documented command: it runs, prints a table, and its status is 0."""
    first = workloads.check_rows(name)[0]
    monkeypatch.setattr(workloads, "check_rows", lambda name: (first,))
    assert main(["--set", name, "--max-tokens", "150", "--num-heads", "1"]) == 0
    output = capsys.readouterr().out
    assert "0 over their limit" in output and all(f" {tensor} " in output for tensor in ("o", "ht", "dg", "dh0"))


def test_status_is_1_when_a_bound_fails(monkeypatch, capsys):
    """Guards the exit status: a wrong head must fail the command."""
    from tests import case_inputs

    first = workloads.check_rows("develop")[0]
    monkeypatch.setattr(workloads, "check_rows", lambda name: (first,))
    real = case_inputs.run_public

    def wrong(*args, **kwargs):
        results = real(*args, **kwargs)
        results["dg"][..., 0] *= 1.05
        return results

    monkeypatch.setitem(globals(), "run_public", wrong)
    assert main(["--num-heads", "1"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_float32_reference(monkeypatch):
    first = workloads.check_rows("develop")[0]
    monkeypatch.setattr(workloads, "check_rows", lambda name: (first,))
    assert main(["--ref-dtype", "float32", "--forward-only"]) == 0


if __name__ == "__main__":
    sys.exit(main())

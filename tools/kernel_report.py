"""Registers, spills, shared memory and ptxas remarks of every kernel variant, compiled here; needs nvcc, no GPU.

    python tools/kernel_report.py [--only REGEX] [--jobs N] [--json FILE]

Exit status 1 when a variant fails to compile, spills, has serialised wgmmas or needs more shared memory than there is.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flash_qla.testing import compiled  # noqa: E402

COLUMNS = ("variant", "registers", "spills B", "stack B", "static smem", "dynamic smem", "verdict")


def cells(report: compiled.Report, problems: list[str]) -> list[str]:
    """One line of the table."""
    numbers = (report.registers, report.spill_bytes, report.stack_bytes, report.static_smem, report.dynamic_smem)
    values = ["–"] * 5 if report.error else [f"{n:,}" for n in numbers]
    verdict = "; ".join(problems) or "; ".join(["ok", *report.notes])
    return [report.name.replace("-value_warpgroups", "-wg"), *values, verdict]


def print_table(lines: list[list[str]]) -> None:
    """Prints with rich where it is installed, tab-separated elsewhere."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print("\n".join("\t".join(line) for line in [list(COLUMNS), *lines]))
        return
    table = Table(*COLUMNS)
    for number in range(1, 6):
        table.columns[number].justify = "right"
    for line in lines:
        table.add_row(*line, style=None if line[-1].startswith("ok") else "red")
    console = Console()
    Console(width=console.width if console.is_terminal else 200).print(table)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="only variants whose name matches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args(argv)
    variants = {variant.name: variant for variant in compiled.all_variants(options.only)}
    if options.list:
        print("\n".join(variants))
        return 0
    if not variants:
        sys.exit(f"no variant matches {options.only!r}")
    if compiled.find_nvcc() is None:
        sys.exit("nvcc was not found; install the CUDA toolkit, or pip install 'flash-qla[nvcc]'")
    reports, lines = [], []
    with compiled.Compiling(list(variants), options.jobs) as compiling:
        for report in compiling.reports():
            problems = report.problems(variants[report.name].arch.smem_bytes, variants[report.name].known_spill_bytes)
            reports.append(report)
            lines.append(cells(report, problems))
            print(f"[{len(lines)}/{len(variants)}] {report.name}: {lines[-1][-1]}", file=sys.stderr, flush=True)
    print_table(lines)
    if options.json:
        compiled.write_json(options.json, reports)
    bad = sum(not line[-1].startswith("ok") for line in lines)
    print(f"{len(lines)} variants, {bad} with problems")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

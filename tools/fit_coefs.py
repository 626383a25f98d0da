"""Fits the planner's coefficients to what `tools/measure_kernels.py` measured.

    python tools/fit_coefs.py profile/kernels_sm90.csv [...] [--out coefs/sm90.csv] [--plot FILE.png] [--dry-run]

For each kernel a, b, c >= 0 with time_ms = a depth + b ctas + c, by least squares of the relative error. Prints the
residuals per kernel, writes `coefs/<arch>.csv` with the run's description and the residuals in comment lines on top,
and plots predicted against measured times. Kernels that the measurement lacks keep the row that the file has.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flash_qla.ops.gated_delta_rule.chunk.cp import coefs  # noqa: E402

# Fewer launches than this do not determine three numbers.
MIN_LAUNCHES = 4
LARGE_RESIDUAL = 0.15


@dataclass(frozen=True)
class Fit:
    """One kernel's coefficients and how well they predict.

    Attributes:
        kernel: its name.
        a_ms, b_ms, c_ms: the coefficients.
        measured, predicted: milliseconds of each launch.
    """

    kernel: str
    a_ms: float
    b_ms: float
    c_ms: float
    measured: np.ndarray
    predicted: np.ndarray

    @property
    def errors(self) -> np.ndarray:
        """Relative, (predicted - measured) / measured."""
        return self.predicted / self.measured - 1


def solve_non_negative(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with coefficients >= 0: the best of all subsets of columns whose solution is not negative."""
    columns = features.shape[1]
    best, best_residual = np.zeros(columns), float(target @ target)
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            found, *_ = np.linalg.lstsq(features[:, chosen], target, rcond=None)
            residual = float(((features[:, chosen] @ found - target) ** 2).sum())
            if (found >= 0).all() and residual < best_residual - 1e-12:
                best, best_residual = np.zeros(columns), residual
                best[list(chosen)] = found
    return best


def fit(kernel: str, depth, ctas, ms) -> Fit:
    """Fits one kernel. Raises ValueError when there are too few launches."""
    if len(ms) < MIN_LAUNCHES:
        raise ValueError(f"{kernel}: {len(ms)} launches; at least {MIN_LAUNCHES} are needed")
    features = np.stack([depth, ctas, np.ones(len(ms))], axis=1)
    # Dividing by the time makes a percent of a short launch weigh as much as a percent of a long one.
    found = solve_non_negative(features / ms[:, None], np.ones(len(ms)))
    return Fit(kernel, *map(float, found), ms, features @ found)


def read(paths) -> tuple[dict[str, str], list[dict]]:
    """Returns the first file's description and the launches of all. Raises ValueError for files of different archs."""
    meta, rows = {}, []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line[2:].split(": ", 1) for line in lines if line.startswith("# ")]
        found = {pair[0]: pair[1] for pair in comments if len(pair) == 2}
        meta = meta or found
        if any(meta.get(name) != found.get(name) for name in ("arch", "P", "chunk")):
            raise ValueError(f"{path} is of another card than {paths[0]}")
        rows += csv.DictReader(line for line in lines if not line.startswith("#"))
    return meta, rows


def fit_all(rows) -> list[Fit]:
    """Fits every kernel that was measured; a launch with nothing to walk would only measure what a launch costs."""
    rows, fits = [row for row in rows if float(row["depth"]) > 0], []
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        depth, ctas, ms = (
            np.array([float(row[name]) for row in rows if row["kernel"] == kernel]) for name in ("depth", "ctas", "ms")
        )
        fits.append(fit(kernel, depth, ctas, ms))
    return fits


def residuals(fits) -> list[str]:
    """A line per kernel."""
    lines = [f"{'kernel':<26}{'launches':>9}{'a us':>9}{'b ns':>8}{'c us':>8}{'median':>8}{'90 %':>8}{'worst':>8}"]
    for each in fits:
        errors = np.abs(each.errors)
        numbers = f"{len(errors):>9}{1e3 * each.a_ms:>9.3f}{1e6 * each.b_ms:>8.2f}{1e3 * each.c_ms:>8.2f}"
        shares = "".join(f"{x:>8.1%}" for x in (np.median(errors), np.quantile(errors, 0.9), errors.max()))
        lines.append(f"{each.kernel:<26}{numbers}{shares}")
    return lines


def write(path: Path, meta: dict, fits) -> None:
    """Writes the planner's CSV."""
    rows = {each.kernel: (each.a_ms, each.b_ms, each.c_ms) for each in fits}
    kept = {}
    if path.is_file():
        kept = {kernel: values for kernel, values in coefs.read(path).kernels.items() if kernel not in rows}
    comments = [f"{name}: {value}" for name, value in meta.items()]
    comments += ["relative errors of the fit:", *(f"  {line}" for line in residuals(fits))]
    comments += [f"not measured in this run, kept: {', '.join(kept)}"] if kept else []
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {line}\n" for line in comments)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(coefs.COLUMNS)
        for kernel, values in {**rows, **kept}.items():
            writer.writerow([kernel, *(f"{x:.6g}" for x in values), meta["P"], meta["chunk"], meta["arch"]])


def plot(path: Path, fits, title: str) -> None:
    """Predicted against measured, both logarithmic, one colour a kernel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 6))
    for each, marker in zip(fits, itertools.cycle("os^vDP*X")):
        label = f"{each.kernel} ({np.median(np.abs(each.errors)):.1%})"
        axes.plot(1e3 * each.measured, 1e3 * each.predicted, marker, markersize=4, alpha=0.7, label=label)
    ends = [1e3 * min(f.measured.min() for f in fits), 1e3 * max(f.measured.max() for f in fits)]
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, µs", ylabel="predicted, µs", title=title)
    axes.legend(title="kernel (median error)", fontsize=8)
    axes.grid(True, which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", nargs="+", type=Path, help="CSV files of tools/measure_kernels.py, one card")
    parser.add_argument("--out", type=Path, help="default: coefs/<arch>.csv")
    parser.add_argument("--plot", type=Path, help="default: benchmark/results/coefs_<arch>.png")
    parser.add_argument("--dry-run", action="store_true", help="print the residuals, write nothing")
    options = parser.parse_args(argv)
    try:
        meta, rows = read(options.measured)
        fits = fit_all(rows)
    except ValueError as error:
        sys.exit(str(error))
    print("\n".join(residuals(fits)))
    for each in fits:
        if np.median(np.abs(each.errors)) > LARGE_RESIDUAL:
            print(f"{each.kernel}: the cost model does not describe this kernel", file=sys.stderr)
    if options.dry_run:
        return 0
    name = meta["arch"]
    out = options.out or ROOT / f"coefs/{name}.csv"
    write(out, meta, fits)
    coefs.read(out)
    print(out)
    picture = options.plot or ROOT / f"benchmark/results/coefs_{name}.png"
    plot(picture, fits, f"Planner's cost model, {meta.get('gpu', name)}")
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

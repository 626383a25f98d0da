"""Draws the page's picture: the multiprocessors' time with and without a split, from the planner's own schedule.

python tools/draw_split.py [--tokens 32768] [--heads 8] [--out flash_qla/ops/gated_delta_rule/chunk/cp/split.png]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flash_qla import arch  # noqa: E402
from flash_qla.ops.gated_delta_rule.chunk.cp import coefs, planner  # noqa: E402

OUT = ROOT / "flash_qla/ops/gated_delta_rule/chunk/cp/split.png"
COLOURS = {"solve": "#9aa5b1", "segment_ends": "#e8a33d", "segment_scan": "#c0504d", "fused_fwd": "#3d7ea6"}
ORDER = ("solve", "segment_ends", "segment_scan", "fused_fwd")


def bars(plan: planner.Plan, launches, table, num_sms: int) -> list[tuple[str, float, float, list[float]]]:
    """(kernel, start, end, how long each multiprocessor is busy, longest first), milliseconds, in launch order."""
    start, found = 0.0, []
    times, by_kind = dict(plan.predicted_ms), {name.split("_w")[0]: each for name, each in launches.items()}
    for kind in ORDER:
        if kind not in by_kind:
            continue
        launch = by_kind[kind]
        ms = times[launch.kernel]
        loads = [0.0] * num_sms
        for chunks, count in launch.runs:
            for _ in range(count if chunks else 0):
                least = min(range(num_sms), key=loads.__getitem__)
                loads[least] += chunks
        longest = max(loads)
        found.append((kind, start, start + ms, sorted((ms * load / longest for load in loads), reverse=True)))
        start += ms
    return found


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=8, help="value heads")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    table = coefs.load(arch.SM90)
    num_sms, key = table.num_sms, (1, options.tokens)
    warmups = planner.head_warmups(options.heads, -12.0, None)
    shape = planner.Shape.of(planner.key_runs(key), options.heads, (128, 128), num_sms, warmups)
    plans = [
        planner.plan_lengths("fwd", key, options.heads, (128, 128), arch.SM90, num_sms, -12.0, request)
        for request in (planner.NO_SPLIT, planner.AUTO)
    ]
    figure, panels = plt.subplots(2, 1, figsize=(9, 5), sharex=True, sharey=True)
    for axes, plan in zip(panels, plans):
        each = [planner.common_launch("fwd", shape), *planner.forward_launches(shape, plan.segment_chunks)]
        for kind, start, _, busy in bars(plan, {x.kernel: x for x in each}, table, num_sms):
            axes.barh(range(num_sms), busy, left=start, height=1.0, color=COLOURS[kind])
        split = f"{plan.num_segments} segments of {plan.segment_chunks} chunks" if plan.segment_chunks else "not split"
        axes.set_title(f"{split}: {plan.total_ms:.3f} ms", loc="left", fontsize=10)
        axes.set_ylabel("multiprocessor")
        axes.set_ylim(num_sms, 0)
    panels[1].set_xlabel(f"predicted ms: one sequence of {options.tokens} tokens, {options.heads} value heads")
    panels[0].legend(handles=[Patch(color=COLOURS[kind], label=kind) for kind in ORDER], fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

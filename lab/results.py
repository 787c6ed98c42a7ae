"""The figure of docs/results.md: `python -m lab.results RUN ...` keeps what these runs measured, and draws all that are
kept."""

from __future__ import annotations

import json
import sys
from operator import itemgetter
from pathlib import Path

from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.report.summary import evaluated_at
from lab.studies.harness.figures import curve, figure, legend, to_svg

KEPT = Path("docs/results")
"""A file a run, a line a step; and the figure."""
METRICS = (
    "rollout/reward_mean",
    "eval/accuracy",
    "eval/at_step",
    "mismatch/tokens",
    "mismatch/exact_frac",
    "perf/step_seconds",
)
DRAWN = {"rollout/reward_mean": "mean reward of a step's answers", "eval/accuracy": "held-out accuracy"}
CAPTION = "Sums with SmolLM2-135M-Instruct, exact FP8 (bf16: exact BF16); docs/results.md. Accuracy: on 43 problems."


def keep(run: Path) -> None:
    """Write the metrics that the page is about into KEPT, under the run's name."""
    kept = ("step", *METRICS)
    rows = [{name: row[name] for name in kept if name in row} for row in read_metrics(run / "metrics.jsonl")]
    (KEPT / f"{run.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw() -> str:
    """Return the SVG of all runs that are kept."""
    drawn = figure("What was learnt", columns=2, width=9.0)
    runs = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(KEPT.glob("*.jsonl"))
    }
    for axes, (metric, label) in zip(drawn.axes, DRAWN.items(), strict=True):
        for index, (name, rows) in enumerate(runs.items()):
            when = evaluated_at if metric == "eval/accuracy" else itemgetter("step")
            points = [(when(row), row[metric]) for row in rows if metric in row]
            values = [(value, value, value) for _, value in points]
            curve(axes, [step for step, _ in points], values, name=name, index=index, band=False, marker="o")
        axes.set_ylabel(label)
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
    legend(drawn.axes[1], columns=2)
    return to_svg(drawn, CAPTION)


def main() -> None:
    KEPT.mkdir(exist_ok=True)
    for run in sys.argv[1:]:
        keep(Path(run))
    (KEPT / "curves.svg").write_text(draw())


if __name__ == "__main__":
    main()

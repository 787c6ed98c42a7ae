"""The figures of docs/results.md. `python -m lab.results RUN ...` keeps what these runs measured, and draws all runs
that are kept. `--benefit FOLDER` keeps the gradients of the study `benefit` too, whose runs lie there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.report.summary import evaluated_at
from lab.studies import benefit, drift
from lab.studies.harness.figures import curve, figure, legend, shared_legend, to_svg

KEPT, FIGURES = Path("lab/docs/results"), Path("docs/images")
"""A file a run, a line a step, and the gradients; what is drawn of them."""
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

GRADIENTS = KEPT / "gradients.json"
"""For each arm, the norm of each step's gradient in the runs of all seeds."""
COMPARED = ("BF16 trainer", "BF16 trainer, TIS", "exact FP8")
OUTLIERS = (
    "The study benefit (docs/results.md): a model of 1.0M parameters, GRPO with four updates a batch, an FP8 rollout. "
    "Both sides of exact FP8 agree on every token. For each step, the largest norm of the five seeds, before clipping."
)

DRIFTING = (
    "GRPO: exact",
    "GRPO: head offset",
    "REINFORCE: exact",
    "REINFORCE: head offset",
    "REINFORCE below zero: exact",
    "REINFORCE below zero: head offset",
    "REINFORCE below zero: head offset, TIS",
    "REINFORCE below zero: head offset, centering",
)
DRIFT = (
    "The study drift (docs/results.md): a model of 1.0M parameters, 64 answers a step at temperature 2, means of 20 "
    "steps and of five seeds. The engine's logits have a fixed offset; the trainer is exact."
)


def keep(run: Path) -> None:
    """Write the metrics that the page is about into KEPT, under the run's name."""
    kept = ("step", *METRICS)
    rows = [{name: row[name] for name in kept if name in row} for row in read_metrics(run / "metrics.jsonl")]
    (KEPT / f"{run.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def keep_gradients(folder: Path) -> None:
    """Write the norms of the gradients of the study's runs in `folder`, of the arms that are compared."""
    norms: dict[str, list[list[float]]] = {arm: [] for arm in COMPARED}
    for job in benefit.jobs(range(benefit.SEEDS), folder):
        updates, _, arm = job.arm.partition(": ")
        if updates == "four updates" and arm in norms:
            norms[arm].append([round(row["train/grad_norm"], 3) for row in job.rows() if "train/grad_norm" in row])
    GRADIENTS.write_text(json.dumps(norms) + "\n")


def draw_runs() -> str:
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


def draw_gradients(norms: Mapping[str, list[list[float]]]) -> str:
    """Return the SVG of the largest gradient of each step over the seeds."""
    drawn = figure("Gradients of a trainer that disagrees with its engine, and of one that agrees", width=9.0)
    axes = drawn.axes[0]
    for index, (arm, runs) in enumerate(norms.items()):
        largest = [max(step) for step in zip(*runs, strict=True)]
        points = [(norm, norm, norm) for norm in largest]
        curve(axes, range(1, len(largest) + 1), points, name=arm, index=index, band=False)
    axes.set(xlabel="step", ylabel="norm of the gradient", yscale="log", xlim=(0, benefit.STEPS))
    legend(axes)
    return to_svg(drawn, OUTLIERS)


def draw_drift(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the SVG of reward, entropy and bias in runs of the study `drift`: the means over the seeds there are."""
    drawn = figure("A bias of the engine, under advantages that do or do not average to zero", columns=3, width=11.0)
    for axes, metric in zip(drawn.axes, ("reward", "entropy", "bias"), strict=True):
        for index, arm in enumerate(arm for arm in DRIFTING if any(line["arm"] == arm for line in lines)):
            curves = [
                {name: value for name, value in line["outcome"].items() if name.startswith(f"{metric}/")}
                for line in lines
                if line["arm"] == arm
            ]
            points = [fmean(values) for values in zip(*(found.values() for found in curves), strict=True)]
            steps = [int(name.partition("/")[2]) for name in curves[0]]
            curve(axes, steps, [(value, value, value) for value in points], name=arm, index=index, band=False)
        unit = drift.STUDY.units.get(metric)
        axes.set(xlabel="step", ylabel=f"{metric} ({unit})" if unit else metric, xlim=(0, drift.STEPS))
    shared_legend(drawn)
    return to_svg(drawn, DRIFT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="Folders of runs.")
    parser.add_argument("--benefit", type=Path, metavar="FOLDER", help="Where the runs of the study `benefit` lie.")
    options = parser.parse_args()
    KEPT.mkdir(exist_ok=True)
    for run in options.runs:
        keep(run)
    if options.benefit:
        keep_gradients(options.benefit)
    (FIGURES / "curves.svg").write_text(draw_runs())
    kept = [json.loads(line) for line in drift.KEPT.read_text().splitlines()]
    (FIGURES / "drift.svg").write_text(draw_drift(kept))
    (FIGURES / "gradients.svg").write_text(draw_gradients(json.loads(GRADIENTS.read_text())))


if __name__ == "__main__":
    main()

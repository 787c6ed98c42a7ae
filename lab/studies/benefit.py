"""What does exactness buy? Whole runs of GRPO whose two sides agree bit for bit, or do not.

A run is `fp8rl train` of the demo's model, M, in a folder of its own; on SmolLM2-135M each seed would take days. The 80
runs are made in parts: `python -m lab.studies.benefit --hours 2` begins or resumes runs for two hours and lets the last
ones end. What a run came to is kept as a line of `lab/docs/studies/benefit.jsonl`, so the next part may be made on
another machine. `fp8rl study benefit` judges the finished runs, once none is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from fp8rl.rl.record.metrics_log import Row
from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.kept_runs import Job, Settings, by_arm, collapsed, draw_curve, go_on, mean_tables
from lab.studies.harness.lab import Lab
from lab.studies.harness.study import Measurement, Study, TextTable

RUNS = Path("runs/benefit")
KEPT = Path("lab/docs/studies/benefit.jsonl")
STEPS, QUICK_STEPS = 300, 2
SEEDS = 5

NATIVE: Settings = {"numerics.mode": "native", "gates": "[]"}
MIXED: Settings = {**NATIVE, "numerics.trainer": "bf16"}
BF16: Settings = {"numerics.trainer": "bf16", "numerics.rollout": "bf16"}
ARMS: dict[str, Settings] = {
    "exact FP8": {},
    "native FP8": NATIVE,
    "BF16 trainer": {**MIXED, "algorithm.tis_cap": "null"},
    "BF16 trainer, TIS": MIXED,
    "BF16 trainer, TIS and replay": {**MIXED, "numerics.router_replay": "replay"},
    "exact BF16": BF16,
    "native BF16": {**NATIVE, **BF16},
}
"""The demo truncates weights of importance at 2 (TIS); in exact mode these are 1."""
CONTROLS: dict[str, Settings] = {"exact FP8, again": {}, "exact FP8, slow": {"trainer.lr": 1e-6}}
UPDATES: dict[str, Settings] = {"one update": {}, "four updates": {"algorithm.updates_per_batch": 4}}
"""Optimizer steps of a batch."""
QUICK_ARMS = ("exact FP8", "exact FP8, again", "native FP8")


def arms() -> Iterator[tuple[str, Settings]]:
    """All arms with their settings; controls have one update a batch."""
    for updates, own in UPDATES.items():
        for arm, settings in ARMS.items() if own else {**ARMS, **CONTROLS}.items():
            yield f"{updates}: {arm}", {**settings, **own}


def jobs(seeds: Sequence[int], folder: Path = RUNS, kept: Path = KEPT, steps: int = STEPS) -> list[Job]:
    """Every run; a seed's runs of all arms come before the next seed's."""
    return [Job(arm, seed, steps, folder, kept, outcome, own) for seed in seeds for arm, own in arms()]


def measure(lab: Lab) -> Measurement:
    """Read the runs that are finished. A quick run makes short ones of some arms."""
    lab.specs["FP8"] = live.exact().spec.digest()
    known = jobs(lab.seeds)
    if lab.quick:
        chosen = [f"one update: {arm}" for arm in QUICK_ARMS]
        quick = jobs(lab.seeds, lab.scratch, lab.scratch / "runs.jsonl", QUICK_STEPS)
        known = [job for job in quick if job.arm in chosen]
        lab.each(Job.make, [(job, time.time() + 3600) for job in known], "runs")
    values, missing = by_arm(known)
    steps = QUICK_STEPS if lab.quick else STEPS
    subject = f"M, 1.0M parameters, {steps} GRPO steps, answers of up to 20 tokens, no KL"
    return Measurement(values=values, subject=subject, missing=missing)


def outcome(rows: Sequence[Row]) -> dict[str, float]:
    """Numbers of a run: its last accuracy, the mean of all, whether it collapsed; means over steps of the rest."""
    evaluated = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    accuracy = list(evaluated.values())
    learned = [row for row in rows if row["step"] > 0]

    def mean(metric: str) -> float:
        return fmean(row[metric] for row in learned if metric in row)

    return {
        "accuracy": accuracy[-1],
        "area": fmean(accuracy),
        "collapsed": float(collapsed(accuracy)),
        "grad_norm": mean("train/grad_norm"),
        "entropy": mean("train/entropy"),
        "abs_d": mean("mismatch/train_rollout_logprob_abs_diff_mean"),
        **{f"accuracy/{step}": value for step, value in evaluated.items()},
    }


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    drawn = figures.figure("Held-out accuracy", columns=len(UPDATES), width=9.0)
    for axes, updates in zip(drawn.axes, UPDATES, strict=True):
        for index, arm in enumerate(arm for arm in ARMS if f"{updates}: {arm}" in measurement.values):
            draw_curve(axes, measurement, f"{updates}: {arm}", "accuracy", name=arm, index=index)
        axes.set(xlabel=f"step, {updates} a batch", ylabel="accuracy")
    if measurement.values:
        figures.legend(drawn.axes[0], columns=3)
    return {"accuracy": drawn}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    return mean_tables(measurement, ("accuracy", "area", "collapsed", "grad_norm", "entropy", "abs_d"))


STUDY = Study(
    name="benefit",
    question="What does exactness buy: accuracy, stability, or nothing?",
    seeds=SEEDS,
    claims=claims_of("benefit"),
    measure=measure,
    draw=draw,
    tables=tables,
    units={"abs_d": "nats", "entropy": "nats"},
)


if __name__ == "__main__":
    go_on("benefit", jobs(range(SEEDS)))

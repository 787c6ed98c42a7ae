"""What does exactness buy? Whole runs of GRPO whose two sides agree bit for bit, or do not.

A run is `fp8rl train` of the demo's model, M, in a folder of its own; on SmolLM2-135M each seed would take days. The 80
runs are made in parts: `python -m lab.studies.benefit --hours 2` begins or resumes runs for two hours and lets the last
ones end. What a run came to is kept as a line of `lab/docs/studies/benefit.jsonl`, so the next part may be made on
another machine. `fp8rl study benefit` judges the finished runs, once none is missing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fp8rl.numerics.core.files import append_line
from fp8rl.rl.record.metrics_log import Row, read_metrics
from lab.studies.harness import figures, live
from lab.studies.harness.claims import claims_of
from lab.studies.harness.lab import Lab, trained
from lab.studies.harness.study import Measurement, Study, TextTable, with_interval

RUNS = Path("runs/benefit")
KEPT = Path("lab/docs/studies/benefit.jsonl")
STEPS, QUICK_STEPS = 300, 2
EVALUATED_EVERY = 20
SEEDS = 5
COLLAPSE = 0.5
"""A run has collapsed if its held-out accuracy falls to this share of its best."""

Settings = Mapping[str, object]
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


@dataclass(frozen=True)
class Job:
    """A run: an arm with one seed."""

    arm: str
    """`UPDATES: ARM`."""
    seed: int
    steps: int
    folder: Path
    """Its own folder lies here."""
    kept: Path
    """The file that has a line for each finished run."""

    @property
    def name(self) -> str:
        return f"{self.arm}_{self.seed}".replace(": ", "_").replace(", ", "_").replace(" ", "_")

    def rows(self) -> list[Row]:
        """The metrics of its steps so far."""
        return read_metrics(self.folder / self.name / "metrics.jsonl")

    def outcome(self) -> dict[str, float] | None:
        """What the run came to, as it is kept; None if it is not finished."""
        lines = self.kept.read_text().splitlines() if self.kept.is_file() else []
        kept = {(line["arm"], line["seed"]): line["outcome"] for line in map(json.loads, lines)}
        return kept.get((self.arm, self.seed))

    def keep(self) -> None:
        """Add what the run came to as a line."""
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        append_line(self.kept, json.dumps({"arm": self.arm, "seed": self.seed, "outcome": outcome(self.rows())}))


def arms() -> Iterator[tuple[str, Settings]]:
    """All arms with their settings; controls have one update a batch."""
    for updates, own in UPDATES.items():
        for arm, settings in ARMS.items() if own else {**ARMS, **CONTROLS}.items():
            yield f"{updates}: {arm}", {**settings, **own}


def jobs(seeds: Sequence[int], folder: Path = RUNS, kept: Path = KEPT, steps: int = STEPS) -> list[Job]:
    """Every run; a seed's runs of all arms come before the next seed's."""
    return [Job(arm, seed, steps, folder, kept) for seed in seeds for arm, _ in arms()]


def make(job: Job, until: float) -> None:
    """Begin a run, or resume it, unless it is finished or the time, in seconds as `time.time` counts, is over."""
    if job.outcome() is not None or time.time() > until:
        return
    settings = {
        **dict(arms())[job.arm],
        "run.seed": job.seed,
        "run.steps": job.steps,
        "checkpoint.every": min(job.steps, EVALUATED_EVERY),
        "eval.every": min(job.steps, EVALUATED_EVERY),
    }
    resume = (job.folder / job.name).exists()
    trained(live.EXAMPLES / "arithmetic.yaml", job.folder, job.name, settings, resume=resume)
    job.keep()


def measure(lab: Lab) -> Measurement:
    """Read the runs that are finished. A quick run makes short ones of some arms."""
    lab.specs["FP8"] = live.exact().spec.digest()
    known = jobs(lab.seeds)
    if lab.quick:
        chosen = [f"one update: {arm}" for arm in QUICK_ARMS]
        quick = jobs(lab.seeds, lab.scratch, lab.scratch / "runs.jsonl", QUICK_STEPS)
        known = [job for job in quick if job.arm in chosen]
        lab.each(make, [(job, time.time() + 3600) for job in known], "runs")
    by_arm: dict[str, dict[int, dict[str, float] | None]] = {}
    for job in known:
        by_arm.setdefault(job.arm, {})[job.seed] = job.outcome()
    values, missing = {}, []
    for arm, mine in by_arm.items():
        found = [one for one in mine.values() if one is not None]
        if len(found) < len(mine):
            missing.append(f"{arm}, seeds {', '.join(str(seed) for seed, one in mine.items() if one is None)}")
            continue
        values[arm] = {metric: [one[metric] for one in found] for metric in found[0]}
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


def collapsed(accuracy: Sequence[float]) -> bool:
    """Whether any accuracy is at most half of the best one before it."""
    return any(later <= COLLAPSE * max(accuracy[:at]) for at, later in enumerate(accuracy) if at and max(accuracy[:at]))


def draw(measurement: Measurement) -> Mapping[str, figures.Figure]:
    drawn = figures.figure("Held-out accuracy", columns=len(UPDATES), width=9.0)
    for axes, updates in zip(drawn.axes, UPDATES, strict=True):
        for index, arm in enumerate(arm for arm in ARMS if f"{updates}: {arm}" in measurement.values):
            found = measurement.values[f"{updates}: {arm}"]
            steps = [int(name.partition("/")[2]) for name in found if name.startswith("accuracy/")]
            points = [measurement.of(f"{updates}: {arm}", f"accuracy/{step}") for step in steps]
            figures.curve(axes, steps, points, name=arm, index=index)
        axes.set(xlabel=f"step, {updates} a batch", ylabel="accuracy")
    if measurement.values:
        figures.legend(drawn.axes[0], columns=3)
    return {"accuracy": drawn}


def tables(measurement: Measurement) -> Sequence[TextTable]:
    metrics = ("accuracy", "area", "collapsed", "grad_norm", "entropy", "abs_d")
    rows = [[arm, *(_with_interval(measurement, arm, name) for name in metrics)] for arm in measurement.values]
    missing = [TextTable("Missing runs", ("arm and seeds",), [[one] for one in measurement.missing])]
    means = TextTable("Means over the seeds", ("arm", *metrics), rows)
    return [means, *(missing if measurement.missing else [])]


def _with_interval(measurement: Measurement, arm: str, metric: str) -> str:
    return with_interval(measurement.of(arm, metric), ".3g")


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Make or resume runs of the study `benefit`.")
    parser.add_argument("--hours", type=float, required=True, help="No run begins after this time.")
    hours = parser.parse_args().hours
    todo = [job for job in jobs(range(SEEDS)) if job.outcome() is None]
    until = time.time() + 3600 * hours
    print(f"{len(todo)} runs are to be made or resumed in {RUNS}", flush=True)
    Lab(False, (), RUNS, lambda _: None).each(_make_aloud, [(job, until) for job in todo], "runs")


def _make_aloud(job: Job, until: float) -> None:
    make(job, until)
    if job.outcome() is not None:
        print(f"{job.arm}, seed {job.seed}: finished", flush=True)


if __name__ == "__main__":
    main()

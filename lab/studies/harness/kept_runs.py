"""Runs of `fp8rl train` that a study makes in parts, over days and machines: what a run came to is kept as a line."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from fp8rl.numerics.core.files import append_line
from fp8rl.rl.record.metrics_log import Row, read_metrics
from lab.studies.harness import figures, live
from lab.studies.harness.biased import Bias, environment
from lab.studies.harness.lab import AT_ONCE, Lab, trained
from lab.studies.harness.study import Measurement, TextTable, with_interval

Settings = Mapping[str, object]
Summary = Callable[[Sequence[Row]], dict[str, float]]
"""What a run came to, of its metrics."""
EVALUATED_EVERY = 20
COLLAPSE = 0.5
"""A run has collapsed if its accuracy, or its reward, falls to this share of the best one before."""
WITHOUT_AVX512 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""With these variables an AMD EPYC with AVX-512 has computed the bits of one without, so that runs of one seed differ
by nothing but their arms."""


@dataclass(frozen=True)
class Job:
    """A run: an arm with one seed."""

    arm: str
    """`GROUP: ARM`."""
    seed: int
    steps: int
    folder: Path
    """Its own folder lies here."""
    kept: Path
    """The file that has a line for each finished run."""
    summary: Summary
    settings: Settings = field(default_factory=dict)
    bias: Bias | None = None
    """Of its engine."""
    prepare: Callable[[], object] | None = None
    """Makes the model that its settings name, if this machine has not made it."""

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

    def make(self, until: float) -> None:
        """Begin the run, or resume it, unless it is finished or the time, in seconds as `time.time` counts, is over."""
        if self.outcome() is not None or time.time() > until:
            return
        if self.prepare is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / "prepare.lock"):  # other runs may need the same model
                self.prepare()
        self.train()
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        outcome = self.summary(self.rows())
        append_line(self.kept, json.dumps({"arm": self.arm, "seed": self.seed, "outcome": outcome}))

    def train(self) -> None:
        """Train until its last step, from the last checkpoint if there is one."""
        often = min(self.steps, EVALUATED_EVERY)
        settings = {"checkpoint.every": often, "eval.every": often, **self.settings}
        settings |= {"run.seed": self.seed, "run.steps": self.steps}
        resume = any((self.folder / self.name / "checkpoints").glob("*"))
        spec = live.EXAMPLES / "arithmetic.yaml"
        trained(spec, self.folder, self.name, settings, resume=resume, environment=environment(self.bias))


def by_arm(jobs: Sequence[Job]) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """The outcomes of arms of which no seed is missing, by arm and metric; and the seeds that others lack."""
    arms: dict[str, dict[int, dict[str, float] | None]] = {}
    for job in jobs:
        arms.setdefault(job.arm, {})[job.seed] = job.outcome()
    values, missing = {}, []
    for arm, mine in arms.items():
        found = [one for one in mine.values() if one is not None]
        if len(found) < len(mine):
            missing.append(f"{arm}, seeds {', '.join(str(seed) for seed, one in mine.items() if one is None)}")
            continue
        values[arm] = {metric: [one[metric] for one in found] for metric in found[0]}
    return values, missing


def collapsed(values: Sequence[float]) -> bool:
    """Whether any value is at most half of the best one before it."""
    return any(later <= COLLAPSE * max(values[:at]) for at, later in enumerate(values) if at and max(values[:at]))


def draw_curve(axes: Any, measurement: Measurement, arm: str, metric: str, **look: Any) -> None:
    """Draw the means of `METRIC/STEP` over the steps, with their intervals. look: more arguments of `figures.curve`."""
    steps = [int(name.partition("/")[2]) for name in measurement.values[arm] if name.startswith(f"{metric}/")]
    figures.curve(axes, steps, [measurement.of(arm, f"{metric}/{step}") for step in steps], **look)


def mean_tables(measurement: Measurement, metrics: Sequence[str]) -> Sequence[TextTable]:
    """Each arm's means over the seeds and, if there are some, the runs that are missing."""
    rows = [[arm, *(with_interval(measurement.of(arm, name), ".3g") for name in metrics)] for arm in measurement.values]
    missing = [TextTable("Missing runs", ("arm and seeds",), [[one] for one in measurement.missing])]
    return [TextTable("Means over the seeds", ("arm", *metrics), rows), *(missing if measurement.missing else [])]


def go_on(study: str, jobs: Sequence[Job]) -> None:
    """The command line of a study's file: make or resume its runs for some hours."""
    parser = argparse.ArgumentParser(description=f"Make or resume runs of the study `{study}`.")
    parser.add_argument("--hours", type=float, required=True, help="No run begins after this time.")
    parser.add_argument("--arms", default="", metavar="TEXT", help="Only arms that have this in their names.")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="How many runs go on beside each other.")
    asked = parser.parse_args()
    os.environ.update(WITHOUT_AVX512)
    todo = [job for job in jobs if asked.arms in job.arm and job.outcome() is None]
    until = time.time() + 3600 * asked.hours
    print(f"{len(todo)} runs of {study} are to be made or resumed", flush=True)
    Lab(False, (), Path(), lambda _: None).each(_aloud, [(job, until) for job in todo], "runs", asked.at_once)


def _aloud(job: Job, until: float) -> None:
    job.make(until)
    if job.outcome() is not None:
        print(f"{job.arm}, seed {job.seed}: finished", flush=True)

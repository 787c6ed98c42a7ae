"""Every algorithm that learns from rewards on the arithmetic example: what it reaches, and whether both sides agree."""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.record.metrics_log import Row
from lab.bench.agreement import run_example
from lab.bench.measure import Result

SEEDS = (0, 1, 2)
LEARNT = 0.8
AT_ONCE = 2


def run() -> Iterator[Result]:
    specs = sorted(examples())
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as threads:
        rows = threads.map(partial(_trained, Path(name)), itertools.product(specs, SEEDS))
        for spec in specs:
            yield from results(spec, list(itertools.islice(rows, len(SEEDS))))


def examples() -> Iterator[Path]:
    """The arithmetic example, and those that differ from it in their algorithm alone."""
    base = load_experiment(Path("examples/arithmetic.yaml"))
    for spec in Path("examples").glob("arithmetic*.yaml"):
        other = load_experiment(spec)
        if other.model_copy(update={"algorithm": base.algorithm, "run": base.run}) == base:
            yield spec


def results(spec: Path, runs: list[list[Row]]) -> list[Result]:
    """Held-out accuracy over the seeds, and the steps in which every fresh token agreed."""
    ends = [rows[-1]["eval/accuracy"] for rows in runs]
    steps = [row for rows in runs for row in rows[1:]]
    exact = sum(row["mismatch/exact_frac"] == 1.0 for row in steps)
    return [
        Result(
            name=f"held-out accuracy, least of seeds {SEEDS[0]}-{SEEDS[-1]}: {spec.stem}",
            value=min(ends),
            bar=LEARNT,
            at_least=True,
            parts={"before": runs[0][0]["eval/accuracy"], "mean": statistics.mean(ends), "most": max(ends)},
        ),
        Result(
            name=f"steps with d == 0: {spec.stem}",
            value=exact / len(steps),
            bar=1.0,
            at_least=True,
            parts={"tokens": sum(row["mismatch/tokens"] for row in steps)},
        ),
    ]


def _trained(folder: Path, job: tuple[Path, int]) -> list[Row]:
    spec, seed = job
    rows = run_example(spec, folder, f"{spec.stem}-{seed}", **{"run.seed": seed})
    print(f"{spec.stem}, seed {seed}: {rows[-1]['eval/accuracy']:.3f}", file=sys.stderr)
    return rows

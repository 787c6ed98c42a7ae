"""Sampling ahead of training: what it gains, whether it still agrees, and whether the engines' number shows.

Steps per hour are those of one trainer and one engine, which take turns in blocks: synchronous, one step off (drained
before each update), and with updates in flight. The other lines are whole runs of a model of four layers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.record.metrics_log import Row, StepClock
from fp8rl.rl.run.feed.feed import SampledFeed
from fp8rl.rl.run.interrupts import Closing
from fp8rl.rl.run.stack import Stack
from fp8rl.rl.run.step import plan_updates
from lab.bench.agreement import MODEL, SETTINGS, deepen, exact_steps, trained
from lab.bench.measure import Result

ROUNDS, BLOCK = 5, 6
MODES = {
    "synchronous": {"staleness": 0},
    "one step off": {"staleness": 1},
    "in flight, S = 1": {"staleness": 1, "in_flight": True},
    "in flight, S = 3": {"staleness": 3},
}
ACCURACY_WITHIN = 0.03


def run() -> Iterator[Result]:
    yield from steps_per_hour()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "four_layers"
        deepen(MODEL, model)
        settings = {**SETTINGS, "model.path": model, "eval.problems": 256}
        runs = {
            mode: trained(folder, f"run-{index}", **settings, **{f"rollout.{k}": v for k, v in values.items()})
            for index, (mode, values) in enumerate(MODES.items())
        }
        for mode, rows in runs.items():
            yield exact_steps(mode, rows)
            yield accuracy(mode, rows, runs["synchronous"])
        others = {
            "2 engines": {"rollout.engines": 2},
            "3 engines, chunks of 33, no prefix cache": {
                "rollout.engines": 3,
                "rollout.chunked_prefill_size": 33,
                "rollout.prefix_cache": "false",
            },
        }
        for index, (what, changes) in enumerate(others.items()):
            rows = trained(folder, f"other-{index}", **{**settings, **changes})
            yield same_rows(what, rows, runs["synchronous"])


def steps_per_hour() -> list[Result]:
    """Steps per hour of each mode over those of the synchronous one, in blocks that take turns."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with demo_stack() as stack:
        for index in range(1 + ROUNDS):
            for mode, values in MODES.items():
                settings = [f"rollout.{key}={str(value).lower()}" for key, value in values.items()]
                taken = block(stack, settings)
                if index:
                    seconds[mode].append(taken)
    base = seconds["synchronous"]
    return [
        Result(
            name=f"steps per hour, {mode} / synchronous (demo)",
            value=statistics.median(one / other for one, other in zip(base, taken, strict=True)),
            bar=1.5 if mode == "one step off" else 1.0,
            at_least=True,
            parts={"synchronous step (s)": statistics.median(base), "step (s)": statistics.median(taken)},
        )
        for mode, taken in seconds.items()
        if mode != "synchronous"
    ]


@contextmanager
def demo_stack() -> Iterator[Stack]:
    """Trainer and engine of the demo, synced."""
    experiment = load_experiment(Path("examples/arithmetic.yaml"), [])
    with Closing() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        stack = Stack.open(experiment, experiment.numerics_config(), folder, closing, lambda text: None)
        stack.engines.wait()
        stack.syncing.sync()
        yield stack


def block(stack: Stack, settings: list[str], steps: int = BLOCK) -> float:
    """Median seconds of some steps, after one that fills what is ahead."""
    experiment = load_experiment(Path("examples/arithmetic.yaml"), [*settings, f"run.steps={steps + 20}"])
    feed, trainer = SampledFeed(experiment, stack.sampling), stack.trainer
    times = []
    for step in range(1, steps + 2):
        began = time.perf_counter()
        work = feed.take(step, trainer.weight_version, StepClock())
        plan = plan_updates(trainer, work.batch, work.outcomes, experiment.algorithm)
        first = plan.forward_backward(trainer, 0)
        ahead = feed.ahead(StepClock())
        if ahead is not None:
            trainer.score_routed(ahead.batch)
        feed.drain(StepClock())
        plan.update_all(trainer, first, step)
        stack.syncing.sync()
        times.append(time.perf_counter() - began)
    feed.drain(StepClock())  # the next block begins with idle engines
    return statistics.median(times[1:])


def accuracy(mode: str, rows: list[Row], synchronous: list[Row]) -> Result:
    """How far below the synchronous run's accuracy this one ends."""
    ends = rows[-1]["eval/accuracy"], synchronous[-1]["eval/accuracy"]
    return Result(
        name=f"accuracy after {SETTINGS['run.steps']} steps, synchronous - {mode}",
        value=ends[1] - ends[0],
        bar=ACCURACY_WITHIN,
        at_least=False,
        parts={"before": rows[0]["eval/accuracy"], "synchronous": ends[1], mode: ends[0]},
    )


def same_rows(what: str, rows: list[Row], others: list[Row]) -> Result:
    """The fraction of rows that are equal, but for time."""
    same = sum(timeless(row) == timeless(other) for row, other in zip(rows, others, strict=True))
    return Result(f"rows equal to those of one engine: {what}", same / len(rows), 1.0, True, {"rows": len(rows)})


def timeless(row: Row) -> Row:
    """A row without what time it took."""
    return {key: x for key, x in row.items() if not key.startswith("perf/") and not key.endswith("seconds")}

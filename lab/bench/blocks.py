"""Steps of one trainer and one engine that settings take turns on: steps per hour ahead of training, the slope of a
step's time over its answers, and what the canary of a sync costs."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path

from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.record.metrics_log import StepClock
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rl.run.engines.canary import canary_of
from fp8rl.rl.run.feed.feed import Feed, to_groups
from fp8rl.rl.run.feed.problems import to_prompts
from fp8rl.rl.run.interrupts import BoundedExitStack
from fp8rl.rl.run.run import Run, open_pair
from fp8rl.rl.run.step import plan_updates
from fp8rl.rollout.tasks.data import load_problems
from fp8rl.rollout.types import Group
from lab.bench.measure import DEMO, Result
from lab.bench.runs import ARITHMETIC
from lab.bench.sync import MODEL
from tests.support.tiny_model import write_tiny_model

MODES = {
    "synchronous": ["rollout.staleness=0"],
    "one step off": ["rollout.staleness=1"],
    "in flight, S = 1": ["rollout.staleness=1", "rollout.in_flight=true"],
    "in flight, S = 3": ["rollout.staleness=3"],
}
PROMPTS = (8, 16, 32, 64)


def steps_per_hour() -> Iterator[Result]:
    """Steps per hour of each mode over those of the synchronous one: one step off (drained before each update), and
    with updates in flight."""
    with demo_stack() as stack:
        seconds = _in_turns(stack, MODES, rounds=5, steps=6)
    base = seconds.pop("synchronous")
    for mode, taken in seconds.items():
        yield Result(
            name=f"steps per hour, {mode} / synchronous (demo)",
            value=statistics.median(one / other for one, other in zip(base, taken, strict=True)),
            bar=1.5 if mode == "one step off" else 1.0,
            at_least=True,
            parts={"synchronous step (s)": statistics.median(base), "step (s)": statistics.median(taken)},
        )


def scaling() -> Iterator[Result]:
    """The slope of a step's time over its answers: work that grows faster than they do would show in the slope."""
    with demo_stack() as stack:
        answers = stack.experiment.rollout.group_size
        blocks = {str(prompts): [f"rollout.prompts_per_step={prompts}"] for prompts in PROMPTS}
        seconds = [statistics.median(taken) for taken in _in_turns(stack, blocks, rounds=3, steps=3).values()]
    x, y = ([math.log(value) for value in values] for values in (PROMPTS, seconds))
    yield Result(
        name="slope of log step time over log answers per step, 1 to 8 times (demo)",
        value=statistics.linear_regression(x, y).slope,
        bar=1.05,
        at_least=False,
        parts={f"{prompts * answers} answers (s)": taken for prompts, taken in zip(PROMPTS, seconds, strict=True)},
    )


@contextmanager
def demo_stack() -> Iterator[Run]:
    """Trainer and engine of the demo, synced."""
    experiment = load_experiment(ARITHMETIC, [])
    with BoundedExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        stack = Run(experiment, experiment.numerics_config(), folder, closing, lambda text: None)
        stack.engines.wait()
        stack.syncing.sync()
        yield stack


def _in_turns(stack: Run, blocks: Mapping[str, list[str]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Median seconds of a block's steps in every round; the first round, which compiles, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for index in range(1 + rounds):
        for name, settings in blocks.items():
            taken = _block(stack, settings, steps)
            if index:
                seconds[name].append(taken)
    return seconds


def _block(stack: Run, settings: list[str], steps: int) -> float:
    """Median seconds of some steps, after one that fills what is ahead."""
    experiment = load_experiment(ARITHMETIC, [*settings, f"run.steps={steps + 20}"])
    feed, trainer = Feed(experiment, stack.sampling), stack.trainer
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


def canary() -> Iterator[Result]:
    """Syncs with and without the canary in turns, each followed by the answers of a small step and the trainer's
    scoring of them."""
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "model"
        write_tiny_model(large, MODEL)
        yield from _watched("400 MB in BF16", large)
    yield from _watched("demo", DEMO)


def _watched(name: str, model: Path, rounds: int = 24, warmup: int = 3) -> Iterator[Result]:
    settings = ["rollout.max_new_tokens=20", "rollout.group_size=8", "sync.bucket_mib=64"]
    experiment = load_experiment(ARITHMETIC, [f"model.path={model}", *settings])
    with open_pair(experiment, say=lambda text: None) as stack:  # which has no canary of its own
        watching = canary_of(experiment, stack.numerics)
        prompts = to_prompts(stack.tokenizer, load_problems(stack.experiment.data.training[0])[:4])
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for index in range(warmup + rounds):
            groups = to_groups(prompts, 8, run_seed=0, step=index)
            for watched in (True, False) if index % 2 else (False, True):
                stack.syncing.canary = watching if watched else None
                found = _sync_and_step(stack, groups)
                if index >= warmup:
                    times[watched].append(found)
        assert stack.engines.canaries() == {"sync/canary_diff": 0.0}
    without = statistics.median(sync for sync, _ in times[False])
    for column, what in enumerate(("in a sync", "until the answers behind it are scored")):
        on, off = ([seconds[column] for seconds in times[watched]] for watched in (True, False))
        added = statistics.median(a - b for a, b in zip(on, off, strict=True))
        parts = {"added (ms)": 1000 * added, "with (s)": statistics.median(on), "without (s)": statistics.median(off)}
        yield Result(
            name=f"canary: seconds {what} / seconds of a sync ({name})",
            value=added / without,
            bar=0.02,
            at_least=False,
            parts=parts | {"sync without (s)": without},
        )


def _sync_and_step(stack: Run, groups: Sequence[Group]) -> tuple[float, float]:
    """Seconds of a sync, and from its begin until the answers that follow are scored; the trainer has made nothing yet
    of its weights, as after an update."""
    stack.trainer.apply(methodcaller("weights_changed"))
    began = time.perf_counter()
    report = stack.syncing.sync()
    answers = stack.sampling.sample(groups, 1.0)
    stack.trainer.score(batch_from_trajectories(answers, 1.0))
    return report.seconds, time.perf_counter() - began

"""What the canary of a sync costs: syncs with and without it in turns, each followed by the answers of a small step and
the trainer's scoring of them."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

from fp8rl.models.tiny import write_tiny_model
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.run.feed.batching import batch_from_trajectories
from fp8rl.rl.run.feed.feed import to_groups, to_prompts
from fp8rl.rl.run.stack import Stack, canary_of, open_pair
from fp8rl.rollout.data.sources import load_problems
from fp8rl.rollout.types import Group
from lab.bench.measure import Result
from lab.bench.sync import MODEL

ROUNDS, WARMUP = 24, 3
PROMPTS, GROUP, TOKENS = 4, 8, 20
SPEC, DEMO = "examples/arithmetic.yaml", Path("examples/models/tiny_qwen3_moe")
BAR = 0.02


@dataclass(frozen=True)
class Times:
    """Seconds of a sync, and from its begin until the answers that follow are scored."""

    sync: float
    step: float


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "model"
        write_tiny_model(large, MODEL)
        return [*_results("400 MB in BF16", large), *_results("demo", DEMO)]


def _results(name: str, model: Path) -> list[Result]:
    settings = [
        f"model.path={model}",
        f"rollout.max_new_tokens={TOKENS}",
        f"rollout.group_size={GROUP}",
        "sync.bucket_mib=64",
    ]
    experiment = load_experiment(SPEC, settings)
    with open_pair(experiment, say=lambda text: None) as stack:  # which has no canary of its own
        canary = canary_of(experiment, stack.numerics)
        prompts = to_prompts(stack.tokenizer, load_problems(stack.experiment.data.training[0])[:PROMPTS])
        times: dict[bool, list[Times]] = {True: [], False: []}
        for index in range(WARMUP + ROUNDS):
            groups = to_groups(prompts, GROUP, run_seed=0, step=index)
            for watched in (True, False) if index % 2 else (False, True):
                stack.syncing.renew(stack.syncing.bridge, canary if watched else None)
                found = _timed(stack, groups)
                if index >= WARMUP:
                    times[watched].append(found)
        assert stack.engines.canaries() == {"sync/canary_diff": 0.0}
    without = statistics.median(each.sync for each in times[False])
    return [
        _result(f"canary: seconds {what} / seconds of a sync ({name})", times, key, without)
        for key, what in WHAT.items()
    ]


WHAT = {"sync": "in a sync", "step": "until the answers behind it are scored"}


def _result(name: str, times: dict[bool, list[Times]], key: str, sync: float) -> Result:
    pairs = zip(times[True], times[False], strict=True)
    added = statistics.median(getattr(a, key) - getattr(b, key) for a, b in pairs)
    both = {label: [getattr(each, key) for each in times[on]] for label, on in (("with", True), ("without", False))}
    return Result(
        name=name,
        value=added / sync,
        bar=BAR,
        at_least=False,
        parts={
            "added (ms)": 1000 * added,
            **{f"{label} (s)": statistics.median(values) for label, values in both.items()},
            "sync without (s)": sync,
        },
    )


def _timed(stack: Stack, groups: Sequence[Group]) -> Times:
    """One round, in which the trainer has made nothing yet of its weights, as after an update."""
    stack.trainer.apply(methodcaller("weights_changed"))
    began = time.perf_counter()
    report = stack.syncing.sync()
    answers = stack.sampling.sample(groups, 1.0)
    stack.trainer.score(batch_from_trajectories(answers, 1.0))
    return Times(report.seconds, time.perf_counter() - began)

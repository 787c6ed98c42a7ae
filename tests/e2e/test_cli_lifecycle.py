"""A run that is killed, and robbed of its trainer: nothing is left behind, and nothing is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fp8rl.rl.record.metrics_log import read_metrics
from tests.support.cli_runs import SMALL, StartedRun, wait_until_gone
from tests.support.live_runs import finished
from tests.support.recompute import compared

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GONE_WITHIN_S = 120.0
"""It takes five seconds on a quiet machine."""
RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
Start = Callable[..., StartedRun]
STEPS = 4
EVERYTHING_LEARNT = ["algorithm.name=ppo", "algorithm.updates_per_batch=2", "algorithm.kl.loss.coefficient=0.001"]
"""A critic and a reference beside the policy, and two weight versions a step."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs in `tmp_path`; what a failed test leaves of them is killed."""
    with ExitStack() as closing:

        def begin(*arguments: str, **options: Any) -> StartedRun:
            run = StartedRun(tmp_path, *arguments, **options)
            closing.callback(run.destroy)
            return run

        yield begin


def test_a_run_that_samples_ahead_ends_in_the_same_bits_whatever_dies_on_the_way(
    start: Start, tmp_path: Path, stacks: None
) -> None:
    """Metrics, tokens and weights, also with another number of engines and other chunks. Each fault alone, and more of
    them, among them the engine's, are `python -m lab.bench.faults` and `python -m lab.bench kills`."""
    settings = [
        *SMALL[:-1],
        *EVERYTHING_LEARNT,
        f"run.steps={STEPS}",
        "rollout.staleness=1",
        "eval.every=2",
        "checkpoint.every=1",
        "trainer.hung_after_s=15",
    ]
    # Everything at once, as when a machine loses its power, while a checkpoint is written.
    parts = start(*settings, name="parts")
    parts.wait_until(lambda: list(parts.path.glob("checkpoints/.*step_2*")), "unfinished checkpoint")
    family = [process for process in parts.family() if process.name() not in RAY_AGENTS]
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it died with another
            process.kill()
    assert wait_until_gone(family, GONE_WITHIN_S) == []
    assert {process.name() for process in parts.family()} <= RAY_AGENTS
    parts.destroy()

    # The trainer hangs: the run goes on by itself from the newest checkpoint.
    parts = start(*settings, "--resume", name="parts")
    parts.wait_for("first sync verified")
    (newest,) = checkpoints(parts)[-1:]
    assert newest in (1, 2) and [row["step"] for row in parts.rows()] == list(range(newest + 1))
    parts.wait_for(f"step 3/{STEPS}")
    parts.member("TrainerActor").send_signal(signal.SIGSTOP)
    run = finished(tmp_path, *settings, "rollout.engines=2", "rollout.chunked_prefill_size=16", name="whole")
    whole = read_metrics(run.metrics)  # of the run that nothing disturbs, beside which the other one waits
    assert parts.ends() == 0, parts.console()
    said = parts.console()
    assert said.count("lost (TrainerDiedError: trainer rank 0: found no answer within 15 s") == 1
    assert f"step 1/{STEPS}" not in said and "Traceback" not in said
    # The helper of torch that shares a killed trainer's memory ends by itself, once it sees that nobody is connected.
    assert wait_until_gone(parts.family(), GONE_WITHIN_S) == []

    assert [timeless(row) for row in parts.rows()] == [timeless(row) for row in whole]
    assert sampled(parts.path) == sampled(run.path)
    assert weights(parts.path) == weights(run.path)
    for row in whole[1:]:
        assert row["mismatch/exact_frac"] == row["mismatch/redraw_frac"] == 1.0 and row["mismatch/tokens"] > 0
        again = compared(run.path, row["step"])
        assert again == {name: row[name] for name in again} and again["mismatch/tokens"] == row["mismatch/tokens"]
        assert again.get("drift/tokens", 0) <= row["train/tokens"]
    assert {row["sync/mismatched_tensors"] for row in parts.rows()} == {0.0}
    assert [row.get("drift/tokens_age_2", 0) > 0 for row in whole[1:]] == [False] + [True] * (STEPS - 1)
    assert [row["train/kl"] > 0 for row in whole[1:]] == [True] * STEPS
    assert whole[STEPS]["critic/values_mean"] > whole[1]["critic/values_mean"] > 0
    evaluated = [(row["step"], row["eval/at_step"]) for row in whole if "eval/accuracy" in row]
    assert evaluated == [(0, 0), (3, 2), (4, 4)], "beside the step that follows"
    assert {row["train/clip_fraction"] > 0 for row in whole[STEPS:]} == {True}

    events = [json.loads(line) for line in (parts.path / "events.jsonl").read_text().splitlines()]
    assert "resume" in {event["action"] for event in events}
    page = (parts.path / "report.html").read_text()
    assert "lost (TrainerDiedError" in page and f"resumed after step {newest}" in page
    assert len(list((parts.path / "checkpoints").iterdir())) == 2, "what the kill left half-written is gone"


def checkpoints(run: StartedRun) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run.path / "checkpoints").glob("step_*"))


def weights(run: Path) -> bytes:
    return (run / "model/model.safetensors").read_bytes()


def sampled(run: Path) -> list[bytes]:
    """Every trajectory of every step, with both sides' log-probabilities and advantages."""
    return [(run / f"rollouts/step_{step}.jsonl").read_bytes() for step in range(1, STEPS + 1)]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A row without time, and without its recoveries."""
    beside = ("perf/", "sync/seconds", "sync/send_seconds", "sync/verify_seconds", "tracking/resumed")
    beside += ("rollout/engines_replaced", "sync/repeated")  # recoveries
    return {key: value for key, value in row.items() if not key.startswith(beside)}

"""Runs that are interrupted, killed and robbed of their engine: nothing is left behind, and nothing is lost."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cli_runs import SMALL, StartedRun, wait_until_gone
from tests.support.recompute import compared

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GONE_WITHIN_S = 120.0
"""It takes five seconds on a quiet machine."""
RAY_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
Start = Callable[..., StartedRun]
EVERYTHING_LEARNT = ["algorithm.name=ppo", "algorithm.updates_per_batch=2", "algorithm.kl.loss.coefficient=0.001"]
"""A critic and a reference beside the policy, and two weight versions a step."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs in `tmp_path`; what a failed test leaves of them is killed."""
    runs: list[StartedRun] = []

    def begin(*arguments: str, **options: Any) -> StartedRun:
        runs.append(StartedRun(tmp_path, *arguments, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.destroy()


def interrupt(run: StartedRun, signum: int, times: int = 1) -> None:
    """Signal the whole foreground group, as a terminal does; every process must be gone in time, with exit code 130."""
    family = run.family()
    assert run.process.pid in [process.pid for process in family]
    began = time.monotonic()
    for _ in range(times):
        run.signal_all(signum)
        time.sleep(0.3)
    assert run.ends(GONE_WITHIN_S) == 130, run.console()
    assert wait_until_gone(family, GONE_WITHIN_S - (time.monotonic() - began)) == []
    assert run.family() == []
    assert "every process that was started is stopped" in run.console()
    assert "Traceback" not in run.console()


@pytest.mark.parametrize(
    ("seen", "later_s", "signum"),
    [("\nquantization ", 1.0, signal.SIGINT), ("starting the engine", 3.0, signal.SIGTERM)],
    ids=["while Ray starts", "while engine and trainer start"],
)
def test_a_start_can_be_interrupted(start: Start, seen: str, later_s: float, signum: int) -> None:
    run = start(*SMALL)
    run.wait_for(seen)
    time.sleep(later_s)
    interrupt(run, signum, times=2)
    assert "the run had not begun, and leaves nothing" in run.console()
    assert not run.path.exists() and not list(run.path.parent.glob(".*"))


@pytest.mark.parametrize("later_s", [0.0, 1.5])
def test_imports_can_be_interrupted(start: Start, later_s: float) -> None:
    run = start(*SMALL)
    run.wait_for("fp8rl: checking")
    time.sleep(later_s)
    run.signal_all(signal.SIGINT)
    assert run.ends(GONE_WITHIN_S) == 130
    assert run.console().splitlines()[1:] == ["interrupted; nothing was started"]
    assert not run.path.exists()


def test_a_run_outlives_interrupts_kills_and_the_death_of_its_engine(start: Start) -> None:
    settings = [*SMALL, "run.steps=7", "eval.every=1", "eval.problems=128"]

    # An impatient user during an evaluation, which follows the sync and its manifest.
    run = start(*settings)
    run.wait_for("step 2/7")
    run.wait_until(lambda: (run.path / "manifests/step_3.json").exists(), "sync of step 3")
    interrupt(run, signal.SIGINT, times=4)
    first_rows = run.rows()
    assert [row["step"] for row in first_rows] == [0, 1, 2]
    assert f"resume   fp8rl train {run.path}/spec.yaml --resume" in run.console()

    # The driver is killed while a checkpoint is written. Two agents of Ray's look for its server for another minute.
    run = start(*settings, "--resume")
    run.wait_for("first sync verified")
    assert run.rows() == first_rows
    run.process.send_signal(signal.SIGSTOP)  # it would be through before the second one has imported anything
    second = start(*settings, "--overwrite")
    assert second.ends() == 2 and f"held by process {run.process.pid} on" in second.console()
    run.process.send_signal(signal.SIGCONT)
    run.wait_until(lambda: list(run.path.glob("checkpoints/.*step_4*")), "unfinished checkpoint")
    family = [process for process in run.family() if process.name() not in RAY_AGENTS]
    run.process.send_signal(signal.SIGKILL)
    assert wait_until_gone(family, GONE_WITHIN_S) == []
    assert {process.name() for process in run.family()} <= RAY_AGENTS
    run.destroy()

    # Its engine dies in the middle of a step, and the run completes. Rows beyond the checkpoint were cut. From here on
    # trainer and engine take turns.
    run = start(*settings, "rollout.sleep=true", "--resume")
    run.wait_for("first sync verified")
    (newest,) = checkpoints(run)[-1:]
    assert newest in (2, 4) and [row["step"] for row in run.rows()] == list(range(newest + 1))
    run.wait_for(f"step {newest + 1}/7")
    engine = run.engine()
    workers = engine.children(recursive=True)
    engine.kill()
    run.wait_for("engine 0 is lost and replaced")
    assert wait_until_gone([engine, *workers], GONE_WITHIN_S) == []
    assert run.ends() == 0, run.console()
    assert run.family() == []

    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(8))
    assert {row["mismatch/train_rollout_logprob_abs_diff_max"] for row in rows} == {0.0}
    assert {row["mismatch/exact_frac"] for row in rows} == {1.0}
    assert {row["sync/mismatched_tensors"] for row in rows} == {0.0}
    released = [row.get("memory/engine_released_bytes", 0.0) for row in rows[1:]]
    assert [each > 1e6 for each in released] == [step > newest for step in range(1, 8)]
    assert [row["train/lr"] for row in rows[1:]] == pytest.approx([2e-5, 4e-5, 6e-5, 8e-5, *[1e-4] * 3])
    assert [version(run, step) for step in range(8)] == list(range(8))
    assert [row["step"] for row in rows if "tracking/resumed" in row][-1] == newest + 1
    assert [row["step"] for row in rows[1:] if row["rollout/engines_replaced"] == 1.0] == [newest + 2]
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["action"]) for event in events][-2:] == [
        (newest, "resume"),
        (newest + 2, "replace_engine"),
    ]
    page = (run.path / "report.html").read_text()
    assert "engine 0 is lost and replaced" in page and f"resumed after step {newest}" in page
    assert checkpoints(run) == [6, 7]
    assert len(list((run.path / "checkpoints").iterdir())) == 2, "what the kill left half-written is gone"


def test_a_run_that_samples_ahead_ends_in_the_same_bits_whatever_dies_on_the_way(start: Start) -> None:
    """Metrics, tokens and weights, also with another number of engines and other chunks."""
    settings = [
        *SMALL,
        *EVERYTHING_LEARNT,
        "run.steps=8",
        "rollout.staleness=1",
        "eval.every=2",
        "trainer.hung_after_s=15",
    ]
    whole = start(*settings, "rollout.engines=2", "rollout.chunked_prefill_size=16", name="whole")

    # Everything at once, as when a machine loses its power.
    parts = start(*settings, name="parts")
    parts.wait_for("step 5/8")
    family = [process for process in parts.family() if process.name() not in RAY_AGENTS]
    for process in family:
        process.kill()
    wait_until_gone(family, GONE_WITHIN_S)
    parts.destroy()
    assert whole.ends() == 0, whole.console()

    # The trainer, which dies and then hangs: the run goes on by itself, with the engine that it has.
    parts = start(*settings, "--resume", name="parts")
    parts.wait_for("step 5/8")
    engine = parts.engine()
    trainer_of(parts).kill()
    parts.wait_for("lost the trainer (trainer rank 0: found its process ended")
    parts.wait_for("step 7/8")
    trainer_of(parts).send_signal(signal.SIGSTOP)
    assert parts.ends() == 0, parts.console()
    assert parts.console().count("lost the trainer") == 2 and "found no answer within 15 s" in parts.console()
    assert parts.console().count("the engine is up") == 3 and not engine.is_running()
    assert "step 1/8" not in parts.console() and "Traceback" not in parts.console()
    assert parts.family() == []

    assert [timeless(row) for row in parts.rows()] == [timeless(row) for row in whole.rows()]
    assert sampled(parts) == sampled(whole)
    assert weights(parts) == weights(whole)
    for row in whole.rows()[1:]:
        assert row["mismatch/exact_frac"] == row["mismatch/redraw_frac"] == 1.0 and row["mismatch/tokens"] > 0
        again = compared(whole.path, row["step"])
        assert again == {name: row[name] for name in again} and again["mismatch/tokens"] == row["mismatch/tokens"]
        assert again.get("drift/tokens", 0) <= row["train/tokens"]
    assert [row.get("drift/tokens_age_2", 0) > 0 for row in whole.rows()[1:]] == [False] + [True] * 7
    assert [row["train/kl"] > 0 for row in whole.rows()[1:]] == [True] * 8
    assert whole.rows()[8]["critic/values_mean"] > whole.rows()[1]["critic/values_mean"] > 0
    evaluated = [(row["step"], row["eval/at_step"]) for row in whole.rows() if "eval/accuracy" in row]
    assert evaluated == [(0, 0), (3, 2), (5, 4), (7, 6), (8, 8)], "beside the step that follows"
    assert {row["train/clip_fraction"] > 0 for row in whole.rows()[4:]} == {True}

    # It goes on in another layout, until a trainer is lost once too often.
    layout = ("trainer.dp=2", "trainer.ep=2")
    more = start(*settings, *layout, "run.steps=12", "run.restarts=0", "--resume", name="parts")
    more.wait_for("step 10/12")
    trainers_of(more)[0].kill()
    assert more.ends() == 3, more.console()
    said = more.console()
    assert "resuming with trainer.ep=2 (was 1)\n" in said and "resuming with another layout of the trainer" in said
    assert "error: trainer rank" in said and "found its process ended" in said and "Traceback" not in said
    assert f"resume   fp8rl train {more.path}/spec.yaml --resume" in said and "log.txt" in said
    assert more.family() == []
    assert [row["step"] for row in more.rows()[:11]] == list(range(11))
    for row in more.rows()[9:]:
        assert row["mismatch/exact_frac"] == row["mismatch/redraw_frac"] == 1.0 and row["mismatch/tokens"] > 0
        assert row["sync/mismatched_tensors"] == 0


def trainer_of(run: StartedRun) -> psutil.Process:
    (trainer,) = trainers_of(run)
    return trainer


def trainers_of(run: StartedRun) -> list[psutil.Process]:
    return run.members("TrainerActor")


def checkpoints(run: StartedRun) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run.path / "checkpoints").glob("step_*"))


def version(run: StartedRun, step: int) -> int:
    """The weight version that the sync after `step` brought to the engine."""
    return int(json.loads((run.path / f"manifests/step_{step}.json").read_text())["version"])


def weights(run: StartedRun) -> bytes:
    return (run.path / "model/model.safetensors").read_bytes()


def sampled(run: StartedRun) -> list[bytes]:
    """Every trajectory of every step, with both sides' log-probabilities and advantages."""
    return [(run.path / f"rollouts/step_{step}.jsonl").read_bytes() for step in range(1, 9)]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    time = ("perf/", "sync/seconds", "sync/send_seconds", "sync/verify_seconds", "tracking/resumed")
    return {key: value for key, value in row.items() if not key.startswith(time)}

"""How a run's parts are opened, closed and started again. Runs with real parts, and real losses, are in tests/e2e."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fp8rl.rl.experiment.preconditions
import fp8rl.rl.run.background as background_module
import fp8rl.rl.run.restarts as restarts_module
import fp8rl.rl.run.stack as stack_module
from fp8rl.numerics.core.errors import UserError, typed
from fp8rl.rl.record.history import Event, append_event, read_events
from fp8rl.rl.run.background import Background
from fp8rl.rl.run.checkpoints import how_to_go_on
from fp8rl.rl.run.restarts import commands_after_a_stop, run_with_restarts
from fp8rl.rl.run.run import LiveRun, check_directory
from fp8rl.rollout.types import EngineError
from fp8rl.trainer.actor import TrainerDiedError
from tests.support.commands import result_of
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES, new_run


@pytest.mark.slow
def test_what_was_started_is_ended_when_a_later_part_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = new_run(tmp_path / "it")
    events: list[str] = []

    def part(name: str) -> type:
        """A part whose start and end are noted."""

        class Part:
            def __init__(self, *_: object, awake: bool = True) -> None:
                events.append(name)

            def __enter__(self) -> None: ...

            def trainer(self) -> None: ...

            @staticmethod
            def none() -> None: ...

            def close(self, *_: object) -> None:
                events.append(f"{name} ended")

            stop = __exit__ = close

        return Part

    def refuse(*_: object, **__: object) -> None:
        raise UserError("trainer: found no room")

    for name in ("ray_cluster", "Reservations", "Engines"):
        monkeypatch.setattr(stack_module, name, part(name))
    monkeypatch.setattr(stack_module, "write_description", lambda *_: (files.path / "served/start").mkdir(parents=True))
    monkeypatch.setattr(stack_module.TrainerGroup, "start", refuse)
    with pytest.raises(UserError, match="no room"):
        LiveRun(experiment(run={"steps": 3}), files)
    begun = ["ray_cluster", "Reservations", "Engines"]
    assert events == [*begun, *(f"{name} ended" for name in reversed(begun))]
    assert not (files.path / "served").exists(), "the description is only for the start"
    assert "found no room" in files.log.read_text()


def test_a_run_has_no_record_of_a_start_before_it_that_reached_no_step(tmp_path: Path) -> None:
    files = new_run(tmp_path / "it")
    append_event(files.events, Event(1, "train/loss", 2.0, "above 1", "warn", None, "train/loss is 2"))
    files.capsule(1).mkdir(parents=True)
    LiveRun._load(SimpleNamespace(files=files, stack=SimpleNamespace(engines=())), None)  # type: ignore[arg-type]
    assert read_events(files.events) == [] and files.capsule_steps() == []


@pytest.mark.parametrize("how", ["deleted", "renamed", "replaced"])
def test_a_directory_that_goes_away_under_a_run_is_said_before_the_next_step(tmp_path: Path, how: str) -> None:
    path = tmp_path / "it"
    path.mkdir()
    made = path.stat()
    check_directory(path, made, 1)
    path.rename(tmp_path / "elsewhere")
    if how == "deleted":
        shutil.rmtree(tmp_path / "elsewhere")
    if how == "replaced":
        path.mkdir()
    with pytest.raises(FileNotFoundError, match=r"run\.dir: found .*/it deleted or renamed before step 2"):
        check_directory(path, made, 2)


class Opened:
    """Stands in for `LiveRun`; notes what each attempt was opened with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stack, self.attempts, self.finished = object(), [], []  # type: ignore[var-annotated]
        monkeypatch.setattr(restarts_module, "LiveRun", self.open)
        monkeypatch.setattr(restarts_module, "finish", lambda run, stopped: self.finished.append(stopped))

    def open(self, experiment: Any, files: Any, outer: Any, stack: Any, lost: str, notes: Any) -> Any:
        self.attempts.append((stack is self.stack, lost))
        return contextlib.nullcontext(SimpleNamespace(stack=self.stack))


def dying(times: int, error: Exception) -> Any:
    left = [times]

    def loop(run: Any) -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "why"

    return loop


def test_a_run_that_has_stopped_names_the_capsule_of_its_step_and_the_command_that_resumes(tmp_path: Path) -> None:
    files = new_run(tmp_path / "it")
    files.capsule(3).mkdir(parents=True)
    fp8rl = typed("fp8rl")
    resume = f"resume   {fp8rl} train {files.experiment} --resume"
    assert commands_after_a_stop(files, 3) == [f"why      {fp8rl} explain {files.capsule(3)}", resume]
    assert commands_after_a_stop(files, 4) == [resume], "an older capsule says nothing about this step"


@pytest.mark.parametrize(
    ("done", "lost"), [(4, ""), (5, "; 1 later step is lost"), (7, "; 3 later steps are lost")]
)  # fmt: skip
def test_an_interrupt_says_where_a_resume_continues_and_what_is_lost(done: int, lost: str, tmp_path: Path) -> None:
    files = new_run(tmp_path / "it")
    assert "had not begun" in how_to_go_on(files)
    files.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(done + 1)))
    assert "has no checkpoint yet" in how_to_go_on(files)
    for step in (2, 4):
        files.checkpoint(step).mkdir(parents=True)
    saved, resume = how_to_go_on(files).splitlines()
    assert saved == f"saved    step 4, from which a resume continues{lost}"
    assert resume == f"resume   {typed('fp8rl')} train {files.experiment} --resume"


@pytest.mark.parametrize(("error", "attempts"), [(TrainerDiedError("rank 1"), 2), (EngineError("no GPU"), 1)])
def test_other_losses_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, attempts: int) -> None:
    opened = Opened(monkeypatch)
    with pytest.raises(type(error), match=str(error)):
        run_with_restarts(experiment(run={"restarts": 1}), new_run(tmp_path / "it"), dying(5, error))
    assert opened.attempts == [(False, ""), (True, "rank 1")][:attempts] and opened.finished == []


@pytest.mark.parametrize(("reason", "code"), [("", 0), ("checkpoint_and_stop: because", 3), (None, 3)])
def test_a_run_that_was_stopped_or_lost_has_an_exit_code(
    reason: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: Any) -> str:
        if reason is None:
            raise TrainerDiedError("trainer rank 0: found its process ended, expected it to answer")
        return reason

    monkeypatch.setattr(fp8rl.rl.experiment.preconditions, "check", lambda experiment, say: None)
    monkeypatch.setattr(restarts_module, "run_with_restarts", ended)
    result = result_of("train", EXAMPLES / "arithmetic.yaml", f"run.dir={tmp_path}")
    assert result.exit_code == code and "Traceback" not in result.output
    lost = "error: trainer rank 0: found its process ended" in result.output and "log.txt" in result.output
    assert lost is (reason is None)


def test_a_loop_that_is_held_up_keeps_no_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background_module, "_TURN_SECONDS", 0.2)
    free = threading.Event()

    async def never_awaits() -> None:
        free.wait(60)

    background = Background("test")
    assert background.run(number(3)) == 3
    background.begin(never_awaits())
    with pytest.raises(TimeoutError):
        background.run(number(3), 0.2)
    background.close()
    assert background.closed and background.begin(number(4)).cancelled() and "thread test" in caplog.text
    free.set()


async def number(value: int) -> int:
    await asyncio.sleep(0)
    return value

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
import fp8rl.rl.loop as loop_module
import fp8rl.rl.run.background as background_module
import fp8rl.rl.run.ending as ending_module
import fp8rl.rl.run.run as run_module
from fp8rl import supervising
from fp8rl.numerics.core.errors import UserError, typed
from fp8rl.rl.record.history import Event, append_entry, read_events
from fp8rl.rl.run.background import Background
from fp8rl.rl.run.ending import commands_after_a_stop, commands_at_the_end, how_to_go_on
from fp8rl.rl.run.interrupts import BoundedExitStack
from fp8rl.rl.run.record import Record, check_directory
from fp8rl.rl.run.run import open_run
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
            def __init__(self, *_: object, **__: object) -> None:
                events.append(name)

            def __enter__(self) -> None: ...

            def trainer(self) -> None: ...

            def close(self, *_: object) -> None:
                events.append(f"{name} ended")

            stop = __exit__ = close

        return Part

    def refuse(*_: object, **__: object) -> None:
        raise UserError("trainer: found no room")

    for name in ("ray_cluster", "Reservations", "Engines"):
        monkeypatch.setattr(run_module, name, part(name))
    written = "fp8rl.rl.run.engines.serving.write_served_checkpoint"
    monkeypatch.setattr(written, lambda *_: (files.path / "served/policy").mkdir(parents=True))
    monkeypatch.setattr(run_module.TrainerGroup, "start", refuse)
    with pytest.raises(UserError, match="no room"):
        open_run(experiment(run={"steps": 3}), files).__enter__()
    begun = ["ray_cluster", "Reservations", "Engines"]
    assert events == [*begun, *(f"{name} ended" for name in reversed(begun))]
    assert not (files.path / "served").exists(), "the description is only for the start"
    assert "found no room" in files.log.read_text()


@pytest.mark.parametrize("again", [False, True])
def test_a_run_has_no_record_of_a_start_before_it_that_reached_no_step(again: bool, tmp_path: Path) -> None:
    files = new_run(tmp_path / "it")
    append_entry(files.events, Event(1, "train/loss", 2.0, "above 1", "warn", None, "train/loss is 2"))
    files.capsule(1).mkdir(parents=True)
    with BoundedExitStack() as closing:
        Record(experiment(tracking={"to": []}), files, closing, [], again).begin()
    assert [event.text for event in read_events(files.events)] == ["lost, and resumed after step 0"] * again
    assert files.capsule_steps() == []


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


def test_a_run_that_has_stopped_names_the_capsule_of_its_step_and_the_command_that_resumes(tmp_path: Path) -> None:
    files = new_run(tmp_path / "it")
    files.capsule(3).mkdir(parents=True)
    fp8rl = typed("fp8rl")
    why, resume = f"why      {fp8rl} explain {files.capsule(3)}", f"resume   {fp8rl} train {files.experiment} --resume"
    assert commands_after_a_stop(files, 3) == [why, resume]
    assert commands_after_a_stop(files, 4) == [resume], "an older capsule says nothing about this step"
    assert commands_at_the_end(files) == [why, f"serve    {fp8rl} serve {files.path}"]


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


@pytest.mark.parametrize(
    ("ended", "restarts", "code"),
    [
        ("", None, 0),
        ("checkpoint_and_stop: because", None, 3),
        (TrainerDiedError("trainer rank 0: found its process ended"), None, 3),
        (TrainerDiedError("trainer rank 0: found its process ended"), 1, 75),
        (TrainerDiedError("trainer rank 0: found its process ended"), 2, 3),
        (EngineError("found no GPU"), 1, 3),
    ],
)
def test_a_run_that_was_stopped_or_lost_has_an_exit_code(
    ended: str | Exception, restarts: int | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost trainer is a loss that a supervised run mends, twice by default."""
    if restarts:
        new_run(tmp_path / "run").experiment.write_text(experiment(run={"dir": str(tmp_path)}).to_yaml())

    def loop(run: Any) -> str:
        if isinstance(ended, Exception):
            raise ended
        return ended

    monkeypatch.setattr(fp8rl.rl.experiment.preconditions, "check", lambda experiment, say: None)
    monkeypatch.setattr(run_module, "open_run", lambda *_, **__: contextlib.nullcontext(SimpleNamespace(record=None)))
    monkeypatch.setattr(loop_module, "train", loop)
    monkeypatch.setattr(ending_module, "finish", lambda record, stopped: None)
    monkeypatch.setattr(supervising, "restarts", restarts)
    result = result_of("train", EXAMPLES / "arithmetic.yaml", f"run.dir={tmp_path}", "run.name=run")
    assert result.exit_code == code and "Traceback" not in result.output
    assert ("log.txt" in result.output) is (code == 3 and isinstance(ended, Exception))
    assert ("the run starts again from its last checkpoint, at most 1 more times" in result.output) is (code == 75)


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

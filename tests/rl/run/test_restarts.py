"""What follows a lost trainer, and with which exit code a run ends. Real losses are in tests/e2e."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fp8rl.rl.experiment.preconditions
import fp8rl.rl.run.restarts as restarts_module
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.terminal import typed
from fp8rl.rl.run.checkpoints import how_to_go_on
from fp8rl.rl.run.restarts import commands_after_a_stop, run_with_restarts
from fp8rl.rollout.types import EngineError
from fp8rl.trainer.actor import TrainerDiedError
from tests.support.commands import result_of
from tests.support.experiments import experiment
from tests.support.paths import EXAMPLES, new_run


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


def train(folder: Path) -> tuple[int, str]:
    result = result_of("train", EXAMPLES / "arithmetic.yaml", f"run.dir={folder}")
    return result.exit_code, result.output


def test_a_run_that_has_stopped_names_the_capsule_of_its_step_and_the_command_that_resumes(tmp_path: Path) -> None:
    files = new_run(tmp_path / "it")
    files.capsule(3).mkdir(parents=True)
    fp8rl = typed("fp8rl")
    resume = f"resume   {fp8rl} train {files.experiment} --resume"
    assert commands_after_a_stop(files, 3) == [f"why      {fp8rl} attribute {files.capsule(3)}", resume]
    assert commands_after_a_stop(files, 4) == [resume], "an older capsule says nothing about this step"


@pytest.mark.parametrize(
    ("done", "lost"), [(4, ""), (5, "; 1 later step is lost"), (7, "; 3 later steps are lost")]
)  # fmt: skip
def test_an_interrupt_says_from_which_step_a_resume_continues_and_what_is_lost(
    done: int, lost: str, tmp_path: Path
) -> None:
    files = new_run(tmp_path / "it")
    assert "had not begun" in how_to_go_on(files)
    files.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(done + 1)))
    assert "has no checkpoint yet" in how_to_go_on(files)
    for step in (2, 4):
        files.checkpoint(step).mkdir(parents=True)
    saved, resume = how_to_go_on(files).splitlines()
    assert saved == f"saved    step 4, from which a resume continues{lost}"
    assert resume == f"resume   {typed('fp8rl')} train {files.experiment} --resume"


def test_a_lost_trainer_is_followed_by_another_beside_the_same_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(monkeypatch)
    stopped = run_with_restarts(
        experiment(run={"restarts": 2}), new_run(tmp_path / "it"), dying(2, TrainerDiedError("rank 1"))
    )
    assert stopped == "why" and opened.finished == ["why"]
    assert opened.attempts == [(False, ""), (True, "rank 1"), (True, "rank 1")]


@pytest.mark.parametrize(("error", "attempts"), [(TrainerDiedError("rank 1"), 2), (EngineError("no GPU"), 1)])
def test_once_too_often_and_other_losses_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, attempts: int
) -> None:
    opened = Opened(monkeypatch)
    with pytest.raises(type(error), match=str(error)):
        run_with_restarts(experiment(run={"restarts": 1}), new_run(tmp_path / "it"), dying(5, error))
    assert len(opened.attempts) == attempts and opened.finished == []


def test_a_trainer_that_cannot_be_started_again_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise UserError("trainer: found no room")

    opened = Opened(monkeypatch)
    opened.open = refuse  # type: ignore[method-assign]
    monkeypatch.setattr(restarts_module, "LiveRun", refuse)
    with pytest.raises(UserError, match="no room"):
        run_with_restarts(experiment(), new_run(tmp_path / "it"), dying(0, ValueError()))


@pytest.mark.parametrize(("reason", "code"), [("", 0), ("checkpoint_and_stop: because", 3)])
def test_a_run_that_was_stopped_has_an_exit_code_of_its_own(
    reason: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8rl.rl.experiment.preconditions, "check", lambda experiment, say: None)
    monkeypatch.setattr(restarts_module, "run_with_restarts", lambda *_: reason)
    assert train(tmp_path)[0] == code


def test_a_loss_is_one_sentence_with_the_logs_and_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any) -> str:
        raise TrainerDiedError("trainer rank 0: found its process ended, expected it to answer")

    monkeypatch.setattr(fp8rl.rl.experiment.preconditions, "check", lambda experiment, say: None)
    monkeypatch.setattr(restarts_module, "run_with_restarts", lose)
    code, said = train(tmp_path)
    assert code == 3 and "error: trainer rank 0: found its process ended" in said and "log.txt" in said
    assert "Traceback" not in said

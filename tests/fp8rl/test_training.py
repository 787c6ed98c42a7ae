"""The start of a run, up to where its loop begins."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import yaml

import fp8rl.rl.experiment.preconditions as preconditions
import fp8rl.rl.loop as loop_module
import fp8rl.rl.run.ending as ending
import fp8rl.rl.run.run as run_module
from fp8rl import training
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.experiment.contents import contents
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rollout.types import EngineError
from fp8rl.training import RunFailedError, run_experiment, train
from tests.support.checkpoints import save
from tests.support.paths import EXAMPLES

SPEC = str(EXAMPLES / "arithmetic.yaml")


def test_a_resume_that_does_not_start_leaves_the_spec_and_the_next_one_names_the_change_again(tmp_path, monkeypatch):
    monkeypatch.setattr(preconditions, "check", lambda experiment, note: None)
    before = load_experiment(SPEC, [f"run.dir={tmp_path}"])
    run = RunDir(tmp_path / before.run.name)
    run.path.mkdir()
    run.experiment.write_text(before.to_yaml())
    save(run, before, 4, held=contents(before))
    failures: list[Exception | None] = [UserError("no room"), EngineError("it did not answer"), None]
    said: list[list[str]] = []

    @contextmanager
    def opened(experiment, files: RunDir, notes: list[str], **_: object) -> Iterator[SimpleNamespace]:
        said.append([note for note in notes if "resuming with" in note])
        if (failure := failures.pop(0)) is not None:
            assert files.experiment.read_text() == before.to_yaml()
            raise failure
        yield SimpleNamespace(record=None)

    monkeypatch.setattr(run_module, "open_run", opened)
    monkeypatch.setattr(ending, "finish", lambda record, stopped: None)
    monkeypatch.setattr(loop_module, "train", lambda run: "")
    asked = [f"run.dir={tmp_path}", "trainer.lr=0.01"]
    for error in (UserError, RunFailedError):
        with pytest.raises(error):
            run_experiment(SPEC, asked, resume=True)
        assert run.experiment.read_text() == before.to_yaml()
    run_experiment(SPEC, asked, resume=True)
    assert said == [[f"resuming with trainer.lr=0.01 (was {before.trainer.lr})"]] * 3
    assert yaml.safe_load(run.experiment.read_text())["trainer"]["lr"] == 0.01


def ends_with(code: int, *lines: str) -> str:
    """A program in place of the command; it prints its arguments first."""
    return f"import sys; print(*sys.argv[1:]); print({chr(10).join(lines)!r}); sys.exit({code})"


def test_train_runs_the_command_prints_its_console_and_returns_the_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "it").mkdir()
    (tmp_path / "it/spec.yaml").touch()
    no_utf8 = r"import sys; sys.stdout.buffer.write(b'\xff\n'); "
    monkeypatch.setattr(training, "_PROGRAM", no_utf8 + ends_with(3, "stopped: a gate"))
    found = train(SPEC, resume=True, run={"dir": str(tmp_path), "name": "it"})
    assert found.path == tmp_path / "it"
    assert capsys.readouterr().out.splitlines() == [
        "\ufffd",
        f'train --resume -- {SPEC} run.dir="{tmp_path}" run.name="it"',
        "stopped: a gate",
    ]


@pytest.mark.parametrize(
    ("code", "lines", "error", "said"),
    [
        (2, ["note: one", "error: data.train: found", "two lines"], UserError, "data.train: found\ntwo lines"),
        (3, ["error: trainer rank 0: found its process ended", "logs     here"], RunFailedError, "trainer rank 0: .*"),
        (1, ["Traceback", "KeyError: 3"], RunFailedError, "KeyError: 3"),
    ],
)
def test_train_raises_what_the_command_has_said(code, lines, error, said, monkeypatch):
    monkeypatch.setattr(training, "_PROGRAM", ends_with(code, *lines))
    with pytest.raises(error, match=f"^{said}$") as raised:
        train(SPEC)
    assert getattr(raised.value, "exit_code", 2) == code

"""How a run's parts are opened and closed. Runs with real parts are in tests/e2e."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import pytest

import fp8rl.rl.run.stack as stack_module
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.run import LiveRun, check_directory
from tests.support.experiments import experiment
from tests.support.paths import new_run


@pytest.mark.slow
def test_what_was_started_is_ended_when_a_later_part_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = new_run(tmp_path / "it")
    events: list[str] = []

    def part(name: str) -> type:
        """A part whose start and end are noted."""

        class Part:
            nodes: ClassVar[dict[object, None]] = {}

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
        LiveRun.open(experiment(run={"steps": 3}), files)
    begun = ["ray_cluster", "Reservations", "Engines"]
    assert events == [*begun, *(f"{name} ended" for name in reversed(begun))]
    assert not (files.path / "served").exists(), "the description is only for the start"
    assert "found no room" in files.log.read_text()


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

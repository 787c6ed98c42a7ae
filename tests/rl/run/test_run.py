"""How a run's parts are opened and closed. Runs with real parts are in tests/e2e."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import fp8rl.rl.run.stack as stack_module
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.history import Event, append_event, read_events
from fp8rl.rl.run.run import LiveRun, check_directory
from tests.support.experiments import experiment
from tests.support.paths import new_run


@pytest.mark.slow
def test_what_was_started_is_ended_in_reverse_when_a_later_part_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = new_run(tmp_path / "it")
    events: list[str] = []

    class Cluster:
        def __init__(self, logs: Path, lost: object) -> None: ...

        def __enter__(self) -> None:
            events.append("ray")

        def __exit__(self, *_: object) -> None:
            events.append("ray ended")

    class Engines:
        def __init__(self, *_: object, awake: bool) -> None:
            events.append("engines")

        @staticmethod
        def none() -> None: ...

        def stop(self) -> None:
            events.append("engines ended")

    def refuse(*_: object, **__: object) -> None:
        raise UserError("trainer: found no room")

    class Reservations:
        def __init__(self, *_: object) -> None:
            events.append("reserved")

        def trainer(self) -> None: ...

        def close(self) -> None:
            events.append("given back")

    monkeypatch.setattr(stack_module, "ray_cluster", Cluster)
    monkeypatch.setattr(stack_module, "Reservations", Reservations)
    monkeypatch.setattr(stack_module, "write_description", lambda *_: (files.path / "served/start").mkdir(parents=True))
    monkeypatch.setattr(stack_module, "Engines", Engines)
    monkeypatch.setattr(stack_module.TrainerGroup, "start", refuse)
    with pytest.raises(UserError, match="no room"):
        LiveRun(experiment(run={"steps": 3}), files)
    assert events == ["ray", "reserved", "engines", "engines ended", "given back", "ray ended"]
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


def test_a_run_that_goes_on_forgets_the_records_of_the_steps_that_it_repeats(tmp_path: Path) -> None:
    files = new_run(tmp_path / "it")
    for step in (4, 5):
        for path in (files.rollouts(step), files.manifest(step), files.capsule(step) / "capsule.json"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        append_event(files.events, Event(step, "a", 0.0, "b", "resync", None, "c"))
    loaded: list[Path] = []
    stack = SimpleNamespace(trainer=SimpleNamespace(load=loaded.append), engines=())
    LiveRun._load(cast(Any, SimpleNamespace(files=files, stack=stack)), 4)
    assert loaded == [files.checkpoint(4)]
    assert (files.rollout_steps(), files.capsule_steps()) == ([4], [4])
    assert [path.name for path in (files.path / "manifests").iterdir()] == ["step_4.json"]
    assert [event.step for event in read_events(files.events)] == [4]

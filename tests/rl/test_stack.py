"""How a run's parts are opened and closed. Runs with real parts are in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rl.stack as stack_module
from numerics.errors import UserError
from rl.run_dir import RunDir, create_run_dir
from rl.spec import parse_spec
from rl.stack import Stack, load_data


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path, "it")


def values(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"path": "absent"}, "data": {"train": "absent"}, "run": {"steps": 3}, **sections}


def test_what_was_started_is_ended_in_reverse_when_a_later_part_fails(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Cluster:
        def __init__(self, logs: Path) -> None: ...

        def __enter__(self) -> None:
            events.append("ray")

        def __exit__(self, *_: object) -> None:
            events.append("ray ended")

    class Pool:
        def stop(self) -> None:
            events.append("engines ended")

    def start_pool(*_: object) -> Pool:
        events.append("engines")
        return Pool()

    def refuse(*_: object, **__: object) -> None:
        raise UserError("trainer: found no room")

    monkeypatch.setattr(stack_module, "ray_cluster", Cluster)
    monkeypatch.setattr(stack_module, "convert_checkpoint", lambda *_: (run.path / "served/start").mkdir(parents=True))
    monkeypatch.setattr(stack_module.EnginePool, "start", start_pool)
    monkeypatch.setattr(stack_module.TrainerGroup, "start", refuse)
    with pytest.raises(UserError, match="no room"):
        Stack.open(parse_spec(values()), run)
    assert events == ["ray", "engines", "engines ended", "ray ended"]
    assert not (run.path / "served").exists(), "the converted checkpoint is only for the start"
    assert "found no room" in run.log.read_text()


def test_evaluation_data_is_as_long_as_asked(tmp_path: Path) -> None:
    for name, count in (("train", 5), ("eval", 4)):
        lines = [json.dumps({"question": f"{name} {n}", "answer": "#### 1"}) + "\n" for n in range(count)]
        (tmp_path / name).write_text("".join(lines))
    data = {"train": str(tmp_path / "train"), "eval": str(tmp_path / "eval")}
    train, held_out = load_data(parse_spec(values(data=data, eval={"problems": 2})))
    assert len(train) == 5
    assert [problem.question for problem in held_out] == ["eval 0", "eval 1"]
    assert load_data(parse_spec(values(data=data, eval={"problems": 0})))[1] == []

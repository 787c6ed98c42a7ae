from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fp8rl.rl.run.syncing import DeviceTurns
from fp8rl.rollout.engine import Slept
from fp8rl.trainer.step.result import MovedAside


def test_a_side_keeps_the_device_for_its_block_and_the_other_waits_for_its_end() -> None:
    turns = DeviceTurns()
    with turns.turn("train"), turns.turn("train"):
        with pytest.raises(RuntimeError, match="found the turn of train, expected it to have ended before .* rollout"):
            with turns.turn("rollout"):
                pass
    with pytest.raises(ZeroDivisionError), turns.turn("rollout"):
        raise ZeroDivisionError
    with turns.turn("train"):
        pass


class Sides:
    """Engines and a trainer that say in which order they were asked."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.behind = [100, 103]
        self.turns = DeviceTurns((cast(Any, self), cast(Any, self)))

    def sleep(self) -> list[Slept]:
        self.said.append("engines sleep")
        return [Slept(60, 90), Slept(61, self.behind.pop(0))]

    def wake(self) -> None:
        self.said.append("engines wake")

    def offload(self) -> list[MovedAside]:
        self.said.append("trainer goes")
        return [MovedAside(30, 9), MovedAside(31, 7)]

    def onload(self) -> None:
        self.said.append("trainer comes")


def test_a_side_goes_before_the_other_comes_and_only_where_the_turn_changes() -> None:
    sides = Sides()
    with sides.turns.turn("train"):
        assert sides.said == [], "the trainer is there first"
    for side in ("rollout", "rollout", "train", "train"):
        with sides.turns.turn(side):
            sides.said.append(side)
    out = ["trainer goes", "engines wake", "rollout", "rollout"]
    assert sides.said == [*out, "engines sleep", "trainer comes", "train", "train"]


def test_bytes_are_those_of_the_fullest_and_growth_is_told_from_the_first_time() -> None:
    sides = Sides()
    for side in ("rollout", "train"):
        with sides.turns.turn(side):
            pass
    found = sides.turns.metrics()
    assert found.pop("perf/turn_seconds") >= 0.0
    assert found == {
        "memory/engine_released_bytes": 61.0,
        "memory/behind_bytes": 100.0,
        "memory/behind_growth_bytes": 0.0,
        "memory/trainer_moved_bytes": 30.0,
        "memory/trainer_stays_bytes": 9.0,
    }
    assert sides.turns.metrics() == {}
    for side in ("rollout", "train"):
        with sides.turns.turn(side):
            pass
    assert sides.turns.metrics()["memory/behind_growth_bytes"] == 3.0


def test_a_turn_that_finds_no_room_begins_again_from_the_start() -> None:
    sides, failing = Sides(), SimpleNamespace(left=1)
    go = sides.offload

    def fail_once() -> list[MovedAside]:
        failing.left -= 1
        if failing.left == 0:
            raise MemoryError
        return go()

    cast(Any, sides).offload = fail_once
    with pytest.raises(MemoryError), sides.turns.turn("rollout"):
        pass
    with sides.turns.turn("rollout"):
        assert sides.said == ["trainer goes", "engines wake"]

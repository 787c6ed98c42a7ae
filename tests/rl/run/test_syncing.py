"""The retry policy of a sync. Real engines and real faults are in tests/e2e."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rl.run.events import Events
from fp8rl.rl.run.syncing import DeviceTurns, Syncing
from fp8rl.rollout.engine.server.client import Slept
from fp8rl.rollout.types import Endpoint
from fp8rl.trainer.distributed.offload import OffloadReport
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.weight_sync.manifest import SyncError

CANARY = Canary([3, 4], [5], seed=-9, exact=True)
FIRST, SECOND = Endpoint("first", "", ""), Endpoint("second", "", "")


class Side:
    """Both ends of a sync: a bridge that fails as often as it is told, and engines of which some are lost then."""

    def __init__(self, failures: int = 0, lost: Endpoint | None = None) -> None:
        self.trainer = SimpleNamespace(weight_version=7, begin_score=self.begin_score)
        self.failures, self.lost = failures, lost
        self.there, self.serving, self.said = [FIRST, SECOND], cast(list[Endpoint], []), cast(list[str], [])
        self.syncs: list[tuple[list[Endpoint], bool]] = []
        events = Events()
        events.subscribe(lambda metric, count, text: self.said.append(text))
        self.syncing = Syncing(cast(Any, self), cast(Any, self), events, DeviceTurns())
        self.steps: list[str] = []

    def sync(self, endpoints: list[Endpoint], manifest: Path | None, *, whole: bool) -> str:
        self.syncs.append((endpoints, whole))
        if self.failures:
            self.failures -= 1
            raise SyncError("found something on the way")
        return "report"

    def up(self) -> list[Endpoint]:
        return self.there

    def waiting(self) -> list[Endpoint]:
        return [endpoint for endpoint in self.there if endpoint not in self.serving]

    def expect(self, version: int) -> None:
        assert version == 7

    def any_lost(self, endpoints: list[Endpoint]) -> bool:
        found = self.lost in endpoints
        self.there = [endpoint for endpoint in self.there if endpoint != self.lost]
        return found

    def verified(self, endpoints: list[Endpoint]) -> None:
        self.serving += endpoints
        self.steps.append("verified")

    def begin_score(self, batch: TokenBatch) -> Any:
        self.steps.append("scored")
        return lambda: batch

    def run_canaries(self, endpoints: list[Endpoint], canary: Canary, version: int, score: Callable[[], Any]) -> None:
        assert score().tokens.tolist() == [canary.prompt_ids + canary.answer_ids] and canary == CANARY
        self.steps.append(f"canary at {version}: {[endpoint.url for endpoint in endpoints]}")


def test_a_sync_that_fails_although_all_engines_live_is_done_once_more_and_whole() -> None:
    side = Side(failures=1)
    assert cast(Any, side.syncing.sync()) == "report"
    assert side.syncs == [([FIRST, SECOND], False), ([FIRST, SECOND], True)] and side.serving == [FIRST, SECOND]
    assert side.said == ["a sync failed and is retried: found something on the way"]
    twice = Side(failures=2)
    with pytest.raises(SyncError):
        twice.syncing.sync()
    assert len(twice.syncs) == 2 and twice.serving == [] and len(twice.said) == 1


def test_an_engine_that_is_lost_within_a_sync_is_left_out_and_no_fault_of_the_sync() -> None:
    side = Side(failures=1, lost=SECOND)
    side.syncing.sync()
    assert side.syncs == [([FIRST, SECOND], False), ([FIRST], False)] and side.serving == [FIRST] and side.said == []
    newcomer = Side(failures=1, lost=SECOND)
    newcomer.serving = [FIRST]
    newcomer.syncing.sync_new_engines()
    assert newcomer.syncs == [([SECOND], False)] and newcomer.serving == [FIRST], "nobody else waits for weights"


def test_the_canary_is_asked_of_the_engines_of_a_sync_before_they_get_groups() -> None:
    side = Side(failures=1, lost=SECOND)
    side.syncing.canary = CANARY
    side.syncing.sync()
    assert side.steps == ["scored", "canary at 7: ['first']", "verified"]
    without = Side()
    without.syncing.sync()
    assert without.steps == ["verified"]


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

    def offload(self) -> list[OffloadReport]:
        self.said.append("trainer goes")
        return [OffloadReport(30, 9), OffloadReport(31, 7)]

    def onload(self) -> None:
        self.said.append("trainer comes")


def test_a_side_goes_before_the_other_comes_and_only_where_the_turn_changes() -> None:
    sides = Sides()
    with sides.turns.turn("train"):
        assert sides.said == [], "the trainer is there first"
        with pytest.raises(RuntimeError, match="found the turn of train, expected it to end before .* rollout"):
            with sides.turns.turn("rollout"):
                pass
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
    expected = {"engine_released": 61.0, "behind": 100.0, "behind_growth": 0.0}
    expected |= {"trainer_moved": 30.0, "trainer_stays": 9.0}
    assert found == {f"memory/{name}_bytes": value for name, value in expected.items()}
    assert sides.turns.metrics() == {}
    for side in ("rollout", "train"):
        with sides.turns.turn(side):
            pass
    assert sides.turns.metrics()["memory/behind_growth_bytes"] == 3.0


def test_a_turn_that_finds_no_room_begins_again_from_the_start() -> None:
    sides, failing = Sides(), SimpleNamespace(left=1)
    go = sides.offload

    def fail_once() -> list[OffloadReport]:
        failing.left -= 1
        if failing.left == 0:
            raise MemoryError
        return go()

    cast(Any, sides).offload = fail_once
    with pytest.raises(MemoryError), sides.turns.turn("rollout"):
        pass
    with sides.turns.turn("rollout"):
        assert sides.said == ["trainer goes", "engines wake"]

"""The retry policy of a sync. Real engines and real faults are in tests/e2e."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fp8rl.rl.run.engines.slot import Canary, Expected
from fp8rl.rl.run.events import Events
from fp8rl.rl.run.syncing import DeviceTurns, Syncing
from fp8rl.rollout.types import Endpoint
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

    def prove(self, endpoints: list[Endpoint], expected: Expected) -> None:
        assert cast(Any, expected.scored()).tokens.tolist() == [CANARY.prompt_ids + CANARY.answer_ids]
        self.steps.append(f"proven at {expected.version}: {[endpoint.url for endpoint in endpoints]}")


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
    newcomer.syncing.welcome()
    assert newcomer.syncs == [([SECOND], False)] and newcomer.serving == [FIRST], "nobody else waits for weights"


def test_the_canary_is_asked_of_the_engines_of_a_sync_before_they_get_groups() -> None:
    side = Side(failures=1, lost=SECOND)
    side.syncing.renew(cast(Any, side), CANARY)
    side.syncing.sync()
    assert side.steps == ["scored", "proven at 7: ['first']", "verified"]
    without = Side()
    without.syncing.sync()
    assert without.steps == ["verified"]

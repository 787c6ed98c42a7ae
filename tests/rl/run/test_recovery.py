"""The order of recovery, on engines and a bridge that only take notes; real deaths are in tests/e2e."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rl.run.engines import EnginePool
from rl.run.recovery import ENGINES_REPLACED, STALE_RESYNCS, recovering, resyncing
from rollout.errors import StaleWeightsError
from rollout.types import Endpoint
from trainer.actor import TrainerGroup
from weight_sync.bridge import Bridge

NEW = [Endpoint("http://new", "key", "admin")]


class Engines(EnginePool):
    """Two engines, of which `dead` have died."""

    def __init__(self, dead: int, notes: list[Any]) -> None:
        super().__init__([object(), object()], [])
        self._dead, self._notes = dead, notes

    def lost(self) -> int:
        return self._dead

    def recover(self, checkpoint: Path, version: int) -> int:
        self._notes.append(("recover", checkpoint, version))
        return self._dead

    def endpoints(self) -> list[Endpoint]:
        return NEW


class NotedBridge(Bridge):
    def __init__(self, notes: list[Any]) -> None:
        trainer = TrainerGroup([])
        trainer.weight_version = 7
        object.__setattr__(self, "trainer", trainer)
        object.__setattr__(self, "notes", notes)

    def write_checkpoint(self) -> Path:
        self.notes.append("write")
        return Path("served")

    def sync(self, endpoints: Sequence[Endpoint], manifest_path: Path | None = None) -> None:
        self.notes.append(("sync", endpoints))


@dataclass
class Notes:
    """The parts of a recovery; `said` lists what was done with them, in order."""

    dead: int
    said: list[Any] = field(default_factory=list)

    def parts(self) -> tuple[EnginePool, Bridge, Callable[..., None]]:
        def tell(metric: str, count: int, text: str) -> None:
            self.said.append((metric, count, text))

        return Engines(self.dead, self.said), NotedBridge(self.said), tell


BROKEN = ConnectionError("broken\nwith details")


def failing(times: int, error: Exception = BROKEN) -> Callable[[], int]:
    """Raises that often, and then gives the number of its calls."""
    calls = []

    def use() -> int:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return len(calls)

    return use


def test_a_dead_engine_is_replaced_from_the_current_weights_and_synced_before_the_next_use() -> None:
    notes = Notes(dead=1)
    assert recovering(*notes.parts(), failing(1)) == 2
    assert notes.said == [
        (ENGINES_REPLACED, 1, "engine died: replacing 1 of 2 (broken)"),
        "write",
        ("recover", Path("served"), 7),
        ("sync", NEW),
    ]


def test_other_failures_are_raised_as_they_came() -> None:
    notes = Notes(dead=0)
    with pytest.raises(ConnectionError, match="broken"):
        recovering(*notes.parts(), failing(1))
    assert notes.said == []


def test_a_second_death_ends_the_run() -> None:
    with pytest.raises(ConnectionError, match="broken"):
        recovering(*Notes(dead=2).parts(), failing(2))


def test_nothing_happens_where_nothing_fails() -> None:
    notes = Notes(dead=1)
    assert recovering(*notes.parts(), failing(0)) == 1
    assert notes.said == []


def test_stale_weights_are_synced_and_sampled_again_once() -> None:
    notes = Notes(dead=0)
    assert resyncing(*notes.parts(), failing(1, StaleWeightsError("4 of 9 tokens"))) == 2
    assert notes.said == [
        (STALE_RESYNCS, 1, "stale weights: syncing and sampling again (4 of 9 tokens)"),
        ("sync", NEW),
    ]
    with pytest.raises(StaleWeightsError):
        resyncing(*notes.parts(), failing(2, StaleWeightsError("again")))

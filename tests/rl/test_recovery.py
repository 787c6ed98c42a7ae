"""Recovery from an engine's death, against a pool and a bridge that only take notes."""

from types import SimpleNamespace
from typing import Any

import pytest

from rl.guard.standing import Standing
from rl.recovery import recovering, resyncing
from rollout.errors import StaleWeightsError


class Notes:
    """A stack whose engines are as dead as `lost` says; `said` lists what was done with them."""

    def __init__(self, lost: int) -> None:
        self.said: list[Any] = []
        note = self.said.append
        self.pool = SimpleNamespace(lost=lambda: lost, recover=lambda path, version: note(("recover", path, version)))
        self.bridge = SimpleNamespace(
            write_checkpoint=lambda: note("write") or "served", sync=lambda endpoints: note(("sync", endpoints))
        )
        self.trainer = SimpleNamespace(weight_version=7)
        self.spec = SimpleNamespace(rollout=SimpleNamespace(engines=2))
        self.standing = Standing()

    def endpoints(self) -> list[str]:
        return ["new"]

    def warn(self, text: str) -> None:
        self.said.append(text)


BROKEN = ConnectionError("broken\nwith details")


def failing(times: int, error: Exception = BROKEN) -> Any:
    """Raises that often, and then gives the number of its calls."""
    calls = []

    def use() -> int:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return len(calls)

    return use


def test_a_dead_engine_is_replaced_from_the_current_weights_and_synced_before_the_next_use() -> None:
    stack = Notes(lost=1)
    assert recovering(stack, failing(1)) == 2  # type: ignore[arg-type]
    assert stack.said == [
        "engine died: replacing 1 of 2 (broken)",
        "write",
        ("recover", "served", 7),
        ("sync", ["new"]),
    ]


def test_other_failures_are_raised_as_they_came() -> None:
    stack = Notes(lost=0)
    with pytest.raises(ConnectionError, match="broken"):
        recovering(stack, failing(1))  # type: ignore[arg-type]
    assert stack.said == []


def test_a_second_death_ends_the_run() -> None:
    with pytest.raises(ConnectionError, match="broken"):
        recovering(Notes(lost=2), failing(2))  # type: ignore[arg-type]


def test_nothing_happens_where_nothing_fails() -> None:
    stack = Notes(lost=1)
    assert recovering(stack, failing(0)) == 1  # type: ignore[arg-type]
    assert stack.said == []


def test_stale_weights_are_synced_and_sampled_again_once() -> None:
    stack = Notes(lost=0)
    assert resyncing(stack, failing(1, StaleWeightsError("4 of 9 tokens"))) == 2  # type: ignore[arg-type]
    assert stack.said == ["stale weights: syncing and sampling again (4 of 9 tokens)", ("sync", ["new"])]
    assert stack.standing.stale_resyncs == 1
    with pytest.raises(StaleWeightsError):
        resyncing(stack, failing(2, StaleWeightsError("again")))  # type: ignore[arg-type]

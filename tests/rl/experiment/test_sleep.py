"""What a spec may say of engines that sleep while the trainer works."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.numerics.errors import UserError
from tests.support.experiments import experiment


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rollout": {"staleness": 1}}, "true with rollout.staleness=1"),
        ({"rollout": {"staleness": 1, "in_flight": True, "oversample": 1.5}}, "true with rollout.staleness=1"),
        ({"sync": {"delta": True}}, "true with sync.delta=true"),
        ({"sync": {"transport": "distributed"}}, "true with sync.transport=distributed"),
    ],
)
def test_engines_that_could_not_wake_or_make_room_are_refused_in_one_message(changes: Any, found: str) -> None:
    rollout = {"sleep": True, **changes.get("rollout", {})}
    with pytest.raises(UserError, match=f"^rollout.sleep: found '{found}', expected .+ (Set|Remove) ") as refused:
        experiment(**{**changes, "rollout": rollout})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_they_may_sleep_with_a_sync_that_sends_everything(transport: str) -> None:
    assert experiment(rollout={"sleep": True}, sync={"transport": transport}).rollout.sleep
    assert not experiment().rollout.sleep

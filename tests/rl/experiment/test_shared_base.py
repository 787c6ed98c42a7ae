"""What a spec may say of frozen weights that both sides read from the same memory."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from tests.support.experiments import experiment

ADAPTER = {"rank": 4, "alpha": 8.0}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"adapter": {**ADAPTER, "mode": "merged"}}, "no frozen weights are served"),
        ({"sync": {"transport": "disk"}}, "sync.transport is disk"),
        ({"rollout": {"tp": 2}}, "an engine of 2 ranks"),
        ({"numerics": {"rollout": "bf16"}}, "the two sides do not compute in one spec"),
    ],
)
def test_engines_that_cannot_read_the_trainers_memory_are_refused(changes: Any, found: str) -> None:
    sync = {"shared_base": True, **changes.get("sync", {})}
    with pytest.raises(UserError, match=f"^sync.shared_base: found 'true, and {found}.*', expected .+ Set ") as refused:
        experiment(**{"adapter": ADAPTER, **changes, "sync": sync})
    assert "\n" not in str(refused.value)


def test_one_base_goes_with_separate_adapters() -> None:
    assert experiment(adapter=ADAPTER, sync={"shared_base": True}).sync.shared_base
    assert not experiment().sync.shared_base

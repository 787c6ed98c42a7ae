"""What a spec may say of sampling ahead of training."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from tests.support.experiments import experiment


@pytest.mark.parametrize(
    ("rollout", "in_flight"),
    [
        ({}, False),
        ({"staleness": 1}, False),
        ({"staleness": 1, "in_flight": True}, True),
        ({"staleness": 2}, True),
        ({"staleness": 0, "in_flight": False}, False),
    ],
)
def test_updates_land_in_flight_where_asked_and_always_beyond_one_step(rollout: Any, in_flight: bool) -> None:
    assert experiment(rollout=rollout).rollout.updates_in_flight is in_flight


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"in_flight": True}}, "found in_flight=true with staleness=0, expected false"),
        ({"rollout": {"staleness": 2, "in_flight": False}}, "found in_flight=false with staleness=2, expected true"),
        ({"rollout": {"staleness": -1}}, "rollout.staleness: found -1"),
        ({"rollout": {"oversample": 1.5}}, "found oversample=1.5 with staleness=0 and in_flight=false"),
        ({"rollout": {"oversample": 1.5, "staleness": 1}}, "rollout.in_flight=true"),
        (
            {
                "rollout": {"staleness": 1},
                "gates": [{"metric": "train/loss", "above": 0.1, "action": "tighten_tis"}],
            },
            "less than algorithm.tis_cap=None",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiment(**changes)


def test_old_keys_are_allowed_where_nothing_is_promised() -> None:
    changes = {"sync": {"pause": "in_place"}, "numerics": {"mode": "native"}, "rollout": {"staleness": 3}}
    assert experiment(**changes).sync.pause == "in_place"


def test_the_resolved_spec_says_where_the_ratio_comes_from() -> None:
    assert experiment(rollout={"staleness": 1}).to_dict()["algorithm"]["ratio"] == "bypass"
    assert experiment().to_dict()["algorithm"]["ratio"] == "recompute"

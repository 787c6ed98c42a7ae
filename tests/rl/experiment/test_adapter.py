"""What a spec may say of adapters."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from tests.support.experiments import experiment


def test_left_out_all_weights_are_trained() -> None:
    assert experiment().adapter is None
    given = experiment(adapter={"rank": 8, "targets": ["q_proj"]}).adapter
    assert given is not None and (given.mode, given.experts, given.scale) == ("separate", "per_expert", 4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"rank": 0}}, "adapter.rank: found 0"),
        ({"adapter": {"targets": []}}, "adapter.targets"),
        ({"adapter": {"dora": True}}, "adapter.dora"),
        ({"adapter": {"mode": "both"}}, "adapter.mode: found 'both'"),
        (
            {"gates": [{"metric": "train/update_survival", "below": 0.5, "action": "warn"}]},
            "train/update_survival with adapter.mode=None",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_message(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=".") as refused:
        experiment(**changes)
    assert message in str(refused.value)

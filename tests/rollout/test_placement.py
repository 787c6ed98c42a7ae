"""Engines on GPUs: shared with the trainer, or reserved."""

from __future__ import annotations

import pytest

from numerics.errors import UserError
from rollout.placement import Placement, placement


@pytest.mark.parametrize(
    ("engines", "gpus", "ranks", "own", "expected"),
    [
        (2, 0, 4, True, Placement(0, (0, 0))),
        (2, 0, 4, False, Placement(0, (0, 0))),
        (1, 1, 1, False, Placement(0, (0,))),
        (3, 8, 4, False, Placement(0, (4, 5, 6))),
        (4, 6, 4, False, Placement(0, (4, 5, 0, 1))),
        (4, 8, 4, True, Placement(1, (0, 0, 0, 0))),
    ],
)
def test_by_hand(engines: int, gpus: int, ranks: int, own: bool, expected: Placement) -> None:
    assert placement(engines, gpus, ranks, own) == expected


def test_too_few_gpus_for_each_to_have_its_own() -> None:
    with pytest.raises(UserError, match=r"sync.transport: .*1 trainer rank\(s\) and 1 engine\(s\); the cluster has 1"):
        placement(1, 1, 1, own=True)

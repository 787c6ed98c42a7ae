from __future__ import annotations

import pytest

from rl.run.turns import Turns


def test_a_side_keeps_the_device_for_its_block_and_the_other_waits_for_its_end() -> None:
    turns = Turns()
    with turns.turn("train"), turns.turn("train"):
        with pytest.raises(RuntimeError, match="found the turn of train, expected it to have ended before .* rollout"):
            with turns.turn("rollout"):
                pass
    with pytest.raises(ZeroDivisionError), turns.turn("rollout"):
        raise ZeroDivisionError
    with turns.turn("train"):
        pass

"""Coroutines beside the training loop, while it runs and after it has closed them."""

from __future__ import annotations

import asyncio

from rl.run.background import Background


async def number(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_what_is_begun_after_the_end_is_cancelled_and_says_nothing() -> None:
    """Answers may come in after a run has closed what judges them."""
    background = Background("test")
    assert background.run(number(3)) == 3
    background.close()
    assert background.begin(number(4)).cancelled()

"""Coroutines beside the training loop, while it runs and after it has closed them."""

from __future__ import annotations

import asyncio
import threading

import pytest

import fp8rl.rl.run.background as background_module
from fp8rl.rl.run.background import Background


def test_a_loop_that_is_held_up_keeps_no_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background_module, "_TURN_SECONDS", 0.2)
    free = threading.Event()

    async def never_awaits() -> None:
        free.wait(60)

    background = Background("test")
    background.begin(never_awaits())
    with pytest.raises(TimeoutError):
        background.run(number(3), 0.2)
    background.close()
    assert background.closed and background.begin(number(4)).cancelled() and "thread test" in caplog.text
    free.set()


async def number(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_what_is_begun_after_the_end_is_cancelled_and_says_nothing() -> None:
    """Answers may come in after a run has closed what judges them."""
    background = Background("test")
    assert background.run(number(3)) == 3
    background.close()
    assert background.begin(number(4)).cancelled()

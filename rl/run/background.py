"""An event loop in a thread of its own, for what goes on while the training loop waits for something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_TURN_SECONDS = 2.0
"""Within which a coroutine has its turn, on a busy machine too."""


class Background:
    """Runs coroutines beside the thread that made it, one at a time and taking turns."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Let it run; its result in time. After `close` nothing runs, and what was asked for is cancelled."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            if not self.closed:
                raise
        coroutine.close()
        given_up: Future[Result] = Future()
        given_up.cancel()
        return given_up

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Wait for its result. An interrupt leaves it running."""
        return self.begin(coroutine).result()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def takes_turns(self) -> bool:
        """Whether a coroutine gets its turn: one that never awaits keeps it from all others."""
        try:
            self.begin(asyncio.sleep(0)).result(_TURN_SECONDS)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cancel what still runs, and end the thread; one that is held up ends with the process. A second call does
        nothing."""
        if not self.closed and self.takes_turns():
            self.run(_cancel_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

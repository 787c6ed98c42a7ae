"""An event loop in a thread of its own, for work that goes on while the training loop does something else."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from fp8rl.rollout.deadlines import GRACE_S, end

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_EVENT_SECONDS = 0.5
"""Interval at which `waited` delivers events."""
_TURN_SECONDS = 2.0
"""Time within which every coroutine gets its turn, even on a busy machine."""


class BlockedError(RuntimeError):
    """A user's function blocks all others, because it never awaits."""


class Background:
    """Runs coroutines in a thread of its own, where they take turns."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self.closed = False
        self._turn, self._asked = self.begin(asyncio.sleep(0)), time.monotonic()

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine, and return a future of its result; after `close`, a cancelled future."""
        try:
            if not self.closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
        coroutine.close()
        given_up: Future[Result] = Future()
        given_up.cancel()
        given_up.set_running_or_notify_cancel()  # or `wait` would not see its end
        return given_up

    def run(self, coroutine: Coroutine[Any, Any, Result], seconds: float | None = None) -> Result:
        """Run a coroutine and return its result. An interrupt leaves the coroutine running.

        Raises TimeoutError: there is no result after `seconds`; the coroutine is cancelled.
        """
        begun = self.begin(coroutine)
        try:
            return begun.result(seconds)
        except TimeoutError:
            begun.cancel()
            raise

    def check(self, seconds: float, key: str, what: str, remedy: str) -> None:
        """Raise BlockedError if no coroutine got its turn within `seconds`. key: the spec's key of
        this limit. what: names the function that runs here.

        This does not wait. Call it from time to time: each call asks for a turn, and looks at the one asked for before.
        """
        if self._turn.done():
            self._turn, self._asked = self.begin(asyncio.sleep(0)), time.monotonic()
        elif time.monotonic() - self._asked > seconds + _TURN_SECONDS:
            found = f"found {what} that has blocked all others for {seconds:g} s ({key})"
            raise BlockedError(f"{found}, expected it to wait with await. {remedy}")

    def close(self) -> None:
        """Cancel all coroutines and end the thread; a blocked one ends with the process. A second call does nothing."""
        if self.closed:
            return
        with suppress(TimeoutError):  # of a coroutine that never awaits, or that takes long to end
            self.run(asyncio.sleep(0), _TURN_SECONDS)
            self.run(end_all(), 2 * GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TURN_SECONDS)
        self.closed = True
        if self._thread.is_alive():
            logging.getLogger(__name__).warning("the thread %s has not ended", self._thread.name)
        else:
            self._loop.close()


def begun(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Parameters], Future[Result]]:
    """Wrap a coroutine method so that any thread may call it. The coroutine starts in the owner's `Background`."""

    @functools.wraps(method)
    def begin(self: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[Result]:
        return self._background.begin(method(self, *args, **kwargs))

    return begin


def waited(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """Wrap a coroutine method so that the run's own thread may call it, and gets its result when the coroutine ends.
    The owner's events are delivered during the wait: they may explain it."""

    @functools.wraps(method)
    def run(self: Any, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result = self._background.begin(method(self, *args, **kwargs))
        while not wait([result], timeout=_EVENT_SECONDS).done:
            self._events.deliver()
        return result.result()

    return run


async def end_all() -> None:
    """Cancel all other coroutines of this event loop, and wait for their end."""
    await end(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))

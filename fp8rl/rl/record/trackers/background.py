"""Tells trackers of a run, in one thread. No step waits for a tracker, and no error of a tracker reaches the run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fp8rl.rl.record.rollouts import RolloutRecord
from fp8rl.rl.record.trackers import Tracked, Tracker, start

_RECORDS = 1000
"""Records that may wait: rows, sample rollouts and events. Further ones are dropped and counted."""
_FINISH_SECONDS = 150.0
"""Seconds that trackers get at the end of the run. wandb's own upload gives up before."""


class BackgroundTrackers:
    """The trackers of a run, and the queue of what they have not been told yet.

    Args:
        names: of `TRACKERS`.
        lost: told a sentence, in any thread, for each tracker that raises, and at the end for records that are lost.
    """

    def __init__(self, names: Sequence[str], run: Tracked, lost: Callable[[str], object]) -> None:
        self._run, self._lost, self._dropped = run, lost, 0
        self._waiting: queue.Queue[tuple[Any, ...]] = queue.Queue(_RECORDS)
        self._trackers: dict[str, Tracker] = {}
        self._thread = threading.Thread(target=self._serve, args=(names,), name="trackers", daemon=True)
        self._told = bool(names)
        if names:
            self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the row of a step."""
        self._put("log", step, metrics)

    def show(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Pass on sample rollouts of a step, if it is one whose rollouts are shown."""
        if self._run.shows(step):
            self._put("show", step, records)

    def alert(self, text: str) -> None:
        """Pass on an event."""
        self._put("alert", text)

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """Give the trackers a bounded time for what they have not been told yet. A second call does nothing."""
        if not self._told:
            return
        self._told, deadline = False, time.monotonic() + _FINISH_SECONDS
        with suppress(queue.Full):
            self._waiting.put(("finish", exit_code, summary), timeout=_FINISH_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            left = ", ".join(self._trackers) or "a tracker that has not begun"
            self._lost(f"{left}: not ended after {_FINISH_SECONDS:g} s, given up; metrics.jsonl has every row")
        if self._dropped:
            self._lost(f"trackers lack {self._dropped} records, as the queue was full; metrics.jsonl has every row")

    def _put(self, *record: Any) -> None:
        if self._told:
            try:
                self._waiting.put_nowait(record)
            except queue.Full:
                self._dropped += 1

    def _serve(self, names: Sequence[str]) -> None:
        for name in names:
            with self._guarded(name):
                self._trackers[name] = start(name, self._run)
        call = ""
        while call != "finish":
            call, *values = self._waiting.get()
            for name, tracker in list(self._trackers.items()):
                with self._guarded(name):
                    getattr(tracker, call)(*values)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Give up the tracker of this name for whatever the block raises."""
        try:
            yield
        except BaseException as error:  # a library may exit; the thread serves the other trackers
            self._trackers.pop(name, None)
            logging.getLogger(__name__).warning("%s is lost", name, exc_info=True)
            reason = (str(error) or "it said nothing").splitlines()[0]
            self._lost(f"{name} is lost: {type(error).__name__}: {reason}; metrics.jsonl and the report are kept")

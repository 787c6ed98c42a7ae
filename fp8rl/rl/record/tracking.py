"""Records a run's numbers: in metrics.jsonl, in the files of rollouts, and in trackers. A thread of its own calls the
trackers, so that no step waits for a tracker, and no error of a tracker reaches the run."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, Self

from fp8rl.rl.record.metrics_log import MetricsLog
from fp8rl.rl.record.rollouts import RolloutRecord, ScoredRecord, shown, write_rollouts
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import Tracked, Tracker, tracker

Samples = Callable[[], tuple[Sequence[RolloutRecord], Sequence[ScoredRecord]]]


class RunTracker:
    """Records a run, one row per step. Use it as a context manager: an exception in the block marks the run as failed.

    Args:
        run: the run's directory, already created.
        trackers: they get every row, sample rollouts, and the run's end.
        all_rollouts: write all trajectories of a step, not only those that are shown.
        last: the step of the checkpoint that a resumed run starts from; later rows are cut.
    """

    def __init__(self, run: RunDir, trackers: BackgroundTrackers, *, all_rollouts: bool = True, last: int) -> None:
        self._run_dir, self._all_rollouts = run, all_rollouts
        self._metrics = MetricsLog(run.metrics, last)
        self._trackers = trackers
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._to_write: tuple[int, Samples] | None = None
        self._writing: Future[None] | None = None

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples = lambda: ((), ())) -> dict[str, float]:
        """Record a step. Values that are not finite are dropped and counted.

        samples: returns the step's trajectories, and the answers that it scored for later steps. The next `write`
            calls it in the background. The next `log`, `wait` or `finish` raises its error.

        Returns:
            The metrics as written, with `tracking/nonfinite_dropped`.
        """
        self.wait()
        written = self._metrics.append(step, metrics)
        self._trackers.put("log", step, written)
        self._to_write = step, samples
        return written

    def alert(self, text: str) -> None:
        """Send an event to the trackers."""
        self._trackers.put("alert", text)

    def write(self) -> None:
        """Begin to write the trajectories of the last step, in the background."""
        if self._to_write is not None:
            step, samples = self._to_write
            self._to_write, self._writing = None, self._writer.submit(self._write, step, samples)

    def wait(self) -> None:
        """Wait until the trajectories of the last step are on disk."""
        self.write()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, samples: Samples) -> None:
        records, ahead = samples()
        if ahead and self._all_rollouts:
            write_rollouts(self._run_dir.ahead(step), ahead)
        if records:
            write_rollouts(self._run_dir.rollouts(step), records if self._all_rollouts else shown(records))
            if self._trackers.run.shows(step):
                self._trackers.put("show", step, shown(records))

    def finish(self, summary: Mapping[str, Any] | None = None, *, exit_code: int = 0) -> None:
        """Close the log and the trackers, which get `summary`. A second call does nothing."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._metrics.close()
            self._trackers.finish(exit_code, summary or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with nullcontext() if kind is None else suppress(OSError):  # the first error is raised, not one that follows
            self.finish(exit_code=0 if kind is None else 1)


_RECORDS = 1000
"""How many records may wait for trackers: rows, sample rollouts and events. Further records are dropped and counted."""
_FINISH_SECONDS = 150.0
"""Seconds that trackers get at the end of the run. wandb's own upload gives up earlier."""


class BackgroundTrackers:
    """The trackers of a run, and the queue of records that they have not got yet.

    Args:
        names: names in `TRACKERS`.
        lost: gets a sentence, in any thread, for each tracker that raises, and at the end for records that are lost.
    """

    def __init__(self, names: Sequence[str], run: Tracked, lost: Callable[[str], object]) -> None:
        self.run, self._lost, self._dropped = run, lost, 0
        self._waiting: queue.Queue[tuple[Any, ...]] = queue.Queue(_RECORDS)
        self._trackers: dict[str, Tracker] = {}
        self._thread = threading.Thread(target=self._serve, args=(names,), name="trackers", daemon=True)
        self._told = bool(names)
        variables = {name: value for each in names for name, value in tracker(each).variables(run).items()}
        self._new_variables = variables.keys() - os.environ.keys()
        os.environ.update({name: variables[name] for name in self._new_variables})
        if names:
            self._thread.start()

    def put(self, call: Literal["log", "show", "alert"], *values: Any) -> None:
        """Have the trackers' thread call a method of each tracker; if too many calls wait already, count the record."""
        if self._told:
            try:
                self._waiting.put_nowait((call, *values))
            except queue.Full:
                self._dropped += 1

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """Give the trackers a bounded time for the records in the queue. A second call does nothing."""
        if not self._told:
            return
        self._told, deadline = False, time.monotonic() + _FINISH_SECONDS
        with suppress(queue.Full):
            self._waiting.put(("finish", exit_code, summary), timeout=_FINISH_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            left = ", ".join(self._trackers) or "a tracker that has not begun"
            self._lost(f"{left}: not ended after {_FINISH_SECONDS:g} s, given up; metrics.jsonl has every row")
        for variable in self._new_variables:
            os.environ.pop(variable, None)
        if self._dropped:
            self._lost(f"trackers lack {self._dropped} records, as the queue was full; metrics.jsonl has every row")

    def _serve(self, names: Sequence[str]) -> None:
        for name in names:
            with self._guarded(name):
                self._trackers[name] = tracker(name)(self.run)
        call = ""
        while call != "finish":
            call, *values = self._waiting.get()
            for name, each in list(self._trackers.items()):
                with self._guarded(name):
                    getattr(each, call)(*values)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Drop the tracker of this name if the block raises an error."""
        try:
            yield
        except BaseException as error:  # a library may exit; the thread serves the other trackers
            self._trackers.pop(name, None)
            logging.getLogger(__name__).warning("%s is lost", name, exc_info=True)
            reason = (str(error) or "no message").splitlines()[0]
            self._lost(f"{name} is lost: {type(error).__name__}: {reason}; metrics.jsonl and the report are kept")

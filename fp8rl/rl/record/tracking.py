"""Record a run's numbers: metrics.jsonl, trackers and the files of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, Self

from fp8rl.rl.record.metrics_log import MetricsLog
from fp8rl.rl.record.rollouts import RolloutRecord, ScoredRecord, shown, write_rollouts
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers.background import BackgroundTrackers

Samples = Callable[[], tuple[Sequence[RolloutRecord], Sequence[ScoredRecord]]]


class RunTracker:
    """Records a run, one row per step. Use it as a context manager: leaving by an exception marks the run as failed.

    Args:
        run: the run's directory, already created.
        all_rollouts: write all trajectories of a step, not only those that are shown.
        resume_step: the step of the checkpoint that a resumed run starts from; later rows are cut.
        trackers: told of every row, of sample rollouts and of the end.
    """

    def __init__(
        self, run: RunDir, trackers: BackgroundTrackers, *, all_rollouts: bool = True, resume_step: int | None = None
    ) -> None:
        self._run_dir, self._all_rollouts = run, all_rollouts
        self._metrics = MetricsLog(run.metrics, resume_step=resume_step)
        self._trackers = trackers
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._to_write: tuple[int, Samples] | None = None
        self._writing: Future[None] | None = None

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples = lambda: ((), ())) -> dict[str, float]:
        """Record a step, steps rising strictly. Values that are not finite are dropped and counted.

        samples: gives the step's trajectories, and answers to later steps that were scored in it. They are put together
            and written at the next `write`; a failure is raised by the next `log`, `wait` or `finish`.

        Returns:
            The metrics as written, with `tracking/nonfinite_dropped`.
        """
        self.wait()
        written = self._metrics.append(step, metrics)
        self._trackers.log(step, written)
        self._to_write = step, samples
        return written

    def alert(self, text: str) -> None:
        """Tell the trackers of an event."""
        self._trackers.alert(text)

    def write(self) -> None:
        """Begin to write the trajectories of the last step; it goes on beside whatever the caller waits for."""
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
            self._trackers.show(step, shown(records))

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with nullcontext() if kind is None else suppress(OSError):  # what ends the run is said, not what follows
            self.finish(exit_code=0 if kind is None else 1)

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
from fp8rl.rl.record.trackers.beside import Beside
from fp8rl.rl.record.wandb_run import WandbRun, table

TABLE_EVERY = 10
"""Steps between tables of rollouts in wandb, which are slow to write; the files have those of every step."""

Samples = Callable[[], tuple[Sequence[RolloutRecord], Sequence[ScoredRecord]]]

WANDB_LOST = "tracking/wandb_lost"
TRACKER_LOST = "tracking/tracker_lost"


class RunTracker:
    """Records a run, one row per step. Use it as a context manager: leaving by an exception marks the run as failed.

    Args:
        run: the run's directory, already created.
        last_step: the one after which there is nothing more to record.
        all_rollouts: write all trajectories of a step, not only those that are shown.
        resume_step: the step of the checkpoint that a resumed run starts from; later rows are cut.
        beside: starts the trackers beside wandb, once later rows are cut.
    """

    def __init__(
        self,
        run: RunDir,
        wandb_run: WandbRun,
        *,
        last_step: int,
        all_rollouts: bool = True,
        resume_step: int | None = None,
        beside: Callable[[], Beside | None] = lambda: None,
    ) -> None:
        self._run_dir, self._all_rollouts, self._last_step = run, all_rollouts, last_step
        self._metrics = MetricsLog(run.metrics, resume_step=resume_step)
        self._wandb = wandb_run
        self.beside = beside()
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._to_write: tuple[int, Samples] | None = None
        self._writing: Future[list[RolloutRecord]] | None = None

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples = lambda: ((), ())) -> dict[str, float]:
        """Record a step, steps rising strictly. Values that are not finite are dropped and counted.

        samples: gives the step's trajectories, and answers to later steps that were scored in it. They are put together
            and written at the next `write`; a failure is raised by the next `log`, `wait` or `finish`.

        Returns:
            The metrics as written, with `tracking/nonfinite_dropped`.
        """
        self.wait()
        if self._wandb.is_lost:
            metrics = {**metrics, WANDB_LOST: 1.0}
        if self.beside is not None and self.beside.look():
            metrics = {**metrics, TRACKER_LOST: 1.0}
        written = self._metrics.append(step, metrics)
        row: dict[str, Any] = {"step": step, **written}
        self._to_write = step, samples
        if (step % TABLE_EVERY == 0 or step == self._last_step) and (records := self.wait()):
            row["rollout/samples"] = table(
                ["prompt", "conversation", "reward", "parts of it", "outcome", "mean abs d", "d by token"],
                [_row_of_table(record) for record in records],
            )
        self._wandb.log(row)
        return written

    def write(self) -> None:
        """Begin to write the trajectories of the last step; it goes on beside whatever the caller waits for."""
        if self._to_write is not None:
            step, samples = self._to_write
            self._to_write, self._writing = None, self._writer.submit(self._written, step, samples)

    def wait(self) -> list[RolloutRecord]:
        """Until the trajectories of the last step are on disk; those that a person is shown, the first time."""
        self.write()
        writing, self._writing = self._writing, None
        return [] if writing is None else writing.result()

    def _written(self, step: int, samples: Samples) -> list[RolloutRecord]:
        """Write the trajectories of a step; those that a person is shown."""
        records, ahead = samples()
        if ahead and self._all_rollouts:
            write_rollouts(self._run_dir.ahead(step), ahead)
        if records:
            write_rollouts(self._run_dir.rollouts(step), records if self._all_rollouts else shown(records))
        return shown(records)

    def alert(self, text: str) -> None:
        """An alert in wandb, for what somebody should look at."""
        self._wandb.alert(f"{self._run_dir.name}: {text.split(':')[0]}", text)

    def finish(self, summary: Mapping[str, Any] | None = None, *, exit_code: int = 0) -> None:
        """Close the log and the trackers; `summary` goes into wandb's run summary. A second call does nothing."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._metrics.close()
            if self.beside is not None:
                self.beside.finish(failed=exit_code != 0)
            self._wandb.finish(summary or {}, exit_code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with nullcontext() if kind is None else suppress(OSError):  # what ends the run is said, not what follows
            self.finish(exit_code=0 if kind is None else 1)


def _row_of_table(record: RolloutRecord) -> list[Any]:
    turns = "\n".join(f"{by}: {text}" for by, text in record.said) or record.text
    pairs = zip(record.train_logprobs, record.rollout_logprobs, strict=True)
    by_token = " ".join(f"{train - rollout:.3g}" for train, rollout in pairs)
    parts, outcome = _listed(record.reward_parts), _listed(record.outcome)
    return [record.prompt, turns, record.reward, parts, outcome, record.abs_diff_mean, by_token]


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in parts.items())

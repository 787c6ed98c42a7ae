"""Where a run's numbers go: metrics.jsonl, wandb and the files of rollouts."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import wandb
from pydantic import BaseModel, ConfigDict, Field

from numerics.files import write_atomically
from rl.record.metrics_log import MetricsLog
from rl.record.rollouts import RolloutRecord, shown, write_rollouts
from rl.record.run_dir import RunDir

METRIC_GROUPS = ("rollout", "train", "mismatch", "gates", "sync", "perf", "eval", "tracking")

SUMMARIES = {
    "mismatch/train_rollout_logprob_abs_diff_max": "max",
    "mismatch/nonfinite_count": "max",
    "mismatch/exact_frac": "min",
    "sync/mismatched_tensors": "max",
    "eval/accuracy": "last",
}
"""Metrics whose worst or last value, not the last row's, stands for the run in wandb's summary."""

TABLE_EVERY = 10
"""Steps between tables of rollouts in wandb, which are slow to write; the files have those of every step."""

_DATA_DIR = "WANDB_DATA_DIR"


class WandbConfig(BaseModel):
    """The `tracking.wandb:` section of an experiment."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Literal["offline", "online", "disabled"] = "offline"
    project: str = Field(default="fp8rl", min_length=1)


class Tracker:
    """Records a run, one row per step. Use it as a context manager: leaving by an exception marks the run as failed.

    Args:
        run: the run's directory, already created.
        experiment: resolved, as plain values.
        all_rollouts: write all trajectories of a step, not only those that are shown.
        resume_step: the step of the checkpoint that a resumed run starts from; later rows are cut.
    """

    def __init__(
        self,
        run: RunDir,
        experiment: Mapping[str, Any],
        settings: WandbConfig,
        *,
        all_rollouts: bool = True,
        resume_step: int | None = None,
    ) -> None:
        self._run_dir, self._all_rollouts = run, all_rollouts
        self._metrics = MetricsLog(run.metrics, resume_step=resume_step)
        self._last_step = experiment["run"].get("steps")
        self._sets_data_dir = _DATA_DIR not in os.environ
        if self._sets_data_dir:  # wandb would stage its tables in the user's home
            os.environ[_DATA_DIR] = str(run.path / "wandb" / "data")
        self._wandb = _start_wandb(run, experiment, settings, resumed=resume_step is not None)
        self._finished = False

    def log(self, step: int, metrics: Mapping[str, float], records: Sequence[RolloutRecord] = ()) -> dict[str, float]:
        """Record a step, steps rising strictly, and its trajectories. Non-finite values are dropped and counted.

        Returns:
            The metrics as written, with `tracking/nonfinite_dropped`.
        """
        written = self._metrics.append(step, metrics)
        row: dict[str, Any] = {"step": step, **written}
        if records:
            write_rollouts(self._run_dir.rollouts(step), records if self._all_rollouts else shown(records))
            if step % TABLE_EVERY == 0 or step == self._last_step:
                row["rollout/samples"] = _table(shown(records))
        self._wandb.log(row)
        return written

    def alert(self, text: str) -> None:
        """An alert in wandb, for what somebody should look at."""
        self._wandb.alert(title=f"{self._run_dir.name}: {text.split(':')[0]}", text=text)

    def finish(self, summary: Mapping[str, Any] | None = None, *, exit_code: int = 0) -> None:
        """Close the log and wandb; `summary` goes into wandb's run summary. A second call does nothing."""
        if self._finished:
            return
        self._finished = True
        self._metrics.close()
        try:
            self._wandb.summary.update(dict(summary or {}))
            self._wandb.finish(exit_code=exit_code)
        finally:
            if self._sets_data_dir:
                del os.environ[_DATA_DIR]
            wandb.teardown(exit_code)  # ends wandb's process now, where a failure can be handled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.finish(exit_code=0 if kind is None else 1)
        except Exception:
            if kind is None:
                raise
            # `ray job stop` ends wandb's process along with ours; what ended the run is what counts.
            logging.getLogger(__name__).warning("wandb could not be closed", exc_info=True)


def _start_wandb(run: RunDir, experiment: Mapping[str, Any], settings: WandbConfig, *, resumed: bool) -> wandb.Run:
    online = settings.mode == "online"
    started = wandb.init(
        mode=settings.mode,
        project=settings.project,
        name=run.name,
        id=_wandb_id(run.path / "wandb" / "run_id"),
        resume="allow" if online and resumed else None,
        dir=run.path,
        config=dict(experiment),
        # The console stays ours: wandb would wrap stdout and print its own summary between the lines of the run.
        settings=wandb.Settings(console="off", silent=not online),
    )
    started.define_metric("step", hidden=True)
    for group in METRIC_GROUPS:
        started.define_metric(f"{group}/*", step_metric="step")
    for name, summary in SUMMARIES.items():
        started.define_metric(name, step_metric="step", summary=summary)
    return started


def _wandb_id(path: Path) -> str:
    """One wandb id per run directory, so that a resumed run continues the same curves."""
    if not path.is_file():
        write_atomically(path, uuid.uuid4().hex[:8])
    return path.read_text().strip()


def _table(records: Sequence[RolloutRecord]) -> wandb.Table:
    rows = [[record.prompt, record.text, record.reward, record.abs_diff_mean] for record in records]
    return wandb.Table(columns=["prompt", "text", "reward", "mean abs d"], data=rows)

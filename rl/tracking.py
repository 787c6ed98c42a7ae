"""Where a run's numbers go: metrics.jsonl, wandb and the files of sample rollouts."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import wandb

from numerics.files import write_atomically
from rl.metrics_log import MetricsLog
from rl.run_dir import RunDir

if TYPE_CHECKING:
    from rl.spec.sections import WandbSection

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
"""Steps between sample tables in wandb, which are slow to write; the files have the samples of every step."""

_DATA_DIR = "WANDB_DATA_DIR"


@dataclass(frozen=True)
class RolloutSample:
    """One trajectory to show: its prompt, the generated text, its reward and its tokens' mean abs(d), if finite."""

    prompt: str
    text: str
    reward: float
    abs_diff_mean: float | None


class Tracker:
    """Records a run, one row per step. Use it as a context manager: leaving by an exception marks the run as failed.

    Args:
        run: the run's directory, already created.
        spec: the resolved spec as plain values.
        settings: mode (`offline`, `online`, `disabled`) and project of wandb.
        resume_step: the step of the checkpoint that a resumed run starts from; later rows are cut.
    """

    def __init__(
        self, run: RunDir, spec: Mapping[str, Any], settings: WandbSection, *, resume_step: int | None = None
    ) -> None:
        self._run_dir = run
        self._metrics = MetricsLog(run.metrics, resume_step=resume_step)
        self._last_step = spec["run"].get("steps")
        self._sets_data_dir = _DATA_DIR not in os.environ
        if self._sets_data_dir:  # wandb would stage its tables in the user's home
            os.environ[_DATA_DIR] = str(run.path / "wandb" / "data")
        self._wandb = _start_wandb(run, spec, settings, resumed=resume_step is not None)
        self._finished = False

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[RolloutSample] = ()) -> dict[str, float]:
        """Record a step, steps rising strictly. Non-finite values are dropped and counted.

        Returns:
            The metrics as written, with `tracking/nonfinite_dropped`.
        """
        written = self._metrics.append(step, metrics)
        row: dict[str, Any] = {"step": step, **written}
        if samples:
            _write_samples(self._run_dir.rollouts(step), samples)
            if step % TABLE_EVERY == 0 or step == self._last_step:
                row["rollout/samples"] = _table(samples)
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


def read_samples(path: Path) -> list[RolloutSample]:
    """The samples of a `rollouts/step_N.jsonl`."""
    return [RolloutSample(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _start_wandb(run: RunDir, spec: Mapping[str, Any], settings: WandbSection, *, resumed: bool) -> wandb.Run:
    online = settings.mode == "online"
    started = wandb.init(
        mode=settings.mode,
        project=settings.project,
        name=run.name,
        id=_wandb_id(run.path / "wandb" / "run_id"),
        resume="allow" if online and resumed else None,
        dir=run.path,
        config=dict(spec),
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


def _write_samples(path: Path, samples: Sequence[RolloutSample]) -> None:
    lines = [json.dumps(asdict(sample), ensure_ascii=False, allow_nan=False) + "\n" for sample in samples]
    write_atomically(path, "".join(lines))


def _table(samples: Sequence[RolloutSample]) -> wandb.Table:
    rows = [[s.prompt, s.text, s.reward, s.abs_diff_mean] for s in samples]
    return wandb.Table(columns=["prompt", "text", "reward", "mean abs d"], data=rows)

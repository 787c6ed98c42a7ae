"""The folder of a run as an object, for notebooks. It only reads the folder, and can write the report."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.reading import BadLine, at_home, check_path
from fp8rl.rl.record.history import Event, Session, events_found, sessions_found
from fp8rl.rl.record.metrics import METRICS, describe, is_fixed
from fp8rl.rl.record.metrics_log import Row, metrics_found
from fp8rl.rl.record.rollouts import RolloutRecord, rollouts_found
from fp8rl.rl.record.run_dir import RunDir

if TYPE_CHECKING:
    import pandas

    from fp8rl.rl.experiment import Experiment


class Run:
    """A run in `runs/NAME`. Each access reads the folder again, so that a run can be watched while it is training.

    Damaged lines are left out with a warning, as in the report.
    Raises UserError: `path` is not the folder of a run.
    """

    def __init__(self, path: str | Path) -> None:
        check_path(path, "Run")
        path = at_home(str(path))
        self._files = RunDir(Path(path).absolute())
        if not self._files.experiment.is_file():
            raise user_error(
                "Run", path, "the folder of a run, which has a spec.yaml", "Give the path of one, such as runs/demo."
            )

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        return self._files.path

    @property
    def name(self) -> str:
        return self._files.name

    @property
    def spec(self) -> Experiment:
        """The resolved experiment: `run.spec.trainer.lr`."""
        from fp8rl.rl.experiment import read_resolved

        return read_resolved(self._files.experiment)

    @property
    def metrics(self) -> list[Row]:
        """A dict of names and numbers for each step, in order; step 0 was measured before training."""
        return _whole(self._files.metrics, metrics_found(self._files.metrics))

    def metric(self, name: str) -> dict[int, float]:
        """The values of one metric by step; empty if the run has not measured the metric. Raises UserError: no run has
        such a metric, or this run has no reward, outcome or evaluation set of that name."""
        rows = self.metrics
        values = {row["step"]: row[name] for row in rows if name in row}
        known = is_fixed(name) if rows else describe(name) is not None
        if not values and not known:
            measured = {key for row in rows for key in row} - {"step"}
            near = difflib.get_close_matches(name, sorted({*measured, *METRICS}), n=1)
            raise user_error(
                "Run.metric",
                found=name,
                expected="a metric that this run has, a key of Run.metrics",
                remedy=f"Did you mean {near[0]}?" if near else "docs/metrics.md lists all metrics.",
            )
        return values

    def frame(self) -> pandas.DataFrame:
        """The metrics as a pandas table with a row for each step; empty before the first one."""
        import pandas

        rows = self.metrics
        return pandas.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    @property
    def steps(self) -> list[int]:
        """Steps whose trajectories are kept."""
        return self._files.rollout_steps()

    def trajectories(self, step: int) -> list[RolloutRecord]:
        """Every answer of a step, with its token ids and both sides' log-probabilities, in the batch's order."""
        if step not in self.steps:
            raise user_error("step", step, f"one whose trajectories are kept: {self.steps}", "Choose one.")
        path = self._files.rollouts(step)
        return _whole(path, rollouts_found(path))

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of complete checkpoints by step."""
        return {step: self._files.checkpoint(step) for step in self._files.checkpoint_steps()}

    @property
    def capsules(self) -> dict[int, Path]:
        """The folders of capsules (sequences for which a gate fired or whose loss was not finite) by step."""
        return {step: self._files.capsule(step) for step in self._files.capsule_steps()}

    @property
    def events(self) -> list[Event]:
        """Actions that the run took by itself, such as a gate's action."""
        return _whole(self._files.events, events_found(self._files.events))

    @property
    def sessions(self) -> list[Session]:
        """Each start of the run: when, where, with what code, and how it ended."""
        return _whole(self._files.sessions, sessions_found(self._files.sessions))

    @property
    def stopped(self) -> str:
        """Why the last session ended before the last step; empty if it reached the step, or is still running."""
        return self.sessions[-1].why if self.sessions else ""

    @property
    def model(self) -> Path | None:
        """The trained model as a Hugging Face directory, once the run is finished."""
        return self._files.model if self._files.model.is_dir() else None

    @property
    def verdict(self) -> list[str]:
        """The run in sentences, as the report begins: learning, agreement, syncs, and what the gates did."""
        from fp8rl.rl.report.summary import summarize, verdict

        return verdict(summarize(self.metrics, self.events))

    def report(self) -> Path:
        """Write `report.html` into the run's folder, and return its path."""
        from fp8rl.rl.report.report import write_report

        return write_report(self.path)[0]


def _whole(path: Path, found: tuple[list[Any], Sequence[BadLine]]) -> list[Any]:
    """Return the entries that a file's reader has found, and warn once of the file's bad lines."""
    lines, bad = found
    if bad:
        numbers = ", ".join(str(line.number) for line in bad[:3]) + ", ..." * (len(bad) > 3)
        text = f"{len(bad)} line{'s cannot be used and are' if len(bad) > 1 else ' cannot be used and is'} left out"
        warnings.warn(f"{path}: {text}: {numbers}", stacklevel=3)
    return lines

"""Trackers of a run, each a `Tracker` in a file of its own.

A separate thread calls them (`rl.record.tracking`), so that no tracker can delay or end a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.section import Section
from fp8rl.rl.record.rollouts import RolloutRecord
from fp8rl.rl.record.run_dir import RunDir

SHOWN_EVERY = 10
"""Steps between sample rollouts in trackers, which are slow to write; the run's files have samples of every step."""
TRACKERS = {"wandb": "Wandb", "tensorboard": "TensorBoard"}
"""Trackers by the package that each needs, and the class in `to_PACKAGE`. wandb is always installed;
`fp8rl[tensorboard]` installs the other."""


class WandbSection(Section):
    """The `tracking.wandb:` section of an experiment."""

    mode: Literal["offline", "online", "disabled"] = "offline"
    """`offline` records into the run's directory, `online` also uploads during the run, `disabled` records nothing."""
    project: str = Field(default="fp8rl", min_length=1)
    """The project of wandb that the run belongs to."""


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker records."""

    files: RunDir
    config: dict[str, Any]
    """The experiment as plain values."""
    resumed: bool
    """True if the run was started before, and is resumed."""
    last_step: int
    """The step after which nothing more is recorded."""
    wandb: WandbSection

    def shows(self, step: int) -> bool:
        """Return whether sample rollouts of a step are shown."""
        return step % SHOWN_EVERY == 0 or step == self.last_step

    def place(self, tracker: str) -> Path:
        """Return the folder for a tracker's files, and make it if it is missing."""
        path = self.files.path / tracker
        path.mkdir(exist_ok=True)
        return path


class Tracker:
    """A tracker. It is made and called in the trackers' thread; an error ends only this tracker."""

    @staticmethod
    def variables(run: Tracked) -> dict[str, str]:
        """Return environment variables that the tracker reads or sets. They are made before the thread begins, since
        a new one moves the list of all in C, where code of another thread may be reading it, and crash."""
        return {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step; `rl.record.metrics.metric` has unit and meaning of each metric."""
        raise NotImplementedError

    def show(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Show sample rollouts of a step. Every tenth step has some."""

    def alert(self, text: str) -> None:
        """Alert somebody who should look at the run. text: an event, as the console prints it."""

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """Write what is not written yet. exit_code: the run's, 0 if it ended well. summary: values that stand for the
        whole run; empty if it failed."""
        raise NotImplementedError


def check_trackers(names: Iterable[str]) -> None:
    """Check that each tracker's package is installed. Raises UserError, which names the extra that installs it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            remedy = f"Run pip install 'fp8rl[{name}]', or remove {name}."
            raise user_error("tracking.to", name, f"the package {name}, which is not installed", remedy)


def tracker(name: str) -> Any:
    """Return the class of the tracker of this name."""
    return getattr(import_module(f"fp8rl.rl.record.trackers.to_{name}"), TRACKERS[name])

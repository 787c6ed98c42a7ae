"""Trackers of a run, a file each: all that one has to be is a `Tracker`.

A thread of the run tells them what happens (`rl.record.tracking`), so none can hold up or end a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.numerics.core.errors import user_error

if TYPE_CHECKING:
    from fp8rl.rl.record.rollouts import RolloutRecord

SHOWN_EVERY = 10
"""Steps between sample rollouts, which are slow to write; the files have those of every step."""
TRACKERS = {"wandb": "wandb", "tensorboard": "tensorboard"}
"""The package that each needs. wandb's is always installed; TensorBoard's extra of `fp8rl` has its name."""


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker is told of."""

    folder: str
    """The run's folder."""
    name: str
    project: str
    config: dict[str, Any]
    """The experiment as plain values."""
    resumed: bool
    """It goes on, after a start before."""
    last_step: int
    """The step after which nothing more is recorded."""
    online: bool = False
    """wandb's server gets the run while it goes on."""

    def shows(self, step: int) -> bool:
        """Return whether sample rollouts of a step are shown."""
        return step % SHOWN_EVERY == 0 or step == self.last_step

    def place(self, tracker: str) -> Path:
        """The folder of a tracker's own files."""
        path = Path(self.folder) / tracker
        path.mkdir(exist_ok=True)
        return path


class Tracker:
    """A tracker, in the trackers' thread. Whatever it raises ends it, and nothing else."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step; `rl.record.metrics.metric` has unit and meaning of each metric."""
        raise NotImplementedError

    def show(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Show sample rollouts of a step. Every tenth step has some."""

    def alert(self, text: str) -> None:
        """Tell somebody who should look at the run; `text` is an event, as the console said it."""

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """Write what is not written yet. exit_code: of the run, 0 if it ended well. summary: values that stand for the
        whole run; empty if it failed."""
        raise NotImplementedError


def check_trackers(names: Iterable[str]) -> None:
    """Check that what each needs is installed. Raises UserError: naming the extra that installs it."""
    for name in names:
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise user_error(
                "tracking.to",
                found=name,
                expected=f"the package {TRACKERS[name]}, which is not installed",
                remedy=f"Run pip install 'fp8rl[{name}]', or remove {name}.",
            )


def start(name: str, run: Tracked) -> Tracker:
    """The tracker of this name, for a run that begins or goes on."""
    tracker: Tracker = import_module(f"fp8rl.rl.record.trackers.to_{name}").start(run)
    return tracker

"""Trackers beside wandb, a file each: all that one has to be is a `Tracker`.

Each is a process of its own that follows the run's metrics.jsonl, so none can hold up or end a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fp8rl.numerics.core.errors import user_error

TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "trackio": "trackio"}
"""The package that each needs; the extra of `fp8rl` that installs it has the tracker's name."""


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

    def place(self, tracker: str) -> Path:
        """The folder of a tracker's own files."""
        path = Path(self.folder) / tracker
        path.mkdir(exist_ok=True)
        return path


class Tracker(Protocol):
    """A tracker, in its own process. Whatever it raises ends it, and nothing else."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step; `rl.record.metrics.metric` has unit and meaning of each metric."""

    def finish(self, failed: bool) -> None:
        """Write what is not written yet."""


def check_trackers(names: Iterable[str]) -> None:
    """Check that what each needs is installed.

    Raises:
        UserError: naming the extra that installs it.
    """
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(TRACKERS[name]) is None:
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

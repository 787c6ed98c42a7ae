"""Checkpoints as a run writes them, but for the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.experiment import Experiment
from rl.guard.standing import Standing
from rl.record.run_dir import RunDir
from rl.run.ahead import FeedState
from rl.run.checkpoints import publish_checkpoint, write_checkpoint
from trainer.actor import TrainerGroup
from trainer.checkpoint_files import About, digests, write_about


class Describing(TrainerGroup):
    """Writes a checkpoint whose one file holds no tensors."""

    def __init__(self) -> None:
        super().__init__([])

    def save(self, path: Path, extra: dict[str, Any], texts: Mapping[str, str] | None = None) -> None:
        path.mkdir(parents=True)
        files = {"tensors": f"of step {extra['step']}", **(texts or {})}
        for name, text in files.items():
            (path / name).write_text(text)
        write_about(path, About(extra["step"], extra, digests(path, files)))


def write(run: RunDir, settings: Experiment, step: int, standing: Standing | None = None) -> None:
    write_checkpoint(Describing(), run, settings, standing or Standing(), step, FeedState(0, [], []))


def save(run: RunDir, settings: Experiment, step: int, standing: Standing | None = None) -> None:
    write(run, settings, step, standing)
    publish_checkpoint(run, step, settings.checkpoint.keep)

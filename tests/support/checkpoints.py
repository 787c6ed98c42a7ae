"""Checkpoints as a run writes them, but for the tensors."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8rl.rl.experiment import Experiment
from fp8rl.rl.experiment.contents import Content
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.checkpoints import Checkpoints
from fp8rl.rl.run.feed.state import FeedState
from fp8rl.trainer.actor import TrainerDiedError, TrainerGroup
from fp8rl.trainer.checkpoint.files import About, digests, write_about

NOTHING = FeedState(0, [], [])


class Describing(TrainerGroup):
    """Writes a checkpoint whose one file holds no tensors, once it may; `failure` is raised in its place."""

    def __init__(self) -> None:
        super().__init__([])
        self.may_write = threading.Event()
        self.failure: Exception | None = None

    def stage(self, path: Path, extra: dict[str, Any], texts: Mapping[str, str]) -> None:
        self.extra, self.files = extra, {"state/common.pt": f"of step {extra['step']}", **texts}

    def write(self, path: Path) -> None:
        assert self.may_write.wait(30), "a test that fails says so before"
        if self.failure is not None:
            raise self.failure
        (path / "state").mkdir(parents=True)
        for name, text in self.files.items():
            (path / name).write_text(text)
        write_about(path, About(self.extra["step"], self.extra, digests(path, self.files)))

    def shutdown(self) -> None:
        self.failure = TrainerDiedError("trainer rank 0")
        self.may_write.set()


def save(
    run: RunDir, settings: Experiment, step: int, gate_state: GateState | None = None,
    held: Mapping[str, Content] | None = None,
) -> None:  # fmt: skip
    trainer = Describing()
    trainer.may_write.set()
    with Checkpoints(run, settings, held) as checkpoints:
        checkpoints.begin(trainer, gate_state or GateState(), step, NOTHING)
        checkpoints.recorded()
        checkpoints.wait()

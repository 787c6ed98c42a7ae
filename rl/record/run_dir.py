"""The directory of a run: where everything lies, how it is created, and how its files are written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from numerics.errors import UserError, user_error
from rl.record.run_lock import run_lock


@dataclass(frozen=True)
class RunDir:
    """Paths of one run below `path`, an absolute directory `runs/<name>`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def experiment(self) -> Path:
        """The resolved experiment; its presence marks the directory as a run."""
        return self.path / "spec.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def begun(self) -> bool:
        """Whether it got as far as a row of metrics, or left anything that took training."""
        rows = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return rows or bool(self.checkpoint_steps()) or self.model.exists() or self.adapter.exists()

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face directory, once the run is through."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """The trained adapters in PEFT's format, once a run that has some is through."""
        return self.path / "adapter"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def pending_checkpoint(self, step: int) -> Path:
        """A checkpoint whose step has no row in `metrics` yet."""
        return self.checkpoints / f".step_{step}.pending"

    def checkpoint_steps(self) -> list[int]:
        """Steps with a checkpoint, ascending. Unfinished ones have another name and do not count."""
        return _steps(self.checkpoints, r"step_(\d+)")

    def manifest(self, step: int) -> Path:
        """Tensor digests of the weight sync after `step`; 0 is the one before training."""
        return self.path / "manifests" / f"step_{step}.json"

    @property
    def events(self) -> Path:
        """What gates did, one JSON object per line; absent while none has fired."""
        return self.path / "events.jsonl"

    @property
    def sessions(self) -> Path:
        """Two JSON objects for each time that the run was started: at its start, and at its end."""
        return self.path / "sessions.jsonl"

    @property
    def capsules(self) -> Path:
        return self.path / "capsules"

    def capsule(self, step: int) -> Path:
        """The sequences of `step` for which a gate fired, or whose loss was not finite."""
        return self.capsules / f"step_{step}"

    def capsule_steps(self) -> list[int]:
        """Steps with a capsule, ascending."""
        return _steps(self.capsules, r"step_(\d+)")

    def rollouts(self, step: int) -> Path:
        """Sample rollouts of `step`, one JSON object per line."""
        return self.path / "rollouts" / f"step_{step}.jsonl"

    def ahead(self, step: int) -> Path:
        """Answers to later steps that the trainer scored in `step`, one JSON object per line; absent where none was."""
        return self.path / "rollouts" / f"ahead_{step}.jsonl"

    def rollout_steps(self) -> list[int]:
        """Steps with sample rollouts, ascending."""
        return _steps(self.path / "rollouts", r"step_(\d+)\.jsonl")


@contextmanager
def open_run_dir(base: str | Path, name: str, *, resume: bool = False, overwrite: bool = False) -> Iterator[RunDir]:
    """The directory `base/name`, made if absent, held by this process for as long as the block lasts.

    What lies there of a start that never reached a step is replaced. If the block is interrupted or refused before its
    first step, nothing of a new run is left; if it fails, its logs are.

    Args:
        resume: keep the contents and continue the run that lies there.
        overwrite: delete the run that lies there.

    Raises:
        UserError: the directory is taken and neither flag is given; it is no run, or `resume` finds none; both flags;
            another process holds the run; the directory cannot be made.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite: found both, expected one. Leave one of them out.")
    run = RunDir(Path(base).absolute() / name)
    with ExitStack() as held:
        try:
            run.path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(run_lock(run.path))
            _prepare(run, resume, overwrite)
        except OSError as error:
            raise user_error(
                "run.dir",
                found=str(error),
                expected="a directory that runs can be written to",
                remedy="Correct run.dir and run.name.",
            ) from error
        try:
            yield run
        except (KeyboardInterrupt, UserError):
            if not resume and not run.begun:
                shutil.rmtree(run.path, ignore_errors=True)
            raise


def _prepare(run: RunDir, resume: bool, overwrite: bool) -> None:
    if run.path.is_symlink() or (run.path.exists() and not run.path.is_dir()):
        kind = "link" if run.path.is_symlink() else "file"
        raise UserError(f"run.name: found a {kind} at {run.path}, expected a directory. Choose another run.name.")
    if resume and not run.experiment.is_file():
        raise UserError(f"--resume: found no run at {run.path}, expected its spec.yaml. Correct run.name or run.dir.")
    taken = run.path.is_dir() and any(run.path.iterdir())
    if taken and not resume:
        if not run.experiment.is_file():
            raise UserError(
                f"run.name: found {run.path} without a spec.yaml, expected a run or a new directory. "
                "Choose another run.name."
            )
        if run.begun and not overwrite:
            raise UserError(
                f"run.name: found an existing run at {run.path}, expected a new directory. "
                "Choose another run.name=..., or continue it with --resume, or delete it with --overwrite."
            )
        shutil.rmtree(run.path)
    run.path.mkdir(exist_ok=True)


def _steps(directory: Path, pattern: str) -> list[int]:
    if not directory.is_dir():
        return []
    matches = (re.fullmatch(pattern, entry.name) for entry in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)

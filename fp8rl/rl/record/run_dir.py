"""The directory of a run: the paths of its files, how it is created, and its lock."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fp8rl.numerics.core.errors import UserError, say_error, user_error

_NOTE = re.compile(rb"(process \d+ on \S+)?")
"""What the file of a run's lock may contain."""


class RunDir:
    """The paths of a run below `path`, an absolute directory `runs/<name>`."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.experiment = path / "spec.yaml"
        """The resolved experiment; its presence marks the directory as a run."""
        self.mark = path / ".fp8rl"
        """A file that marks the directory as made by a run."""
        self.metrics = path / "metrics.jsonl"
        """One JSON object per step."""
        self.events = path / "events.jsonl"
        """Actions that the run took by itself: gates, resumes, replaced engines, repeated syncs, failed user functions,
        lost trackers. One JSON object per line; the file is absent while there is none."""
        self.sessions = path / "sessions.jsonl"
        """Two JSON objects for each time that the run was started: at its start, and at its end."""
        self.report, self.log = path / "report.html", path / "log.txt"
        self.checkpoints, self.capsules = path / "checkpoints", path / "capsules"
        self.model = path / "model"
        """The trained model as a Hugging Face directory, once the run is finished."""
        self.adapter = path / "adapter"
        """The trained adapters in PEFT's format, once a run with adapters is finished."""

    @property
    def begun(self) -> bool:
        """True if the run has a row of metrics, a checkpoint, a model or adapters."""
        rows = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return rows or bool(self.checkpoint_steps()) or self.model.exists() or self.adapter.exists()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def pending_checkpoint(self, step: int) -> Path:
        """The path of a checkpoint whose step has no row in `metrics` yet."""
        return self.checkpoints / f".step_{step}.pending"

    def checkpoint_steps(self) -> list[int]:
        """Steps with a checkpoint, ascending. Unfinished checkpoints have another name and do not count."""
        return _steps(self.checkpoints, r"step_(\d+)")

    def manifest(self, step: int) -> Path:
        """Tensor digests of the weight sync after `step`; step 0 is the sync before training."""
        return self.path / "manifests" / f"step_{step}.json"

    def capsule(self, step: int) -> Path:
        """The capsule of `step`: its worst sequences, if a gate fired or the loss was not finite."""
        return self.capsules / f"step_{step}"

    def capsule_steps(self) -> list[int]:
        """Steps with a capsule, ascending."""
        return _steps(self.capsules, r"step_(\d+)")

    def rollouts(self, step: int) -> Path:
        """Trajectories of `step`, one JSON object per line."""
        return self.path / "rollouts" / f"step_{step}.jsonl"

    def ahead(self, step: int) -> Path:
        """Answers for later steps that the trainer scored in `step`, one JSON object per line; absent without any."""
        return self.path / "rollouts" / f"ahead_{step}.jsonl"

    def rollout_steps(self) -> list[int]:
        """Steps with trajectories, ascending."""
        return _steps(self.path / "rollouts", r"step_(\d+)\.jsonl")

    def cut(self, step: int) -> None:
        """Remove the rollouts, manifests and capsules of steps after `step`, which a resumed run repeats."""
        for names in (r"rollouts/(?:step|ahead)_(\d+)\.(?:jsonl|certify\.html)", r"manifests/step_(\d+)\.json"):
            for file in self.path.glob(f"{names.partition('/')[0]}/*"):
                found = re.fullmatch(names, str(file.relative_to(self.path)))
                if found and int(found[1]) > step:
                    file.unlink()
        for later in self.capsule_steps():
            if later > step:
                shutil.rmtree(self.capsule(later), ignore_errors=True)


@contextmanager
def open_run_dir(
    base: str | Path,
    name: str,
    *,
    resume: bool = False,
    overwrite: bool = False,
    shared: bool = False,
    reads: Collection[Path] = (),
) -> Iterator[RunDir]:
    """Open the directory `base/name` for this process alone while the block lasts; make it if it is absent.

    Nothing in the directory is deleted. A run that is replaced gets the name NAME.replaced-TIME. A start that reached
    no step leaves its logs, and the next start continues in its directory.

    Args:
        resume: keep the contents and continue the run in the directory.
        overwrite: rename the run in the directory, and begin a new one.
        shared: the umask decides who may read a new directory; otherwise only its owner may.
        reads: files that the new run reads.

    Raises:
        UserError: the directory is taken and neither flag is given; it is no run, or there is no run to resume; a file
            of `reads` is in a directory that would be renamed; both flags are given; another process holds the run; the
            directory cannot be made.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite: found both, expected one. Leave one of them out.")
    run = RunDir(Path(base).absolute() / name)
    with ExitStack() as stack:
        try:
            run.path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run_lock(run.path))
            _prepare(run, resume, overwrite, reads)
            if not resume:
                run.path.mkdir(mode=0o777 if shared else 0o700, exist_ok=True)
                run.mark.touch()
        except OSError as error:
            raise user_error(
                "run.dir", str(error), "a directory that runs can be written to", "Correct run.dir and run.name."
            ) from error
        yield run


def _prepare(run: RunDir, resume: bool, overwrite: bool, reads: Collection[Path]) -> None:
    """Rename the run in the directory, if it has begun and may be replaced."""
    if run.path.is_symlink() or (run.path.exists() and not run.path.is_dir()):
        kind = "link" if run.path.is_symlink() else "file"
        raise UserError(f"run.name: found a {kind} at {run.path}, expected a directory. Choose another run.name.")
    if resume:
        if not run.experiment.is_file():
            raise UserError(
                f"--resume: found no run at {run.path}, expected its spec.yaml. Correct run.name or run.dir."
            )
        return
    marked = run.mark.is_file()
    if not run.path.is_dir() or not any(run.path.iterdir()) or (marked and not run.begun):
        return
    if not marked and not run.experiment.is_file():
        raise UserError(
            f"run.name: found {run.path} without a spec.yaml, expected a run or a new directory. "
            "Choose another run.name."
        )
    if not overwrite:
        raise UserError(
            f"run.name: found an existing run at {run.path}, expected a new directory. "
            "Choose another run.name=..., or continue it with --resume, or rename it with --overwrite."
        )
    for path in reads:
        if path.resolve().is_relative_to(run.path.resolve()) and path.resolve() != run.experiment.resolve():
            found = f"{path}, an input of this run, in the directory that it would replace"
            remedy = "Move it, or choose another run.name."
            raise user_error("run.name", found, "the input in another directory", remedy)
    set_aside(run.path)


def set_aside(path: Path) -> None:
    """Rename the file or directory `path`, if there is one, to NAME.replaced-TIME, and say so."""
    if path.exists():
        kept = path.rename(path.with_name(f"{path.name}.replaced-{time.strftime('%Y%m%d-%H%M%S')}"))
        say_error(f"note: the earlier {path} is now {kept.name}; remove it when you like")


def _steps(directory: Path, pattern: str) -> list[int]:
    if not directory.is_dir():
        return []
    matches = (re.fullmatch(pattern, entry.name) for entry in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Hold the lock of the run at `path` while the block lasts. A killed driver's lock file locks nothing. Raises
    UserError: another process holds the lock; the message names the process."""
    file = path.with_name(f".{path.name}.lock")
    descriptor = _take(file, path)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _take(file: Path, path: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace")
            os.close(descriptor)
            found = f"the run {path}, which is held by {holder or 'a process that is starting'}"
            remedy = "Wait for its end, end that process, or choose another run.name."
            raise user_error("run.name", found, "a run that no process works on", remedy) from None
        if _NOTE.fullmatch(os.pread(descriptor, 200, 0)) is None:
            os.close(descriptor)
            found, expected = f"{file}, which is no lock of a run", "no such file, or one that a run left"
            raise user_error("run.name", found, expected, "Move it away, or choose another run.name.")
        # The former holder may have removed the file between our open and our lock; then ours locks nothing.
        if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
            return descriptor
        os.close(descriptor)

"""The directory of a run: where everything lies, how it is created, and how its files are written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import yaml

from fp8rl.models.hub import cached_directory
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.files import write_atomically
from fp8rl.rl.record.lock import run_lock
from fp8rl.rl.record.written import FILE, MODEL, RUN, Tree, foreign_files, remove_written


class RunDir:
    """Paths of one run below `path`, an absolute directory `runs/<name>`."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.experiment = path / "spec.yaml"
        """The resolved experiment; its presence marks the directory as a run."""
        self.mark = path / ".fp8rl"
        """Says that a run made the directory, and the SHA-256 of its spec as the run wrote it."""
        self.metrics = path / "metrics.jsonl"
        """One JSON object per step."""
        self.events = path / "events.jsonl"
        """What the run did by itself: gates, resumes, replaced engines, repeated syncs, failed user functions, lost
        trackers. One JSON object per line; absent while there is none."""
        self.sessions = path / "sessions.jsonl"
        """Two JSON objects for each time that the run was started: at its start, and at its end."""
        self.report, self.log = path / "report.html", path / "log.txt"
        self.checkpoints, self.capsules = path / "checkpoints", path / "capsules"
        self.model = path / "model"
        """The trained model as a Hugging Face directory, once the run is through."""
        self.adapter = path / "adapter"
        """The trained adapters in PEFT's format, once a run that has some is through."""

    def write_experiment(self, text: str) -> None:
        """Write the resolved experiment, and into the mark that a run wrote it."""
        write_atomically(self.mark, hashlib.sha256(text.encode()).hexdigest() + "\n")
        write_atomically(self.experiment, text)

    @property
    def written(self) -> bool:
        """True if it is a run's for certain: by its mark, or, of the time before marks, by what only a run writes."""
        if self.mark.is_file() or _steps(self.path / "manifests", r"step_(\d+)\.json"):
            return True
        abouts = [self.checkpoint(step) / "about.json" for step in self.checkpoint_steps()]
        return (
            "started" in _first_row(self.sessions)
            or "step" in _first_row(self.metrics)
            or any(about.is_file() for about in abouts)
        )

    @property
    def edited(self) -> bool:
        """True if the spec is another than the run has written."""
        if not (self.mark.is_file() and self.experiment.is_file()):
            return False
        return hashlib.sha256(self.experiment.read_bytes()).hexdigest() != self.mark.read_text().strip()

    def foreign_files(self, folder: Path | None = None, tree: Tree = RUN) -> list[Path]:
        """Return the files in the run's directory, or in `folder` of it, that no run wrote."""
        return foreign_files(folder or self.path, tree, self._model_before)

    def remove(self, folder: Path | None = None, tree: Tree = RUN, keep: Collection[Path] = ()) -> None:
        """Remove what the run wrote into its directory, or `folder` of it, and that too if it is empty then."""
        remove_written(folder or self.path, tree, self._model_before, keep)

    @property
    def _model_before(self) -> Path | None:
        """Directory of the model that the run began with, from which it copies; None where its spec names none."""
        with suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
            model = yaml.safe_load(self.experiment.read_text())["model"]
            return cached_directory(model["path"], model.get("revision"))
        return None

    @property
    def begun(self) -> bool:
        """True if it got as far as a row of metrics, or left anything that took training."""
        rows = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return rows or bool(self.checkpoint_steps()) or self.model.exists() or self.adapter.exists()

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

    def capsule(self, step: int) -> Path:
        """The sequences of `step` for which a gate fired, or whose loss was not finite."""
        return self.capsules / f"step_{step}"

    def capsule_steps(self) -> list[int]:
        """Steps with a capsule, ascending."""
        return _steps(self.capsules, r"step_(\d+)")

    def rollouts(self, step: int) -> Path:
        """Trajectories of `step`, one JSON object per line."""
        return self.path / "rollouts" / f"step_{step}.jsonl"

    def ahead(self, step: int) -> Path:
        """Answers to later steps that the trainer scored in `step`, one JSON object per line; absent where none was."""
        return self.path / "rollouts" / f"ahead_{step}.jsonl"

    def rollout_steps(self) -> list[int]:
        """Steps with trajectories, ascending."""
        return _steps(self.path / "rollouts", r"step_(\d+)\.jsonl")

    def cut(self, step: int) -> None:
        """Remove rollouts, manifests and attributions after `step`, of steps that a resumed run repeats."""
        of_steps = {
            "rollouts": r"(?:step|ahead)_(\d+)\.(?:jsonl|certify\.html)",
            "manifests": r"step_(\d+)\.json",
            "capsules": r"step_(\d+)\.attribution\.html",
        }
        for folder, names in of_steps.items():
            if later := {str(found) for found in _steps(self.path / folder, names) if found > step}:
                remove_written(self.path / folder, {names.replace(r"\d+", "|".join(later)): FILE})


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
    """The directory `base/name`, made if absent, held by this process for as long as the block lasts.

    What a start that never reached a step left there is replaced. If the block is interrupted or refused before its
    first step, nothing of a new run is left; if it fails, its logs are. Only what a run wrote is ever removed.

    Args:
        resume: keep the contents and continue the run that lies there.
        overwrite: delete the run that lies there.
        shared: a new directory is as readable as the umask has it, not by its owner alone.
        reads: files that the run is made from, such as its spec, which is kept if it is the one that lies there.

    Raises:
        UserError: the directory is taken and neither flag is given; it is no run, or `resume` finds none; something in
            it was written by no run, or is read by this one; both flags; another process holds the run; the directory
            cannot be made.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite: found both, expected one. Leave one of them out.")
    run = RunDir(Path(base).absolute() / name)
    with ExitStack() as held:
        try:
            run.path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(run_lock(run.path))
            given = {run.path} if run.path.is_dir() and not any(run.path.iterdir()) else set()
            _prepare(run, resume, overwrite, reads)
            spec = run.experiment.read_bytes() if run.experiment.is_file() else None
            if not resume:
                run.path.mkdir(mode=0o777 if shared else 0o700, exist_ok=True)
                run.mark.touch()
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
                if spec is not None:
                    write_atomically(run.experiment, spec)
                    given |= {run.experiment, run.mark}
                run.remove(keep=given)
            raise


def _prepare(run: RunDir, resume: bool, overwrite: bool, reads: Collection[Path]) -> None:
    """Remove the run that lies there and may go; its spec stays if it is among `reads`."""
    if run.path.is_symlink() or (run.path.exists() and not run.path.is_dir()):
        kind = "link" if run.path.is_symlink() else "file"
        raise UserError(f"run.name: found a {kind} at {run.path}, expected a directory. Choose another run.name.")
    if resume:
        if not run.experiment.is_file():
            raise UserError(
                f"--resume: found no run at {run.path}, expected its spec.yaml. Correct run.name or run.dir."
            )
        exported = [path for path in (run.model, run.adapter) if path.is_dir()]
        _refuse(run, [found for path in exported for found in run.foreign_files(path, MODEL)])
    elif run.path.is_dir() and any(run.path.iterdir()):
        _check_removable(run, overwrite, reads)
        kept = {run.experiment} if _among(run.experiment, reads) else set()
        run.remove(keep=kept)


def _check_removable(run: RunDir, overwrite: bool, reads: Collection[Path]) -> None:
    """Raise `UserError` unless all that lies there was written by a run, and may go."""
    if not run.experiment.is_file() and not run.mark.is_file():
        raise UserError(
            f"run.name: found {run.path} without a spec.yaml, expected a run or a new directory. "
            "Choose another run.name."
        )
    if run.written and run.begun and not overwrite:
        raise UserError(
            f"run.name: found an existing run at {run.path}, expected a new directory. "
            "Choose another run.name=..., or continue it with --resume, or delete it with --overwrite."
        )
    found = run.foreign_files()
    if not run.written or (run.edited and not _among(run.experiment, reads)):
        found.insert(0, run.experiment)
    _refuse(run, found)
    for path in reads:
        if path.resolve().is_relative_to(run.path.resolve()) and not _among(run.experiment, [path]):
            raise user_error(
                "run.name",
                found=f"{path}, an input of this run, inside the run that it would replace",
                expected="it elsewhere",
                remedy="Move it, or choose another run.name.",
            )


def _refuse(run: RunDir, found: list[Path]) -> None:
    if found:
        names = ", ".join(str(path.relative_to(run.path)) for path in found[:3])
        raise user_error(
            "run.name",
            found=f"{names}{f' and {len(found) - 3} more' * (len(found) > 3)} in {run.path}, which no run wrote",
            expected="a new directory, or one with nothing but files that a run wrote; no other file is ever removed",
            remedy="Choose another run.name, or move it away.",
        )


def _among(path: Path, others: Collection[Path]) -> bool:
    return path.exists() and any(other.exists() and other.samefile(path) for other in others)


def _first_row(file: Path) -> dict[str, object]:
    """The first object of a JSON lines file, empty if there is none."""
    with suppress(OSError, ValueError), file.open(encoding="utf-8") as rows:
        row = json.loads(rows.readline(1 << 20))
        return row if isinstance(row, dict) else {}
    return {}


def _steps(directory: Path, pattern: str) -> list[int]:
    if not directory.is_dir():
        return []
    matches = (re.fullmatch(pattern, entry.name) for entry in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)

"""Describes a checkpoint's files in `about.json`, and checks that they are as they were written. Needs no Megatron.

`about.json` has the format, the step and the caller's data. It has the size and SHA-256 of every other file, and a
SHA-256 of its own other contents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter

from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.files import file_sha256
from fp8rl.numerics.core.reading import parsed, reason
from fp8rl.numerics.core.section import validated

FORMAT = 2
STATE = "state"
ABOUT = "about.json"
CONTENT = "content"
"""A key of `About.extra`. The value "weights" means that the checkpoint has no optimizer state."""


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing or is not as it was written."""


def _below(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError("a file of the checkpoint itself")
    return name


@dataclasses.dataclass(frozen=True)
class About:
    """The description of a checkpoint, `about.json`."""

    step: Annotated[int, Field(ge=0, lt=2**63)]
    extra: dict[str, Any]
    files: dict[Annotated[str, AfterValidator(_below)], tuple[int, str]]
    """(bytes, SHA-256) of each file by its path relative to the checkpoint's directory."""


_FORM = TypeAdapter(About)


def partial(path: Path) -> Path:
    """Return the temporary directory in which the checkpoint `path` is written before it is renamed."""
    return path.with_name(f".{path.name}.partial")


def discard(path: Path) -> None:
    """Remove the files of a checkpoint that will not be finished, so that they do not fill the disk."""
    shutil.rmtree(partial(path), ignore_errors=True)


def digests(directory: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return (bytes, SHA-256) of each named file in `directory`."""
    files = {name: directory / name for name in names}
    return {name: (file.stat().st_size, file_sha256(file)) for name, file in files.items()}


def write_about(directory: Path, about: About) -> None:
    """Write `about.json`. Raises ValueError: `extra` has a number that is not finite."""
    values = {"format": FORMAT, **dataclasses.asdict(about)}
    text = json.dumps({**values, "sha256": _own_digest(values)}, indent=1, allow_nan=False)
    (directory / ABOUT).write_text(text + "\n")


def read_about(path: Path) -> About:
    """Read the description of the checkpoint at `path`, without its tensors.

    Raises:
        UserError: `path` is no checkpoint, or a checkpoint of another format.
        DamagedCheckpointError: `about.json` is damaged.
    """
    file = Path(path) / ABOUT
    if not file.is_file():
        remedy = "Name one of the run's checkpoints/step_N directories, or delete what is left of this one."
        raise user_error("checkpoint", f"{path} without {ABOUT}", "a checkpoint directory", remedy)
    try:
        return parsed(file, "checkpoint", _about)
    except UserError as error:
        if error.key.endswith("format"):
            raise
        raise DamagedCheckpointError(str(error)) from error


def check_sizes(path: Path) -> None:
    """Check that every file exists and has the size that was written. Raises as `read_about` does."""
    for name, (size, _) in read_about(path).files.items():
        file = path / name
        found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
        if found != f"{size} bytes":
            raise _damaged(file, found, f"{size} bytes")


def check_digests(path: Path, names: Iterable[str] | None = None) -> None:
    """Check that the files have the bytes that were written. names: None for all files. Raises as `read_about` does."""
    about = read_about(path)
    for name in about.files if names is None else names:
        if not (path / name).is_file():
            raise _damaged(path / name, "no such file", f"{about.files[name][0]} bytes")
        try:
            ((size, digest),) = digests(path, [name]).values()
        except OSError as error:
            raise _damaged(path / name, reason(error), about.files[name][1]) from error
        if (size, digest) != tuple(about.files[name]):
            raise _damaged(path / name, f"SHA-256 {digest}", about.files[name][1])


def _about(values: dict[str, Any]) -> About:
    if values.get("format") != FORMAT:
        remedy = "Load it with the version of fp8rl that wrote it."
        raise user_error(f"checkpoint: {ABOUT}: format", values.get("format"), str(FORMAT), remedy)
    digest = values.pop("sha256")
    if digest != _own_digest(values):
        raise ValueError(f"SHA-256 {digest} for contents of {_own_digest(values)}")
    return validated(_FORM.validate_python, values, f"checkpoint: {ABOUT}", "Load an older checkpoint.")


def _own_digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _damaged(file: Path, found: str, expected: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"checkpoint file {file}: found {found}, expected {expected}, as its {ABOUT} says.")

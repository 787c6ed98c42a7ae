"""Writes and reads the history of a run, one JSON object a line.

events.jsonl has each action that the run took by itself, such as a gate's. sessions.jsonl has each start of the run and
how it ended, on which machine and with what code.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, TypeAdapter

from fp8rl.numerics.core.files import append_line, write_atomically
from fp8rl.numerics.core.reading import BadLine, json_lines, whole_json_lines


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that the run did by itself: a gate fired, a loss was not finite, the run was resumed, engines were
    replaced, a sync was repeated, functions of the user failed, or a tracker was lost."""

    step: int
    metric: str
    """The metric that was the reason."""
    value: float | None
    """The metric's value; None if it is not finite."""
    bound: str
    """The bound that the metric broke, in words."""
    action: str
    """A gate's action (`rl.experiment.gate_sections`), `replace_engine`, `resync`, `resume`, or `go_on`: the run
    continues without the part that was lost or has failed."""
    capsule: str | None
    """The capsule's directory, below the run's; None if there is none."""
    text: str
    """The whole event in one sentence, as printed on the console."""

    @property
    def said(self) -> str:
        """The sentence, and the place of the capsule."""
        return self.text if self.capsule is None else f"{self.text} ({self.capsule})"


_EVENT = TypeAdapter(Event)


def append_entry(path: Path, entry: Event | Session) -> None:
    """Append an event, or a session: once at its start, and again at its end."""
    append_line(path, _line(entry))


def read_events(path: Path) -> list[Event]:
    """Read the events in order; none if the file is missing. Raises `UserError` for a line that is no event."""
    return whole_json_lines(path, "events", _EVENT.validate_python)


def events_found(path: Path) -> tuple[list[Event], list[BadLine]]:
    """Read the events of a file that may be damaged, and the lines that are no events."""
    return json_lines(path, "events", _EVENT.validate_python)


def cut_events(path: Path, step: int) -> None:
    """Remove the events of steps after `step`, which a resumed run repeats."""
    if path.is_file():
        write_atomically(path, "".join(_line(event) + "\n" for event in read_events(path) if event.step <= step))


def _line(entry: Event | Session) -> str:
    return json.dumps(dataclasses.asdict(entry), allow_nan=False)


LIBRARIES = ("fp8rl", "sglang", "megatron-core", "torch", "ray", "transformers")
_REPOSITORY = Path(__file__).parents[3]
_TIME = Field(ge=0.0, lt=1e11, allow_inf_nan=False)
"""A time in seconds since 1970 for which a calendar has a date."""


@dataclasses.dataclass(frozen=True)
class Session:
    """A start of a run: when, where and with what code."""

    started: Annotated[float, _TIME]
    """Seconds since 1970."""
    machine: str
    versions: dict[str, str]
    """Versions of `LIBRARIES` and of Python."""
    commit: str | None
    """Commit of the code, with `+` for changes that are not committed; None outside a git repository."""
    ended: Annotated[float, _TIME] | None = None
    """Seconds since 1970: the start plus a monotonic duration, since the clock may be changed during a run. None while
    the session lives, or if it was killed."""
    why: str = ""
    """The reason for an end before the last step; empty if the session reached it."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Notes on the run's input, e.g. that held-out problems are trained on as well."""

    @property
    def seconds(self) -> float | None:
        """The session's duration in seconds; None if it has not ended."""
        return None if self.ended is None else self.ended - self.started


_SESSION = TypeAdapter(Session)


def this_session(notes: Sequence[str] = ()) -> Session:
    """Return the session that starts now, here."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    versions = {"python": platform.python_version(), **versions}
    return Session(time.time(), _machine(), versions, _commit(), notes=[*notes])


def sessions_found(path: Path) -> tuple[list[Session], list[BadLine]]:
    """Read the sessions in order, each from its last line, and the lines that cannot be used."""
    lines, bad = json_lines(path, "sessions", _SESSION.validate_python)
    return list({session.started: session for session in lines}.values()), bad


def _machine() -> str:
    import torch  # its import takes seconds; reading sessions does not need it

    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    lines = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    processor = next((line.partition(":")[2].strip() for line in lines), platform.machine())
    cores = f"{len(os.sched_getaffinity(0))} cores of {processor}"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join([f"{platform.node()}: {cores}", memory, *(f"{gpus.count(name)} {name}" for name in set(gpus))])


def _commit() -> str | None:
    if not (_REPOSITORY / ".git").exists():
        return None
    git = ["git", "-C", str(_REPOSITORY)]
    try:
        commit, changes = (
            subprocess.check_output([*git, *asked], stderr=subprocess.DEVNULL, text=True, timeout=10)
            for asked in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit[:12] + "+" * bool(changes)

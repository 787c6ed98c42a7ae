"""events.jsonl: one JSON object for each time that a run stepped in by itself, such as for a gate that fired."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from pydantic import TypeAdapter

from fp8rl.numerics.core.files import append_line, write_atomically
from fp8rl.numerics.core.reading import BadLine, json_lines, whole_json_lines


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that the run did by itself: a gate fired, a loss was not finite, the run was resumed, engines were
    replaced, a sync was repeated, functions of the user failed, or a tracker was lost.
    """

    step: int
    metric: str
    """The metric that gave the reason."""
    value: float | None
    """Its value; None if it is not finite."""
    bound: str
    """The bound that it broke, in words."""
    action: str
    """A gate's action (`rl.experiment.gate_sections`), `replace_engine`, `resync`, `resume`, or `go_on`, without what
    was lost or has failed."""
    capsule: str | None
    """Its directory below the run's, None if there is none."""
    text: str
    """All of it in one sentence, as the console said it."""

    @property
    def said(self) -> str:
        """The sentence, and where the case is kept."""
        return self.text if self.capsule is None else f"{self.text} ({self.capsule})"


_EVENT = TypeAdapter(Event)


def append_event(path: Path, event: Event) -> None:
    """Append a line."""
    append_line(path, _line(event))


def read_events(path: Path) -> list[Event]:
    """The events in order; none if the file is missing. Raises `UserError` for a line that is no event."""
    return whole_json_lines(path, "events", _EVENT.validate_python)


def events_found(path: Path) -> tuple[list[Event], list[BadLine]]:
    """The events of a file that may be damaged, and the lines that are none."""
    return json_lines(path, "events", _EVENT.validate_python)


def cut_events(path: Path, step: int) -> None:
    """Forget events after `step`, of steps that a resumed run repeats."""
    if path.is_file():
        write_atomically(path, "".join(_line(event) + "\n" for event in read_events(path) if event.step <= step))


def _line(event: Event) -> str:
    return json.dumps(dataclasses.asdict(event), allow_nan=False)

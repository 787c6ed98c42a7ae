"""events.jsonl: what a run did on its own account, one JSON object for each time that it stepped in."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter

from fp8rl.numerics.core.files import append_line, write_atomically
from fp8rl.numerics.core.reading import BadLine, json_lines, whole_json_lines


@dataclasses.dataclass(frozen=True)
class Event:
    """A firing of a gate, a loss that was not finite, engines that were replaced or synced anew, a resume, or the
    loss of wandb.

    metric: what gave the reason. value: of the metric; None if it is not finite. bound: the one it broke, in words.
    action: that of a gate (see `rl.experiment.gates.GateSection`), `replace_engine`, `resume`, or `go_on` without
    wandb. capsule: its directory
    below the run's, None if there is none. text: all in one sentence, as the console said it.
    """

    step: int
    metric: str
    value: float | None
    bound: str
    action: str
    capsule: str | None
    text: str

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


# log.txt: what the console said, the driver's warnings, and the traceback of what ended a run.

CONSOLE = logging.getLogger("fp8rl.console")
"""Where the console repeats its lines."""


class _QuietFile(logging.FileHandler):
    """A log that is silent about a full disk: the error that ends the run says so; the log must not repeat it line by
    line."""

    def handleError(self, record: logging.LogRecord) -> None: ...


@contextmanager
def run_log(path: Path) -> Iterator[None]:
    """Append to `path` inside the block: console lines, and from all libraries warnings and what is worse."""
    handler = _QuietFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    CONSOLE.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    except KeyboardInterrupt:
        CONSOLE.info("interrupted")
        raise
    except Exception:
        CONSOLE.exception("the run failed")
        raise
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()

"""The process of a tracker: it follows the files of a run, and tells the tracker what is new in them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8rl.numerics.core.files import write_atomically
from fp8rl.rl.record.events import Event
from fp8rl.rl.record.rollouts import rollouts_found, shown
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import Tracked, Tracker, start

_LOOK_SECONDS = 0.5
_ORPHAN_SECONDS = 10.0
"""Seconds to write what is left when the run's own process has died."""


def follow(
    tracker: Tracker,
    run: Tracked,
    begin: Mapping[str, int],
    ended: threading.Event,
    say: Callable[[str], object],
    told: Path,
) -> None:
    """Tell a tracker of every new row, event and rollout, until the run has ended and none is left.

    begin: bytes of each file that a run that goes on has kept. say: told once what the tracker says it has lost. told:
    file with the step of the last row that was told: what was kept after it, as where the tracker died, is told too.
    """
    files = RunDir(Path(run.folder))
    rows = _Lines(files.metrics, _begin(files.metrics, begin[files.metrics.name], told))
    events = _Lines(files.events, begin[files.events.name])
    to_show: int | None = None
    said = ""
    while True:
        last, busy = ended.is_set(), False
        for row in rows:
            busy = True
            _show(tracker, files, to_show)  # a run writes the rollouts of a step before the next step's row
            step = row.pop("step")
            tracker.log(step, row)
            write_atomically(told, f"{step}\n")
            to_show = step if run.shows(step) else None
        for event in events:
            tracker.alert(Event(**event).said)
        if tracker.lost_part and not said:
            said = tracker.lost_part
            say(said)
        if last:
            _show(tracker, files, to_show)
            return
        if not busy:
            ended.wait(_LOOK_SECONDS)


def _begin(metrics: Path, kept: int, told: Path) -> int:
    """Return the bytes of the rows that a tracker has, of the first `kept` ones."""
    if not kept or not told.is_file():
        return kept
    last, at, has = int(told.read_text()), 0, 0
    with metrics.open("rb") as rows:
        for line in rows:
            if at == kept or (step := json.loads(line)["step"]) > last:
                break
            at, has = at + len(line), step
    write_atomically(told, f"{has}\n")  # later steps that it was told of are repeated, and told again
    return at


class _Lines:
    """The objects of a file of JSON lines that grows; iterating yields those that are whole and not read yet."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path, self._at = path, begin

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield json.loads(line)


def _show(tracker: Tracker, files: RunDir, step: int | None) -> None:
    if step is not None and (path := files.rollouts(step)).is_file():
        records, _ = rollouts_found(path)
        tracker.show(step, shown(records))


def main() -> None:
    """The process's main function. Standard input is its lifeline: a line at the end says how the run ended; without
    one its owner has died. Standard output tells the owner what is lost; what libraries print goes to the log."""
    to_owner = os.dup(1)
    os.dup2(2, 1)
    asked = json.loads(sys.stdin.readline())
    ended, end = threading.Event(), [""]
    threading.Thread(target=_listen, args=(ended, end), name="lifeline", daemon=True).start()
    run = Tracked(**asked["run"])
    tracker = start(sys.argv[1], run)

    def say(sentence: str) -> None:
        os.write(to_owner, sentence.encode())

    follow(tracker, run, asked["begin"], ended, say, run.place(sys.argv[1]) / "told")
    told = tracker.lost_part
    orphaned = {"exit_code": 1, "summary": {}, "seconds": _ORPHAN_SECONDS}
    tracker.finish(**(json.loads(end[0]) if end[0] else orphaned))
    if tracker.lost_part and not told:
        say(tracker.lost_part)
    sys.stdout.flush()
    os._exit(0)  # a library's own threads may wait for a server that is gone


def _listen(ended: threading.Event, end: list[str]) -> None:
    """Wait for the line that says how the run ended, and put it into `end`; it stays empty if the owner has died."""
    end[0] = sys.stdin.readline()
    ended.set()
    if not end[0]:
        time.sleep(_ORPHAN_SECONDS)
        os.killpg(0, signal.SIGKILL)  # the whole session: nobody waits for what hangs


if __name__ == "__main__":
    main()

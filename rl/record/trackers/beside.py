"""Processes beside a run that tell trackers of it, so that no step ever waits for one.

The run writes metrics.jsonl as ever; each process follows that file. A tracker that hangs or dies holds up its own
process alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fp8rl.rl.record.trackers import Tracked, Tracker, start

_LOOK_SECONDS = 0.5
_FINISH_SECONDS = 60.0
"""Seconds for what a tracker has not taken yet at the end."""


class Beside:
    """Trackers of a run, in processes of their own; what they print is in NAME/log.txt of its folder.

    `lost` is told the sentence that says so, once for each that ends before the run does.
    """

    def __init__(
        self, names: Sequence[str], run: Tracked, metrics: Path, after: int, lost: Callable[[str], object]
    ) -> None:
        """metrics: the file of rows. after: the last step that is recorded already."""
        self.lost = lost
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = {name: run.place(name) / "log.txt" for name in names}
        asked = json.dumps({"run": dataclasses.asdict(run), "metrics": str(metrics), "after": after})
        for name in names:
            command = [sys.executable, "-P", "-m", "fp8rl.rl.record.trackers.beside", name]
            with self._logs[name].open("ab") as output:
                self._processes[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
                )
            self._write(name, asked + "\n")

    def look(self) -> bool:
        """Say which have ended; whether any has."""
        for name in [name for name, process in self._processes.items() if process.poll() is not None]:
            self._lose(name, "it has ended")
        return len(self._processes) < len(self._logs)

    def finish(self, failed: bool) -> None:
        """Let each write what is left, for a while, then end it. A second call does nothing."""
        for name in self._processes:
            self._write(name, json.dumps({"failed": failed}) + "\n")
        until = time.monotonic() + _FINISH_SECONDS
        for name, process in list(self._processes.items()):
            try:
                done = process.wait(max(0.0, until - time.monotonic())) == 0
            except subprocess.TimeoutExpired:
                done = False
                process.kill()
                process.wait()
            if not done:
                self._lose(name, "it did not take the last rows")
        self._processes, self._logs = {}, {}

    def _write(self, name: str, text: str) -> None:
        with suppress(OSError):  # one that has ended is noticed by `look`
            stdin = self._processes[name].stdin
            assert stdin is not None
            stdin.write(text.encode())
            stdin.flush()

    def _lose(self, name: str, why: str) -> None:
        process, log = self._processes.pop(name), self._logs[name]
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1] if lines else "it said nothing"
        self.lost(f"{name} is lost: {why} ({last}; see {log}); metrics.jsonl and the report are kept")


def follow(tracker: Tracker, metrics: Path, after: int, ended: Callable[[], bool]) -> None:
    """Tell a tracker of every row after a step, as the file gets them, until `ended` and none is left."""
    begun = b""
    with metrics.open("rb") as file:
        while True:
            last = ended()
            begun += file.read()
            *lines, begun = begun.split(b"\n")
            for line in lines:
                row = json.loads(line)
                if (step := row.pop("step")) > after:
                    tracker.log(step, row)
            if last:
                return
            if not lines:
                time.sleep(_LOOK_SECONDS)


def main() -> None:
    """The process's main function. Standard input is its lifeline: a line at the end says how the run ended; without
    one its owner has died."""
    asked = json.loads(sys.stdin.readline())
    end: list[str] = []
    listening = threading.Thread(target=lambda: end.append(sys.stdin.readline()), name="lifeline", daemon=True)
    listening.start()
    tracker = start(sys.argv[1], Tracked(**asked["run"]))
    follow(tracker, Path(asked["metrics"]), asked["after"], lambda: bool(end))
    tracker.finish(failed=not end[0] or json.loads(end[0])["failed"])
    sys.stdout.flush()
    os._exit(0)  # a library's own threads may wait for a server that is gone


if __name__ == "__main__":
    main()

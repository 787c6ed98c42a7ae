"""The processes that tell trackers of a run, as the run sees them. No step ever waits for one.

The run writes its files as ever; each process follows them (`follow.py`). A tracker that hangs or dies holds up its own
process alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers import Tracked

_FINISH_SECONDS = {"wandb": 150.0}
"""Seconds for what a tracker has not taken yet at the end. Of wandb's, two minutes are for the upload."""
_OTHERS_FINISH_SECONDS = 60.0


class TrackerProcesses:
    """The processes of a run's trackers; what each prints is in NAME/log.txt of the run's folder.

    Args:
        names: of `TRACKERS`.
        run: told to each. It starts here: events that its files have now are not told, nor rows that were told before.
        lost: told the name of a tracker and a sentence, once for each that ends before the run does or loses a part.
    """

    def __init__(self, names: Sequence[str], run: Tracked, files: RunDir, lost: Callable[[str, str], object]) -> None:
        self._lost = lost
        self._lost_names: set[str] = set()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = {name: run.place(name) / "log.txt" for name in names}
        begin = {path.name: path.stat().st_size if path.exists() else 0 for path in (files.metrics, files.events)}
        asked = json.dumps({"run": dataclasses.asdict(run), "begin": begin})
        for name in names:
            command = [sys.executable, "-P", "-m", "fp8rl.rl.record.trackers.follow", name]
            with self._logs[name].open("ab") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
                )
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._processes[name] = process
            self._write(name, asked)

    def look(self) -> set[str]:
        """Say which have ended, or have lost a part; the names of all that have so far."""
        for name, process in list(self._processes.items()):
            self._hear(name, process)
            if process.poll() is not None:
                self._end(name, "it has ended")
        return set(self._lost_names)

    def finish(self, exit_code: int, summary: Mapping[str, Any]) -> None:
        """Let each write what is left, for a while, then end it. A second call does nothing."""
        seconds = {name: _FINISH_SECONDS.get(name, _OTHERS_FINISH_SECONDS) for name in self._processes}
        for name in self._processes:
            end = {"exit_code": exit_code, "summary": dict(summary), "seconds": seconds[name]}
            self._write(name, json.dumps(end))
        began = time.monotonic()
        for name, process in list(self._processes.items()):
            try:
                done = process.wait(max(0.0, began + seconds[name] - time.monotonic())) == 0
            except subprocess.TimeoutExpired:
                done = False
                process.kill()
                process.wait()
            self._hear(name, process)
            self._end(name, "" if done else "it did not take the last rows")

    def _write(self, name: str, line: str) -> None:
        with suppress(OSError):  # one that has ended is noticed by `look`
            stdin = self._processes[name].stdin
            assert stdin is not None
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    def _hear(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Pass on what a tracker says of itself: one sentence at most."""
        assert process.stdout is not None
        if said := process.stdout.read():
            self._lose(name, said.decode(errors="replace").strip())

    def _end(self, name: str, why: str) -> None:
        """Forget the process of a tracker. why: empty if it ended well."""
        process, log = self._processes.pop(name), self._logs[name]
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        if why:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            last = lines[-1] if lines else "it said nothing"
            self._lose(name, f"{name} is lost: {why} ({last}; see {log}); metrics.jsonl and the report are kept")

    def _lose(self, name: str, sentence: str) -> None:
        self._lost_names.add(name)
        self._lost(name, sentence)

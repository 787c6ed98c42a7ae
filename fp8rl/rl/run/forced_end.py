"""Ends a process whose orderly end takes too long: says what it waits for, and kills what it has started."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psutil

from fp8rl.rl.run.early_end import STOPPED
from fp8rl.rollout.deadlines import kill_family

_ROOT = Path(__file__).parents[2]
_GONE_SECONDS = 5.0
"""Time in which processes that are killed are gone."""


@contextmanager
def bounded(what: str, seconds: float) -> Iterator[None]:
    """End this process by force if the block takes longer than so many seconds. what: the block waits for."""
    over = threading.Event()

    def watch() -> None:
        if not over.wait(seconds):
            end_by_force(f"error: found {what} not ended after {seconds:g} s", STOPPED)

    threading.Thread(target=watch, name="deadline", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def exit_within(seconds: float, code: int) -> None:
    """Have this process, whose work is done, end within so many seconds: a thread that a user's function has left
    behind would keep it for ever."""

    def watch() -> None:
        threading.Event().wait(seconds)
        left = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
        end_by_force(f"found {', '.join(left) or 'this process'} not ended {seconds:g} s after all else", code)

    threading.Thread(target=watch, name="exit", daemon=True).start()


def end_by_force(why: str, code: int) -> NoReturn:
    """Say why and where the main thread stands, kill all that this process has started, and exit with this code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    ours = [line for line in stack if Path(line.filename).is_relative_to(_ROOT) and ".venv" not in line.filename]
    at = "".join(
        f", at {Path(each.filename).relative_to(_ROOT.parent)}:{each.lineno} in {each.name}" for each in ours[-1:]
    )
    os.write(2, f"{why}{at}: killing every process that was started\n".encode())  # a stream may be locked
    psutil.wait_procs(kill_family(os.getpid(), itself=False), timeout=_GONE_SECONDS)
    os._exit(code)

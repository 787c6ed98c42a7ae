"""Messages of a run that ends before its last step although neither its input nor its code is wrong."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil

from fp8rl.numerics.core.terminal import say_error
from fp8rl.rollout.deadlines import kill_family

if TYPE_CHECKING:
    from fp8rl.rl.record.run_dir import RunDir

STOPPED = 3
"""Exit code of a run that a gate, a loss that is not finite, or a failure of what it runs on has stopped."""


def say_failed(files: RunDir, error: object) -> None:
    """Say what the failure was, where its logs are, and how to go on."""
    say_error(f"error: {error}")
    if not files.experiment.is_file():
        say_error(f"{files.path} is gone: put it back for --resume, or begin again")
        return
    say_error(f"logs     {files.log}, {files.path}/engine_*.log")
    unbegun = "the run had not begun: the same command begins again"
    say_error(how_to_go_on(files, unbegun))


def end_without_ray(files: RunDir, why: str) -> None:
    """Say it and end this process on the spot: without Ray nothing can be unwound. All else dies with its owner."""
    from fp8rl.rl.record.events import CONSOLE  # the help of a command does without the models of its rows

    CONSOLE.error(why)
    say_failed(files, why)
    os._exit(STOPPED)


def how_to_go_on(files: RunDir, unbegun: str = "the run had not begun, and leaves nothing") -> str:
    """Return what to type after an interrupt; unbegun: what to say of a run that has not reached its first row."""
    if files.checkpoint_steps():
        return f"resume   fp8rl train {files.experiment} --resume"
    if files.begun:
        return f"{files.path} has no checkpoint yet: the same command with --overwrite begins again"
    return unbegun


# The end of a process whose orderly end takes too long: it says what it waits for, and kills what it has started.

_ROOT = Path(__file__).parents[3]
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
    at = f", at {Path(ours[-1].filename).relative_to(_ROOT)}:{ours[-1].lineno} in {ours[-1].name}" if ours else ""
    os.write(2, f"{why}{at}: killing every process that was started\n".encode())  # a stream may be locked
    psutil.wait_procs(kill_family(os.getpid(), itself=False), timeout=_GONE_SECONDS)
    os._exit(code)

"""What is said of a run that ends before its last step although neither its input nor its code is wrong."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fp8rl.numerics.core.terminal import say_error, typed
from fp8rl.rl.record.log import CONSOLE
from fp8rl.rl.record.metrics_log import metrics_found

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
    say_error(how_to_go_on(files))


def end_without_ray(files: RunDir, why: str) -> None:
    """Say it and end this process on the spot: without Ray nothing can be unwound. All else dies with its owner."""
    CONSOLE.error(why)
    say_failed(files, why)
    os._exit(STOPPED)


def resume_command(files: RunDir) -> str:
    """Return the line that says how to resume a run."""
    return f"resume   {typed('fp8rl')} train {files.experiment} --resume"


def how_to_go_on(files: RunDir) -> str:
    """Return what to type after an interrupt."""
    if steps := files.checkpoint_steps():
        rows, _ = metrics_found(files.metrics)
        lost = int(rows[-1]["step"]) - steps[-1] if rows else 0
        after = f"; {lost} later step{'s are' if lost > 1 else ' is'} lost" if lost > 0 else ""
        return f"saved    step {steps[-1]}, from which a resume continues{after}\n{resume_command(files)}"
    if files.begun:
        return f"{files.path} has no checkpoint yet: the same command with --overwrite begins again"
    return "the run had not begun: the same command begins again"

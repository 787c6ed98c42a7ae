"""What a run says when it ends: its result, or what was lost or failed and how to go on."""

from __future__ import annotations

import dataclasses

import ray

from fp8rl.numerics.core.errors import say_error, typed
from fp8rl.rl.record.history import read_events
from fp8rl.rl.record.metrics_log import metrics_found, read_metrics
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers.to_wandb import latest, leet
from fp8rl.rl.report.report import write_report
from fp8rl.rl.report.summary import summarize, verdict
from fp8rl.rl.run.background import BlockedError
from fp8rl.rl.run.cluster.reservations import NoRoomError
from fp8rl.rl.run.events import FilterError, TooManyFailuresError
from fp8rl.rl.run.interrupts import LOST, STOPPED
from fp8rl.rl.run.record import Record
from fp8rl.rollout.types import EngineError
from fp8rl.trainer.actor import TrainerDiedError
from fp8rl.weight_sync.manifest import SyncError

FAILURES = (
    EngineError,
    BlockedError,
    FilterError,
    NoRoomError,
    SyncError,
    TooManyFailuresError,
    TrainerDiedError,
    OSError,
    ray.exceptions.RayError,
)
"""Errors that end a run although neither input nor code is wrong, such as a full disk: the run can be resumed."""


def finish(record: Record, stopped: str = "") -> None:
    """Wait for the last checkpoint, close the tracker, write the report and print the run's result.

    stopped: why the run ended before its last step, if it did.
    """
    record.checkpoints.wait()
    files = record.files
    summary = summarize(read_metrics(files.metrics), read_events(files.events))
    values = {key: value for key, value in dataclasses.asdict(summary).items() if value is not None}
    values |= {"warnings": len(summary.warnings), "interventions": len(summary.interventions)}
    record.tracker.finish({f"summary/{key}": value for key, value in values.items()}, exit_code=STOPPED * bool(stopped))
    record.events.deliver()
    record.end(stopped)
    report, _ = write_report(files.path)
    say = record.console.note
    say("")
    for line in verdict(summary)[: None if record.experiment.algorithm.samples else 1]:
        say(line, style="bold green" if summary.bitwise_equal else "bold")
    say(f"report   {report}")
    if stopped:
        say(f"stopped: {stopped}", style="bold red")
        for line in commands_after_a_stop(files, record.step):
            say(line)
    else:
        if files.adapter.is_dir():
            say(f"adapter  {files.adapter}")
        if files.model.is_dir():
            say(f"model    {files.model}")
        for line in commands_at_the_end(files):
            say(line)
    if latest(files).exists():
        say(f"wandb    {leet(files, 'inspect', '--summary')}")


def commands_after_a_stop(files: RunDir, step: int) -> list[str]:
    """Return the commands that explain a stop, if its step left a capsule, and that resume the run."""
    return [*_explain(files, [step] if step in files.capsule_steps() else []), resume_command(files)]


def commands_at_the_end(files: RunDir) -> list[str]:
    """Return the commands that explain the run's first capsule, if there is one, and that serve the model."""
    return [*_explain(files, files.capsule_steps()[:1]), f"serve    {typed('fp8rl')} serve {files.path}"]


def _explain(files: RunDir, steps: list[int]) -> list[str]:
    return [f"why      {typed('fp8rl')} explain {files.capsule(step)}" for step in steps]


def resume_command(files: RunDir) -> str:
    """Return the line that says how to resume a run."""
    return f"resume   {typed('fp8rl')} train {files.experiment} --resume"


def say_failed(files: RunDir, error: object, left: int | None = None) -> int:
    """Print what failed or was lost, where its logs are, and how to resume the run. Return its exit code.

    left: how often the supervisor may start the run again. Above 0: the exit code is `LOST`, and it does so.
    """
    if left and left > 0:
        say_error(f"{error}; the run starts again from its last checkpoint, at most {left} more times")
        return LOST
    say_error(f"error: {error}")
    if not files.experiment.is_file():
        say_error(f"{files.path} is gone: put it back for --resume, or begin again")
        return STOPPED
    say_error(f"logs     {files.log}, {files.path}/engine_*.log")
    say_error(how_to_go_on(files))
    return STOPPED


def how_to_go_on(files: RunDir) -> str:
    """Return the line that says how to go on after an interrupt."""
    if steps := files.checkpoint_steps():
        rows, _ = metrics_found(files.metrics)
        lost = int(rows[-1]["step"]) - steps[-1] if rows else 0
        after = f"; {lost} later step{'s are' if lost > 1 else ' is'} lost" if lost > 0 else ""
        return f"saved    step {steps[-1]}, from which a resume continues{after}\n{resume_command(files)}"
    if files.begun:
        return f"{files.path} has no checkpoint yet: the same command with --overwrite begins again"
    return "the run had not begun: the same command begins again"

"""Runs an experiment from its start to its end. A trainer that is lost on the way is replaced."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import ray

from fp8rl.numerics.core.errors import typed
from fp8rl.rl.experiment import Experiment
from fp8rl.rl.record.history import read_events
from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.record.trackers.to_wandb import latest, leet
from fp8rl.rl.report.report import write_report
from fp8rl.rl.report.summary import summarize
from fp8rl.rl.report.verdict import verdict
from fp8rl.rl.run.checkpoints import resume_command
from fp8rl.rl.run.cluster.reservations import NoRoomError
from fp8rl.rl.run.events import TooManyFailuresError
from fp8rl.rl.run.feed.conversations import BlockedEnvironmentError
from fp8rl.rl.run.feed.feed import FilterError
from fp8rl.rl.run.feed.judging import RewardError
from fp8rl.rl.run.interrupts import STOPPED, ShutdownStack
from fp8rl.rl.run.run import LiveRun
from fp8rl.rl.run.stack import Stack
from fp8rl.rollout.types import EngineError
from fp8rl.trainer.actor import TrainerDiedError
from fp8rl.weight_sync.manifest import SyncError

FAILURES = (
    EngineError,
    BlockedEnvironmentError,
    FilterError,
    NoRoomError,
    RewardError,
    SyncError,
    TooManyFailuresError,
    TrainerDiedError,
    OSError,
    ray.exceptions.RayError,
)
"""Errors that end a run although neither input nor code is wrong, such as a full disk: the run can be resumed."""


def run_with_restarts(
    experiment: Experiment, files: RunDir, loop: Callable[[LiveRun], str], notes: Sequence[str] = ()
) -> str:
    """Run `loop` and finish the run. Return the result of `loop`: why it ended before its last step, or nothing.

    A lost trainer is replaced, from the last checkpoint, up to `run.restarts` times. The engines stay up meanwhile, and
    are synced back to that checkpoint's weights.

    notes: remarks on the input.

    Raises:
        TrainerDiedError: a trainer was lost once more. EngineError, NoRoomError, SyncError, RayError: as they came.
    """
    stack: Stack | None = None
    lost = ""
    with ShutdownStack(outer=True) as outer:
        for left in reversed(range(experiment.run.restarts + 1)):
            try:
                with LiveRun(experiment, files, outer, stack, lost, notes) as run:
                    stack = run.stack
                    stopped = loop(run)
                    finish(run, stopped)
                    return stopped
            except TrainerDiedError as error:
                if stack is None or not left:
                    raise
                lost = str(error)
                logging.getLogger(__name__).warning("%s; %d restarts are left", lost, left)
    raise AssertionError("unreachable")


def finish(run: LiveRun, stopped: str = "") -> None:
    """Wait for the last checkpoint, close the tracker, write the report and print the run's result.

    stopped: why the run ended before its last step, if it did.
    """
    run.checkpoints.wait()
    summary = summarize(read_metrics(run.files.metrics), read_events(run.files.events))
    values = {key: value for key, value in dataclasses.asdict(summary).items() if value is not None}
    run.tracker.finish({f"summary/{key}": value for key, value in values.items()}, exit_code=STOPPED * bool(stopped))
    run.stack.events.deliver()
    run.end(stopped)
    report, _ = write_report(run.files.path)
    say = run.console.note
    say("")
    for line in verdict(summary)[: None if run.experiment.algorithm.samples else 1]:
        say(line, style="bold green" if summary.bitwise_equal else "bold")
    say(f"report   {report}")
    if stopped:
        say(f"stopped: {stopped}", style="bold red")
        for line in commands_after_a_stop(run.files, run.step):
            say(line)
    else:
        if run.files.adapter.is_dir():
            say(f"adapter  {run.files.adapter}")
        if run.files.model.is_dir():
            say(f"model    {run.files.model}")
        say(f"serve    {typed('fp8rl')} serve {run.files.path}")
    if latest(run.files).exists():
        say(f"wandb    {leet(run.files, 'inspect', '--summary')}")


def commands_after_a_stop(files: RunDir, step: int) -> list[str]:
    """Return the commands that explain a stop, if its step left a capsule, and that resume the run."""
    why = [f"why      {typed('fp8rl')} explain {files.capsule(step)}"] if step in files.capsule_steps() else []
    return [*why, resume_command(files)]

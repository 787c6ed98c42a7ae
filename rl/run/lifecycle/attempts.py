"""A run from its start to its end, over trainers that are lost on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import ray

from fp8rl.rl.experiment import Experiment
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.cluster.seats import NoRoomError
from fp8rl.rl.run.feed.conversations import EnvironmentError
from fp8rl.rl.run.feed.failures import TooManyFailuresError
from fp8rl.rl.run.feed.feed import FilterError
from fp8rl.rl.run.feed.judging import RewardError
from fp8rl.rl.run.lifecycle.ending import finish
from fp8rl.rl.run.lifecycle.interrupts import Closing
from fp8rl.rl.run.run import LiveRun
from fp8rl.rl.run.stack import Stack
from fp8rl.rollout.errors import EngineError
from fp8rl.trainer.actor import TrainerDiedError
from fp8rl.weight_sync.manifest import SyncError

FAILURES = (
    EngineError,
    EnvironmentError,
    FilterError,
    NoRoomError,
    RewardError,
    SyncError,
    TooManyFailuresError,
    TrainerDiedError,
    OSError,
    ray.exceptions.RayError,
)
"""What ends a run although neither its input nor its code is wrong, such as a full disk: it can be resumed."""


def attempted(experiment: Experiment, files: RunDir, loop: Callable[[LiveRun], str], notes: Sequence[str] = ()) -> str:
    """Run `loop`, which returns why it ended before its last step, and finish the run; what `loop` returned.

    notes: what was said of the input.

    A trainer that is lost is followed by another, from the last checkpoint, up to `run.restarts` times. The engines
    stay up meanwhile, and are synced back to that checkpoint's weights.

    Raises:
        TrainerDiedError: once more often. EngineError, NoRoomError, SyncError, RayError: as they came.
    """
    stack: Stack | None = None
    lost = ""
    with Closing(outer=True) as outer:
        for left in reversed(range(experiment.run.restarts + 1)):
            try:
                with LiveRun.open(experiment, files, outer, stack, lost, notes) as run:
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

"""A run from its start to its end, over trainers that are lost on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import ray

from rl.experiment import Experiment
from rl.record.run_dir import RunDir
from rl.run.cluster.seats import NoRoomError
from rl.run.feed.conversations import EnvironmentError
from rl.run.feed.failures import TooManyFailuresError
from rl.run.feed.feed import FilterError
from rl.run.feed.judging import RewardError
from rl.run.lifecycle.ending import finish
from rl.run.lifecycle.interrupts import Closing
from rl.run.run import LiveRun
from rl.run.stack import Stack
from rollout.errors import EngineError
from trainer.actor import TrainerDiedError
from weight_sync.manifest import SyncError

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

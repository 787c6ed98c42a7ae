"""Going on when an engine dies, or answers at other weights than the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rl.stack import Stack
from rollout.errors import StaleWeightsError

Result = TypeVar("Result")


def recovering(stack: Stack, use: Callable[[], Result]) -> Result:
    """`use()`, which talks to the engines. If it fails and an engine proves to be dead, it is done anew, once.

    Before that, every dead engine is replaced by one that starts from a checkpoint of the trainer's current weights,
    and a verified sync brings all engines to one state. What is no engine's death is raised as it came.
    """
    assert stack.pool is not None and stack.bridge is not None
    try:
        return use()
    except Exception as error:
        lost = stack.pool.lost()
        if lost == 0:
            raise
        stack.warn(f"engine died: replacing {lost} of {stack.spec.rollout.engines} ({str(error).splitlines()[0]})")
        stack.pool.recover(stack.bridge.write_checkpoint(), stack.trainer.weight_version)
        stack.bridge.sync(stack.endpoints())
        return use()


def resyncing(stack: Stack, use: Callable[[], Result]) -> Result:
    """`use()`, which samples. If tokens come from stale weights, it is done anew, once, after a verified sync.

    Nothing of the first answer is kept. A second time is raised as it came.
    """
    try:
        return use()
    except StaleWeightsError as error:
        bridge = stack.bridge
        assert bridge is not None
        stack.warn(f"stale weights: syncing and sampling again ({error})")
        stack.standing.stale_resyncs += 1
        recovering(stack, lambda: bridge.sync(stack.endpoints()))
        return use()

"""Going on when an engine dies, or answers at other weights than the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rl.run.engines import EnginePool
from rollout.errors import StaleWeightsError
from weight_sync.bridge import Bridge

Result = TypeVar("Result")
Tell = Callable[[str, int, str], None]
"""Takes note of what was mended: the metric that counts it, how many there were, and in words."""

ENGINES_REPLACED = "rollout/engines_replaced"
STALE_RESYNCS = "gates/stale_resyncs"


def recovering(engines: EnginePool, bridge: Bridge, tell: Tell, use: Callable[[], Result]) -> Result:
    """`use()`, which talks to the engines. If it fails and an engine proves to be dead, it is done anew, once.

    Before that, every dead engine is replaced by one that starts from a checkpoint of the trainer's current weights,
    and a verified sync brings all engines to one state. What is no engine's death is raised as it came.
    """
    try:
        return use()
    except Exception as error:
        lost = engines.lost()
        if lost == 0:
            raise
        reason = str(error).splitlines()[0]
        tell(ENGINES_REPLACED, lost, f"engine died: replacing {lost} of {len(engines)} ({reason})")
        engines.recover(bridge.write_checkpoint(), bridge.trainer.weight_version)
        bridge.sync(engines.endpoints())
        return use()


def resyncing(engines: EnginePool, bridge: Bridge, tell: Tell, use: Callable[[], Result]) -> Result:
    """`use()`, which samples. If tokens come from stale weights, it is done anew, once, after a verified sync.

    Nothing of the first answer is kept. A second time is raised as it came.
    """
    try:
        return use()
    except StaleWeightsError as error:
        tell(STALE_RESYNCS, 1, f"stale weights: syncing and sampling again ({error})")
        recovering(engines, bridge, tell, lambda: bridge.sync(engines.endpoints()))
        return use()

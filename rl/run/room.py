"""Trainer and engines on the same GPUs, of which each gives the other room while it works."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fp8rl.rl.run.engines.pool import EnginePool
from fp8rl.rl.run.turns import Side
from fp8rl.rollout.engine import Slept
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.step.result import MovedAside


@dataclass
class SharedRoom:
    """Has engines sleep while the trainer works, and its optimizer lie in the host's memory while they sample.

    Engines that sleep hold no weights: the next sync brings them all of it, and wakes them. Until then they get no
    groups, and no other engine starts in place of a lost one.

    Attributes:
        trainer: the one of now.
    """

    engines: EnginePool
    trainer: TrainerGroup
    _figures: dict[str, float] = field(default_factory=dict)
    _first_behind: int | None = None

    def make(self, side: Side) -> None:
        """Have the other side go, then this one come."""
        began = time.perf_counter()
        if side == "train":
            slept = self.engines.sleep()
            self.trainer.take_back()
            self._figures |= self._of_engines(slept)
        else:
            moved = self.trainer.put_aside()
            self.engines.wake()
            self._figures |= of_trainer(moved)
        seconds = self._figures.get("perf/turn_seconds", 0.0) + time.perf_counter() - began
        self._figures["perf/turn_seconds"] = seconds

    def metrics(self) -> dict[str, float]:
        """`memory/...` since this was last asked, and the seconds that it took to make room."""
        figures, self._figures = self._figures, {}
        return figures

    def _of_engines(self, slept: Sequence[Slept]) -> dict[str, float]:
        if not slept:
            return {}
        behind = max(each.behind for each in slept)
        self._first_behind = behind if self._first_behind is None else self._first_behind
        return {
            "memory/engine_released_bytes": float(max(each.released for each in slept)),
            "memory/behind_bytes": float(behind),
            "memory/behind_growth_bytes": float(behind - self._first_behind),
        }


def of_trainer(moved: Sequence[MovedAside]) -> dict[str, float]:
    """`memory/...` of the rank that holds most."""
    fullest = max(moved, key=lambda each: each.moved + each.stays)
    return {
        "memory/trainer_moved_bytes": float(fullest.moved),
        "memory/trainer_stays_bytes": float(fullest.stays),
    }

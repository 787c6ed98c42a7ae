"""The turns of trainer and engines on the device, and the offloading between them where they share GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from fp8rl.rl.run.engines.engines import Engines
from fp8rl.trainer.actor import TrainerGroup

Side = Literal["rollout", "train"]


class DeviceTurns:
    """The owner of the device's turn: that of the engines, whose answers are waited for, or that of the trainer.

    Where both are on the same GPUs, engines sleep while the trainer works, and its optimizer lies in the host's memory
    while they sample. Engines that sleep hold no weights: the next sync brings them all of it, and wakes them. Until
    then they get no groups, and no other engine starts in place of a lost one.

    Elsewhere both hold what they need side by side, so that nothing moves when the turn does, and engines that sample
    ahead go on while the trainer trains.
    """

    def __init__(self, sharing: tuple[Engines, TrainerGroup] | None = None) -> None:
        """sharing: the sides, where they are on the same GPUs. The trainer is there first."""
        self._sharing = sharing
        self._there: Side = "train"
        self._holder: Side | None = None
        self._metrics: dict[str, float] = {}
        self._first_behind: float | None = None

    @property
    def shared(self) -> bool:
        """Return whether the sides are on the same GPUs."""
        return self._sharing is not None

    @contextmanager
    def turn(self, side: Side) -> Iterator[None]:
        """Give the device to one side for the block. A side may take it again inside its own turn.

        Raises RuntimeError: the other side has it, and would lose what it computes with.
        """
        before = self._holder
        if before not in (None, side):
            raise RuntimeError(f"found the turn of {before}, expected it to have ended before that of {side} begins")
        self._holder = side
        try:
            if self._sharing is not None and self._there != side:
                began = time.perf_counter()
                self._make_room(side, *self._sharing)
                seconds = self._metrics.get("perf/turn_seconds", 0.0) + time.perf_counter() - began
                self._metrics["perf/turn_seconds"] = seconds
                self._there = side
            yield
        finally:
            self._holder = before

    def metrics(self) -> dict[str, float]:
        """`memory/...` since the last call, of the rank or engine that holds most, and the seconds that turns took."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _make_room(self, side: Side, engines: Engines, trainer: TrainerGroup) -> None:
        """Have the other side go, then this one come."""
        if side == "train":
            slept = engines.sleep()
            trainer.onload()
            if slept:
                behind = float(max(each.behind for each in slept))
                self._first_behind = behind if self._first_behind is None else self._first_behind
                self._metrics |= {
                    "memory/engine_released_bytes": float(max(each.released for each in slept)),
                    "memory/behind_bytes": behind,
                    "memory/behind_growth_bytes": behind - self._first_behind,
                }
        else:
            moved = trainer.offload()
            engines.wake()
            fullest = max(moved, key=lambda each: each.moved + each.stays)
            self._metrics |= {
                "memory/trainer_moved_bytes": float(fullest.moved),
                "memory/trainer_stays_bytes": float(fullest.stays),
            }

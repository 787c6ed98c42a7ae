"""Whose turn the device is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fp8rl.rl.run.engines.pool import EnginePool
from fp8rl.rollout.engine import Slept
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.trainer.step.result import MovedAside

Side = Literal["rollout", "train"]


class Room(Protocol):
    """Makes room for a side, in which the other one was."""

    def make(self, side: Side) -> object: ...


class Turns:
    """The owner of whose turn the device is: that of the engines, whose answers are waited for, or that of the trainer.

    Without a `room` both sides hold what they need side by side, so that nothing moves when the turn does, and engines
    that sample ahead go on while the trainer trains.
    """

    def __init__(self, room: Room | None = None) -> None:
        """room: makes it for the side whose turn begins, unless it had the last one. The trainer is there first."""
        self._room = room
        self._there: Side = "train"
        self._holder: Side | None = None

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
            if self._room is not None and self._there != side:
                self._room.make(side)
                self._there = side
            yield
        finally:
            self._holder = before


# Trainer and engines on the same GPUs, of which each gives the other room while it works.


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
            self.trainer.onload()
            self._figures |= self._of_engines(slept)
        else:
            moved = self.trainer.offload()
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

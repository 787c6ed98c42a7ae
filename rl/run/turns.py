"""Whose turn the device is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

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

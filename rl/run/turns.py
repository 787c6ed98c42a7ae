"""Whose turn the device is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Side = Literal["rollout", "train"]


class Turns:
    """The owner of whose turn the device is: that of the engines, whose answers are waited for, or that of the trainer.

    Both sides hold what they need side by side, so that nothing moves when the turn does, and engines that sample ahead
    go on while the trainer trains. A side that has to make room for the other would do so here, and nowhere else.
    """

    def __init__(self) -> None:
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
            yield
        finally:
            self._holder = before

"""What can go wrong in a pass, for callers that need no Megatron."""

from __future__ import annotations

from collections.abc import Sequence


class NonFiniteLossError(FloatingPointError):
    """A loss or a gradient norm was NaN or infinite; the weights were not changed.

    rows: of the batch, that the value came from; all of a micro-batch, or of the batch for a norm.
    """

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message, list(rows))  # both, so that the error survives pickling
        self.message, self.rows = message, list(rows)

    def __str__(self) -> str:
        return self.message

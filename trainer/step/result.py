"""The results of a pass over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PassResult:
    """One forward and backward pass, before its gradients are applied or dropped."""

    logprobs: Tensor
    """fp32 [B, S] on the CPU, at the weights that the pass ran with; zero at index 0 and in the padding."""
    metrics: dict[str, float]
    """The objective's metrics, summed."""
    loss: float
    """Over the whole batch, finite."""
    grad_norm: float
    """Before clipping, finite."""
    seconds: float
    """From the batch's arrival on the ranks to the gradient norm."""
    routes: Tensor | None = None
    """int16 [B, S, L, K] on the CPU, the experts that the trainer's own router would choose for each token, ascending
    and -1 in the padding; given for a batch with routes, whether or not they are replayed."""
    draws: Tensor | None = None
    """int64 [B, S] on the CPU, the token that `numerics.ops.draw` takes from the trainer's logits in place of each one;
    -1 at index 0, in the padding and in rows without a seed. None for a batch without seeds."""


@dataclass(frozen=True)
class RankPassResult:
    """A PassResult whose tensors hold only the batch's `rows`, in that order."""

    rows: list[int]
    result: PassResult


@dataclass(frozen=True)
class Scored:
    """A forward pass alone: its tensors as in a PassResult."""

    logprobs: Tensor
    routes: Tensor | None
    draws: Tensor | None


@dataclass(frozen=True)
class MovedAside:
    """Bytes that a rank has offloaded from its device, and bytes that it keeps there."""

    moved: int
    stays: int


# What can go wrong in a pass, for callers that need no Megatron.


class NonFiniteLossError(FloatingPointError):
    """A loss or a gradient norm was NaN or infinite; the weights were not changed.

    rows: of the batch, that the value came from; all of a micro-batch, or of the batch for a norm.
    """

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message, list(rows))  # both, so that the error survives pickling
        self.message, self.rows = message, list(rows)

    def __str__(self) -> str:
        return self.message

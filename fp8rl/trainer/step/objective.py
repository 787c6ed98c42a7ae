"""The interface of a loss to the trainer, which knows no reinforcement learning, and the results of a pass with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fp8rl.trainer.step.batch import TokenBatch


@dataclass(frozen=True)
class ObjectiveOutput:
    """One micro-batch's share of the loss and of the metrics."""

    loss: Tensor
    """Scalar with gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars by name, e.g. `train/entropy`; their gradients are dropped."""


class Objective(Protocol):
    """A loss that adds up: the sum over micro-batches and data-parallel ranks is the loss of the whole batch.

    An objective is built once per step from the whole batch and carries the denominators it divides by, so neither
    how rows fall into micro-batches nor how many ranks there are changes the result. The same holds for its metrics.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch, /) -> ObjectiveOutput:
        """Return the share of the rows in `batch`.

        Args:
            logprobs: fp32 [B, S] with gradient, aligned as in :class:`TokenBatch`; index 0 and padding are ignored. For
                a critic's objective its values.
            entropy: fp32 [B, S] with gradient, of the distribution each token was scored under, at the temperature of
                the batch, over the tokens that its truncation leaves.
            batch: the same rows; its tensors are on the device of `logprobs`.
        """
        ...


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
    -1 where the token has no loss or its row no seed. None for a batch without seeds."""


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
class OffloadReport:
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

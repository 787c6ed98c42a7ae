"""The interface between a loss and the trainer, which knows no reinforcement learning, and the results of a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fp8rl.trainer.step.batch import TokenBatch


@dataclass(frozen=True)
class ObjectiveOutput:
    """One micro-batch's share of the loss and of the metrics."""

    loss: Tensor
    """The micro-batch's share of the loss, a scalar with gradient."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """The micro-batch's share of each metric, a scalar by name, e.g. `train/entropy`. Gradients are dropped."""


class Objective(Protocol):
    """A loss that is a sum: the sum over micro-batches and data-parallel ranks is the loss of the whole batch.

    An objective is built once per step from the whole batch and holds its denominators. So the result depends neither
    on the division into micro-batches nor on the number of ranks. The same is true of its metrics.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch, /) -> ObjectiveOutput:
        """Return the share of the loss of the rows in `batch`.

        Args:
            logprobs: fp32 [B, S] with gradient, aligned as in :class:`TokenBatch`; index 0 and padding are ignored. For
                a critic's objective: the critic's values.
            entropy: fp32 [B, S] with gradient, the entropy of the distribution that each token was scored under. This
                is at the batch's temperature, over the tokens that the batch's truncation keeps.
            batch: the rows; its tensors are on the device of `logprobs`.
        """
        ...


@dataclass(frozen=True)
class Scored:
    """What a forward pass says about each token."""

    logprobs: Tensor
    """fp32 [B, S] on the CPU, log-probabilities or a critic's values, with the weights before the step; zero at index 0
    and in the padding."""
    routes: Tensor | None = None
    """int16 [B, S, L, K] on the CPU, the experts that the trainer's own router would choose for each token, ascending,
    and -1 in the padding. None for a batch without routes. It does not matter whether the routes are replayed."""
    draws: Tensor | None = None
    """int64 [B, S] on the CPU, the token that `numerics.ops.draw` draws from the trainer's logits at each token's
    position; -1 where the token has no loss or its row no seed. None for a batch without seeds, and of a critic."""


@dataclass(frozen=True, kw_only=True)
class PassResult(Scored):
    """One forward and backward pass, before its gradients are applied or dropped."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics, summed over the whole batch."""
    loss: float = math.nan
    """The loss of the whole batch; NaN if no pass succeeded."""
    grad_norm: float = math.nan
    """The global gradient norm before clipping; NaN if it was not taken."""
    seconds: float = 0.0
    """Seconds from the batch's arrival on the ranks to the gradient norm."""


@dataclass(frozen=True)
class RankPass:
    """The result of a pass on one rank."""

    rows: list[int]
    """Numbers of the batch's rows that this rank's data-parallel replica holds."""
    result: PassResult
    """Its tensors hold only these rows, in this order. Loss and metrics are those of the whole batch, on every rank."""
    loads: Tensor | None = None
    """int64 [layers of this stage, E], the number of the batch's tokens that chose each expert; None: not counted."""


@dataclass(frozen=True)
class OffloadReport:
    """Bytes that a rank has offloaded from its device, and bytes that remain on the device."""

    moved: int
    stays: int


# What can go wrong in a pass, for callers that need no Megatron.


class NonFiniteLossError(FloatingPointError):
    """A loss or a gradient norm was NaN or infinite. The weights were not changed.

    rows: for a loss, all rows of the micro-batches that it came from; for a norm, all rows of the batch.
    """

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message, list(rows))  # both, so that the error survives pickling
        self.message, self.rows = message, list(rows)

    def __str__(self) -> str:
        return self.message

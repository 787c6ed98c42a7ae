"""The interface between the trainer and a loss, and the results of a pass. The trainer needs no other RL code."""

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
    """The micro-batch's share of each metric, a scalar, by the metric's name (e.g. `train/entropy`)."""


class Objective(Protocol):
    """A loss that is a sum: its sum over micro-batches and data-parallel ranks is the loss of the whole batch.

    An objective is built once per step from the whole batch, and has the denominators of the whole batch. So the loss
    and the metrics depend neither on the division into micro-batches nor on the number of ranks.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch, /) -> ObjectiveOutput:
        """Return the share that the rows of `batch` have in the loss.

        Args:
            logprobs: fp32 [B, S] with gradient, aligned as in :class:`TokenBatch`. Index 0 and padding are ignored. A
                critic's objective gets the critic's values.
            entropy: fp32 [B, S] with gradient, the entropy of the distribution that gives each token its score. This
                distribution has the batch's temperature, and only the tokens that the batch's truncation keeps.
            batch: the rows, on the device of `logprobs`.
        """
        ...


@dataclass(frozen=True)
class Scored:
    """The results of a forward pass for each token."""

    logprobs: Tensor
    """fp32 [B, S] on the CPU, log-probabilities or a critic's values with the weights before the step. Zero at index 0
    and in the padding."""
    routes: Tensor | None = None
    """int16 [B, S, L, K] on the CPU, the experts that the trainer's own router chooses for each token, in ascending
    order, with or without replay. -1 in the padding. None for a batch without routes."""
    draws: Tensor | None = None
    """int64 [B, S] on the CPU, the token that `numerics.ops.draw` draws from the trainer's logits at each position. -1
    if the token there has no loss, or its row no seed. None for a batch without seeds, and for a critic."""


@dataclass(frozen=True, kw_only=True)
class PassResult(Scored):
    """The results of one forward and backward pass."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The objective's metrics, summed over the whole batch."""
    loss: float = math.nan
    """The loss of the whole batch. NaN if no pass succeeded."""
    grad_norm: float = math.nan
    """The global gradient norm before clipping. NaN if it was not computed."""
    seconds: float = 0.0
    """Seconds from the arrival of the batch on the ranks to the gradient norm."""


@dataclass(frozen=True)
class RankPass:
    """The result of a pass on one rank."""

    rows: list[int]
    """Numbers of the batch's rows that this rank's data-parallel replica has."""
    result: PassResult
    """Tensors have only these rows, in this order. Loss and metrics are for the whole batch, on every rank."""
    loads: Tensor | None = None
    """int64 [layers of this stage, E], how many of the batch's tokens chose each expert. None: it was not counted."""


@dataclass(frozen=True)
class OffloadReport:
    """Bytes that a rank has moved off its device (`moved`), and bytes that it still has there (`stays`)."""

    moved: int
    stays: int


# What can go wrong in a pass, for callers that need no Megatron.


class NonFiniteLossError(FloatingPointError):
    """A loss or a gradient norm was NaN or infinite. The weights were not changed.

    rows: for a loss, all rows of the micro-batches with such a loss. For a norm, all rows of the batch.
    """

    def __init__(self, message: str, rows: Sequence[int]) -> None:
        super().__init__(message, list(rows))  # both, so that the error survives pickling
        self.message, self.rows = message, list(rows)

    def __str__(self) -> str:
        return self.message

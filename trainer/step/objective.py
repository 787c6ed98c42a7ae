"""The interface of a loss to the trainer, which knows no reinforcement learning."""

from __future__ import annotations

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

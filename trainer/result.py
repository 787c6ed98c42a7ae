"""What a training step returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """One training step.

    Attributes:
        logprobs: fp32 [B, S] on the CPU, of the training forward, so of the weights before the update; zero at index 0
            and in the padding.
        metrics: the objective's metrics, summed.
        grad_norm: before clipping.
        lr: the learning rate that the step used.
        seconds: from the batch's arrival on the ranks to the end of the update.
    """

    logprobs: Tensor
    metrics: dict[str, float]
    loss: float
    grad_norm: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class RankStep:
    """A StepResult in which `logprobs` holds only the batch's `rows`, in that order."""

    rows: list[int]
    result: StepResult

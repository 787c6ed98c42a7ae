"""What a pass over a batch returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PassResult:
    """One forward and backward pass, before its gradients are applied or dropped.

    Attributes:
        logprobs: fp32 [B, S] on the CPU, at the weights that the pass ran with; zero at index 0 and in the padding.
        metrics: the objective's metrics, summed.
        loss: over the whole batch, finite.
        grad_norm: before clipping, finite.
        seconds: from the batch's arrival on the ranks to the gradient norm.
    """

    logprobs: Tensor
    metrics: dict[str, float]
    loss: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True)
class RankPassResult:
    """A PassResult in which `logprobs` holds only the batch's `rows`, in that order."""

    rows: list[int]
    result: PassResult

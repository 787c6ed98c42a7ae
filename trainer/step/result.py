"""What a pass over a batch returns."""

from __future__ import annotations

from collections.abc import Sequence
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
        routes: int16 [B, S, L, K] on the CPU, where the trainer's own router would send each token, experts ascending
            and -1 in the padding; given for a batch with routes, whether or not they are replayed.
        draws: int64 [B, S] on the CPU, the token that `numerics.ops.draw` takes from the trainer's logits in place
            of each one; -1 at index 0, in the padding and in rows without a seed. None for a batch without seeds.
    """

    logprobs: Tensor
    metrics: dict[str, float]
    loss: float
    grad_norm: float
    seconds: float
    routes: Tensor | None = None
    draws: Tensor | None = None


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
    """Bytes that a rank has freed on its device for others, and that it keeps there."""

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

"""Gradients of a live trainer under other numerics, and the angle between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from fp8rl.numerics.config import NumericsConfig
from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.step.batch import Objective, TokenBatch
from lab.studies.harness import live

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer


def objective(loss: str, batch: TokenBatch) -> Objective:
    """The loss by its short name, for a batch with advantages or of chains."""
    if loss == "SFT":
        return SftObjective.of(batch)
    return Grpo(ratio="recompute" if loss == "GRPO" else "bypass", tis_cap=None).objective(batch)


def gradients(trainer: Trainer, numerics: NumericsConfig, batch: TokenBatch, objective: Objective) -> dict[str, Tensor]:
    """The whole batch's gradient in other numerics, fp32 by parameter."""
    trainer.set_numerics(numerics)
    trainer.forward_backward(batch, objective)
    return {name: parameter.main_grad.clone() for name, parameter in trainer.model.named_parameters()}


def turned(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """1 - cos of two vectors, each given in parts, without its cancellation: half the squared distance of their unit
    vectors, added up in float64."""
    (a, b) = (math.sqrt(sum(float(part.double().square().sum()) for part in side)) for side in (first, second))
    pairs = zip(first, second, strict=True)
    return sum(float((one.double() / a - other.double() / b).square().sum()) for one, other in pairs) / 2


def with_advantages(sample: live.Sample) -> TokenBatch:
    """A sample's batch with the field from which GRPO learns."""
    return sample.batch.with_fields(**Grpo().training_fields(sample.outcomes, sample.batch))

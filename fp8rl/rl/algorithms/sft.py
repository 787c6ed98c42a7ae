"""Supervised fine-tuning: the mean negative log-likelihood of the target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fp8rl.rl.algorithms.base import AlgorithmConfig
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.step.batch import ObjectiveOutput, TokenBatch


class Sft(AlgorithmConfig):
    """Supervised fine-tuning: learn the answers of the data."""

    name: Literal["sft"]
    samples: ClassVar[bool] = False
    formula: ClassVar[str] = "-logprob of the answers of the data"
    batch_size: int = Field(default=64, ge=1)
    """Question and answer pairs per step."""

    def problems_per_step(self, rollout: RolloutSection) -> int:
        return self.batch_size

    def objective(self, batch: TokenBatch) -> SftObjective:
        return SftObjective.of(batch)


@dataclass(frozen=True)
class SftObjective:
    """loss = -Σ m·logprob / Σ m, summed over the whole batch; m is 1 on target tokens, else 0."""

    tokens: int
    """Σ m, the number of target tokens of the whole batch."""

    @classmethod
    def of(cls, batch: TokenBatch) -> SftObjective:
        """The objective of a step on `batch`."""
        return cls(int(batch.loss_mask.sum()))

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        mask = batch.loss_mask
        loss = -torch.where(mask, logprobs, 0.0).sum() / self.tokens
        mean_entropy = torch.where(mask, entropy, 0.0).sum() / self.tokens
        return ObjectiveOutput(loss, {"train/entropy": mean_entropy.detach()})

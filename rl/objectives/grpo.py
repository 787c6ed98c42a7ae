"""GRPO with asymmetric clipping and a truncated importance weight for the trainer-rollout mismatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from trainer.batch import TokenBatch
from trainer.objective import ObjectiveOutput

if TYPE_CHECKING:
    from rl.spec.sections import GrpoAlgorithm

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ±20 before exp: e^20 is far outside every clip range and still far from overflow."""


@dataclass(frozen=True)
class GrpoObjective:
    """Per token: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) · min(rho, tis_cap).

    r = exp(logprob - old) is the policy ratio (PPO; clip-higher from DAPO), old being `fields["old_logprobs"]` where
    present and else the logprob itself, detached: a single on-policy update has r = 1. rho = exp(old - rollout) is the
    ratio of trainer to engine at the weights that sampled (truncated importance sampling); old has no gradient, so
    neither has it.
    A token whose rollout logprob is not finite leaves the loss, the denominators and the metrics, and is counted.

    Attributes:
        clip_low: lower clip distance.
        clip_high: upper clip distance.
        tis_cap: cap of the importance weight; None leaves the weight out.
        aggregation: `token_mean`, or `seq_mean`: the mean over sequences of each sequence's token mean.
        tokens: used tokens of the whole batch.
        sequences: rows of the whole batch with at least one used token.
    """

    clip_low: float
    clip_high: float
    tis_cap: float | None
    aggregation: Literal["token_mean", "seq_mean"]
    tokens: int
    sequences: int

    @classmethod
    def for_batch(cls, batch: TokenBatch, algorithm: GrpoAlgorithm) -> GrpoObjective:
        """The objective of a step on `batch`, which needs `advantages`, and `rollout_logprobs` for `tis_cap`.

        Raises:
            ValueError: a field is missing, an advantage of a used token is not finite, or no token is usable.
        """
        needed = ["advantages"] + (["rollout_logprobs"] if algorithm.tis_cap is not None else [])
        missing = [name for name in needed if name not in batch.fields]
        if missing:
            raise ValueError(f"fields: found {sorted(batch.fields)}, expected also {missing}; add them to the batch")
        used = used_tokens(batch)
        if not bool(torch.isfinite(batch.fields["advantages"][used]).all()):
            raise ValueError("advantages: found non-finite values on target tokens, expected finite ones")
        tokens = int(used.sum())
        if tokens == 0:
            raise ValueError(
                f"found no usable token among {int(batch.loss_mask.sum())} target tokens, expected at least one; "
                "the rollout logprobs are missing or not finite, so check the engine"
            )
        return cls(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            tis_cap=algorithm.tis_cap,
            aggregation=algorithm.loss_aggregation,
            tokens=tokens,
            sequences=int(used.any(dim=1).sum()),
        )

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        used = used_tokens(batch)
        old = batch.fields.get("old_logprobs", logprobs.detach())
        ratio = _ratio(logprobs, old, used)
        advantages = torch.where(used, batch.fields["advantages"], 0.0)
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        weight = self._tis_weight(old, batch, used)
        loss = self._aggregate(torch.maximum(unclipped, clipped) * weight, used)

        def token_mean(values: Tensor) -> Tensor:
            return torch.where(used, values, 0.0).sum().detach() / self.tokens

        metrics = {
            "train/ratio_mean": token_mean(ratio),
            "train/clip_fraction": token_mean((clipped > unclipped).float()),
            "train/entropy": token_mean(entropy),
            "train/dropped_tokens": (batch.loss_mask & ~used).sum().float(),
        }
        if self.tis_cap is not None:
            metrics["train/tis_weight_mean"] = token_mean(weight)
        return ObjectiveOutput(loss, metrics)

    def _tis_weight(self, old: Tensor, batch: TokenBatch, used: Tensor) -> Tensor:
        if self.tis_cap is None:
            return torch.ones_like(old)
        return _ratio(old, batch.fields["rollout_logprobs"], used).clamp(max=self.tis_cap)

    def _aggregate(self, losses: Tensor, used: Tensor) -> Tensor:
        losses = torch.where(used, losses, 0.0)
        if self.aggregation == "token_mean":
            return losses.sum() / self.tokens
        tokens_of_row = used.sum(dim=1).clamp(min=1)
        return (losses.sum(dim=1) / tokens_of_row).sum() / self.sequences


def used_tokens(batch: TokenBatch) -> Tensor:
    """bool [B, S]: targets of the loss whose rollout logprob, where the batch has one, is finite."""
    rollout = batch.fields.get("rollout_logprobs")
    return batch.loss_mask if rollout is None else batch.loss_mask & torch.isfinite(rollout)


def _ratio(upper: Tensor, lower: Tensor, used: Tensor) -> Tensor:
    """exp(upper - lower), 1 on unused tokens so that neither their values nor their gradients can be NaN."""
    difference = torch.where(used, upper - lower, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

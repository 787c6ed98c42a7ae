"""GRPO with asymmetric clipping and a correction for the trainer-rollout mismatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl.algorithms.advantages import group_advantages
from rl.algorithms.base import AlgorithmConfig, used_tokens
from rl.algorithms.corrections import OWN_WEIGHT, Correction, RejectionConfig
from rollout.config import RolloutConfig
from trainer.batch import TokenBatch
from trainer.objective import ObjectiveOutput

RatioSource = Literal["recompute", "bypass", "on_policy"]
MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ±20 before exp: e^20 is far outside every clip range and still far from overflow."""


class Grpo(AlgorithmConfig):
    """Group-relative policy optimisation (Shao et al. 2024, "DeepSeekMath"), one update per batch."""

    name: Literal["grpo"] = "grpo"
    group_norm_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    dynamic_sampling: bool = False
    """Sample further groups in place of those of equal rewards, which teach nothing (DAPO, Yu et al. 2025)."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.28, gt=0.0)
    ratio: RatioSource | None = None
    """Where the policy ratio's old log-probabilities come from. `recompute`: the trainer's, from before the update; as
    a batch gets one update, the training forward is that pass, and the ratio is 1. `bypass`: the engine's, so that
    the clip acts on what the policy has moved since weights sampled a token, and there is no further weight.
    `on_policy`: the ratio is 1 by definition. On tokens that the trainer's own weights have sampled the three are one,
    in exact mode bit for bit. Null: bypass with `rollout.staleness`, else recompute."""
    tis_cap: float | None = Field(default=2.0, ge=1.0)
    """Cap of the importance weight trainer / rollout. Null leaves the weight out, or that of `icepop` and `mis` as it
    is, which is the default with these two."""
    tis_level: Literal["token", "sequence"] = "token"
    """Whether the weight is a token's own ratio or the product of its sequence's."""
    rejection: RejectionConfig | None = None
    """Tokens or sequences that are not trained on because trainer and engine disagree too much."""
    loss_aggregation: Literal["token_mean", "seq_mean"] = "token_mean"

    @model_validator(mode="before")
    @classmethod
    def _published_weights(cls, values: Any) -> Any:
        """The weights of these rejections go up to their own bound, unless a cap is asked for."""
        rejection = values.get("rejection") if isinstance(values, dict) else None
        name = rejection.get("name") if isinstance(rejection, dict) else getattr(rejection, "name", None)
        return {"tis_cap": None} | values if name in OWN_WEIGHT else values

    @model_validator(mode="after")
    def _bypass_has_nothing_to_reject(self) -> Grpo:
        if self.ratio == "bypass" and self.rejection is not None:
            raise ValueError(
                f"found rejection {self.rejection.name} with ratio=bypass, expected none: with the engine's "
                "log-probabilities as the old ones no token is rejected. Set algorithm.ratio=recompute"
            )
        return self

    @model_validator(mode="after")
    def _icepop_weighs_tokens(self) -> Grpo:
        if self.rejection is not None and self.rejection.name == "icepop" and self.tis_level == "sequence":
            raise ValueError(
                "found tis_level=sequence with rejection icepop, expected token, as icepop weighs each token by its "
                "own ratio. Set algorithm.tis_level=token, or another rejection"
            )
        return self

    def resolved(self, rollout: RolloutConfig) -> Self:
        stale = rollout.staleness > 0 and self.rejection is None
        ratio = self.ratio or ("bypass" if stale else "recompute")
        return self.model_copy(update={"ratio": ratio})

    @property
    def correction(self) -> Correction:
        """Weights and rejections for tokens on which trainer and engine disagree."""
        return Correction.of(self.cap, self.tis_level, self.rejection)

    @property
    def cap(self) -> float | None:
        return None if self.ratio == "bypass" else self.tis_cap

    def tightened(self, cap: float | None) -> Self:
        if cap is None or self.cap is None:
            return self
        return self.model_copy(update={"tis_cap": min(cap, self.cap)})

    def keeps(self, rewards: Tensor) -> bool:
        return not self.dynamic_sampling or bool((rewards != rewards[0]).any())

    def advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return group_advantages(rewards, groups, normalize_std=self.group_norm_std)

    def objective(self, batch: TokenBatch) -> GrpoObjective:
        return GrpoObjective.of(batch, self)


@dataclass(frozen=True)
class GrpoObjective:
    """Per token: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) · w, 0 if rejected.

    r = exp(logprob - old) is the policy ratio (PPO; clip-higher from DAPO), old being the rollout logprob under
    `bypass`, else `fields["old_logprobs"]` where present, else the logprob itself, detached. The weight w and the
    rejection come from old and rollout logprobs, see `rl.algorithms.corrections`, without gradient. The denominators,
    of metrics too, count rejected tokens.
    A token whose rollout logprob is not finite leaves the loss, the denominators and the metrics, and is counted.

    Attributes:
        bypass: the engine's logprobs are the old ones.
        clip_low: lower clip distance.
        clip_high: upper clip distance.
        correction: weights and rejection.
        aggregation: `token_mean`, or `seq_mean`: the mean over sequences of each sequence's token mean.
        tokens: used tokens of the whole batch.
        sequences: rows of the whole batch with at least one used token.
    """

    bypass: bool
    clip_low: float
    clip_high: float
    correction: Correction
    aggregation: Literal["token_mean", "seq_mean"]
    tokens: int
    sequences: int

    @classmethod
    def of(cls, batch: TokenBatch, algorithm: Grpo) -> GrpoObjective:
        """The objective of a step on `batch`, which needs `advantages`, and `rollout_logprobs` unless the
        experiment turns the correction off.

        Raises:
            ValueError: a field is missing, an advantage of a used token is not finite, or no token is usable.
        """
        correction = algorithm.correction
        bypass = algorithm.ratio == "bypass"
        needed = ["advantages"] + (["rollout_logprobs"] if correction.corrects or bypass else [])
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
            bypass=bypass,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            correction=correction,
            aggregation=algorithm.loss_aggregation,
            tokens=tokens,
            sequences=int(used.any(dim=1).sum()),
        )

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        used = used_tokens(batch)
        fields = batch.fields
        old = fields["rollout_logprobs"] if self.bypass else fields.get("old_logprobs", logprobs.detach())
        ratio = _ratio(logprobs, old, used)
        advantages = torch.where(used, batch.fields["advantages"], 0.0)
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        # Without rollout logprobs nothing is corrected: every ratio is 1.
        weight, kept = self.correction(old, batch.fields.get("rollout_logprobs", old), used)
        loss = self._aggregate(torch.where(kept, torch.maximum(unclipped, clipped) * weight, 0.0), used)

        def token_mean(values: Tensor) -> Tensor:
            return torch.where(used, values, 0.0).sum().detach() / self.tokens

        metrics = {
            "train/ratio_mean": token_mean(ratio),
            "train/clip_fraction": token_mean((clipped > unclipped).float()),
            "train/entropy": token_mean(entropy),
            "train/dropped_tokens": (batch.loss_mask & ~used).sum().float(),
        }
        if self.correction.weighs:
            metrics["train/tis_weight_mean"] = token_mean(weight * kept)
        if self.correction.rejection is not None:
            metrics["train/rejected_tokens"] = token_mean((~kept).float())
            metrics["train/rejected_sequences"] = (used.any(dim=1) & ~kept.any(dim=1)).sum() / self.sequences
        return ObjectiveOutput(loss, metrics)

    def _aggregate(self, losses: Tensor, used: Tensor) -> Tensor:
        if self.aggregation == "token_mean":
            return losses.sum() / self.tokens
        tokens_of_row = used.sum(dim=1).clamp(min=1)
        return (losses.sum(dim=1) / tokens_of_row).sum() / self.sequences


def _ratio(upper: Tensor, lower: Tensor, used: Tensor) -> Tensor:
    """exp(upper - lower), 1 on unused tokens so that neither their values nor their gradients can be NaN."""
    difference = torch.where(used, upper - lower, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

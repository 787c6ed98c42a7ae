"""What the algorithms that learn from rewards share: the settings, and the objective that they make.

loss = aggregation over the used tokens of  surrogate(logprob, old, advantage) · w,  0 if rejected,  - entropy bonus

An algorithm is a file beside this one: a subclass with its name, its defaults and its advantages, and its surrogate if
that is another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl.algorithms.advantages import spread, whitened
from rl.algorithms.aggregation import FORMULAS, Aggregation, Mode
from rl.algorithms.base import AlgorithmConfig, Outcomes, used_tokens
from rl.algorithms.corrections import OWN_WEIGHT, Correction, RejectionConfig
from rl.algorithms.overlong import OverlongConfig
from rl.algorithms.surrogates import Surrogate, clipped, token_ratio
from rollout.config import RolloutConfig
from trainer.batch import TokenBatch
from trainer.objective import ObjectiveOutput

RatioSource = Literal["recompute", "bypass", "on_policy"]


OLD = {
    "recompute": "the trainer's before the update",
    "bypass": "the engine's, at the weights that sampled",
    "on_policy": "the trainer's own, so that r = 1",
}


class PolicyGradient(AlgorithmConfig):
    """Settings that every algorithm has which learns from rewards; one update per batch."""

    surrogate_text: ClassVar[str] = "max(-A r, -A clip(r))"
    ratio_text: ClassVar[str] = "e^(logprob - old)"

    dynamic_sampling: bool = False
    """Sample further groups in place of those of equal rewards, which teach nothing (DAPO, Yu et al. 2025)."""
    whiten_advantages: bool = False
    """Give the advantages of all tokens of a batch mean 0 and variance 1."""
    overlong: OverlongConfig | None = None
    """What becomes of answers that come near the length limit, or are cut by it."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.28, gt=0.0)
    clip_dual: float | None = Field(default=None, gt=1.0)
    """Where the advantage is negative, the loss is at most this times its size (dual clip). Null: off, as in the paper;
    verl has 3.0."""
    entropy: float = Field(default=0.0, ge=0.0)
    """What a nat of the policy's entropy takes off the loss of a token, so that the policy stays varied. 0: no bonus,
    and the entropy is a metric alone."""
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
    veto: float | None = Field(default=None, gt=0.0, lt=1.0)
    """A sequence with a token whose ratio trainer / rollout is below this is not trained on; 1e-4 is usual."""
    loss_aggregation: Mode = "token_mean"
    """Which mean the loss is; see `rl.algorithms.aggregation`."""
    loss_length: int | None = Field(default=None, ge=1)
    """The length that `seq_mean_token_sum_norm` divides by. Null: `rollout.max_new_tokens`."""

    @model_validator(mode="before")
    @classmethod
    def _published_weights(cls, values: Any) -> Any:
        """The weights of these rejections go up to their own bound, unless a cap is asked for."""
        rejection = values.get("rejection") if isinstance(values, dict) else None
        name = rejection.get("name") if isinstance(rejection, dict) else getattr(rejection, "name", None)
        return {"tis_cap": None} | values if name in OWN_WEIGHT else values

    @model_validator(mode="after")
    def _bypass_has_nothing_to_reject(self) -> Self:
        if self.ratio == "bypass" and self._rejects:
            named = f"rejection {self.rejection.name}" if self.rejection is not None else f"veto={self.veto:g}"
            raise ValueError(
                f"found {named} with ratio=bypass, expected none: with the engine's log-probabilities as the old ones "
                "no token is rejected. Set algorithm.ratio=recompute"
            )
        return self

    @model_validator(mode="after")
    def _icepop_weighs_tokens(self) -> Self:
        if self.rejection is not None and self.rejection.name == "icepop" and self.tis_level == "sequence":
            raise ValueError(
                "found tis_level=sequence with rejection icepop, expected token, as icepop weighs each token by its "
                "own ratio. Set algorithm.tis_level=token, or another rejection"
            )
        return self

    @model_validator(mode="after")
    def _length_of_the_norm(self) -> Self:
        if self.loss_length is not None and self.loss_aggregation != "seq_mean_token_sum_norm":
            raise ValueError(
                f"found loss_length={self.loss_length} with loss_aggregation={self.loss_aggregation}, expected "
                "seq_mean_token_sum_norm, which alone divides by it. Remove algorithm.loss_length"
            )
        return self

    def resolved(self, rollout: RolloutConfig) -> Self:
        stale = rollout.staleness > 0 and not self._rejects
        found: dict[str, Any] = {"ratio": self.ratio or ("bypass" if stale else "recompute")}
        if self.loss_aggregation == "seq_mean_token_sum_norm":
            found["loss_length"] = self.loss_length or rollout.max_new_tokens
        if self.overlong is not None:
            found["overlong"] = self.overlong.resolved(rollout.max_new_tokens)
        return self.model_copy(update=found)

    @property
    def correction(self) -> Correction:
        """Weights and rejections for tokens on which trainer and engine disagree."""
        return Correction.of(self.cap, self.tis_level, self.rejection, self.veto)

    @property
    def cap(self) -> float | None:
        return None if self.ratio == "bypass" else self.tis_cap

    def tightened(self, cap: float | None) -> Self:
        if cap is None or self.cap is None:
            return self
        return self.model_copy(update={"tis_cap": min(cap, self.cap)})

    def keeps(self, rewards: Tensor) -> bool:
        return not self.dynamic_sampling or bool((rewards != rewards[0]).any())

    def advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        if self.overlong is not None:
            outcomes = self.overlong.shaped(outcomes, batch.loss_mask.sum(dim=1))
        values = spread(self.trajectory_advantages(outcomes.rewards, outcomes.groups), batch.loss_mask)
        if self.whiten_advantages:
            values = whitened(values, used_tokens(batch))
        if self.overlong is not None and self.overlong.filter:
            values = spread(outcomes.finished, batch.loss_mask) * values
        return values

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """The advantage of each trajectory, float32 [N]; arguments as of `Outcomes`."""
        raise NotImplementedError

    @property
    def advantage_text(self) -> str:
        """The formula of a trajectory's advantage; R is its reward, mean and std are those of its prompt's answers."""
        raise NotImplementedError

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, used: Tensor) -> Surrogate:
        """The loss of each token before weight and aggregation; all are [b, S], the rows whole sequences."""
        ratio = token_ratio(logprobs, old, used)
        return clipped(ratio, advantages, self.clip_low, self.clip_high, self.clip_dual)

    def objective(self, batch: TokenBatch) -> PolicyObjective:
        return PolicyObjective.of(batch, self)

    def formula(self) -> str:
        mean = FORMULAS[self.loss_aggregation].format(length=self.loss_length or "rollout.max_new_tokens")
        dual = "" if self.clip_dual is None else f", at most {self.clip_dual:g} |A| where A < 0"
        surrogate = f"{self.surrogate_text}{dual}{' · w' * self.correction.weighs}"
        bonus = f" - {self.entropy:g} H" * (self.entropy > 0)
        lines = {
            "loss": f"{mean}; a token's loss is {surrogate}{bonus}",
            "r": f"{self.ratio_text}, clipped to [{1 - self.clip_low:g}, {1 + self.clip_high:g}]",
            "old": OLD[self.ratio or "recompute"],
            "A": self.advantage_text + ", whitened over the tokens of the batch" * self.whiten_advantages,
        }
        if self.overlong is not None:
            lines["R"] = self.overlong.formula()
        if self.entropy:
            lines["H"] = "entropy of the policy where it chose the token, over the whole vocabulary, in nats"
        return "\n".join(f"{name:<4} = {text}" for name, text in (lines | self.correction.formula()).items())

    def remarks(self) -> list[str]:
        said = []
        if self.loss_aggregation == "token_mean":
            said.append("loss_aggregation: token_mean, as in verl and NeMo-RL; slime and miles: seq_mean_token_mean")
        if self.clip_dual is None and "clip_dual" in type(self).model_fields:
            said.append("clip_dual: off; verl always bounds the loss at 3 |A| where A < 0")
        return said

    @property
    def _rejects(self) -> bool:
        return self.rejection is not None or self.veto is not None


@dataclass(frozen=True)
class PolicyObjective:
    """The loss of a step: surrogate · w per token, 0 if rejected, less the entropy bonus, and their mean.

    old is the rollout logprob under `bypass`, else `fields["old_logprobs"]` where present, else the logprob itself,
    detached. The weight w and the rejection come from old and rollout logprobs, see `rl.algorithms.corrections`,
    without gradient. The denominators, of metrics too, count rejected tokens. A token whose rollout logprob is not
    finite leaves the loss, the denominators and the metrics, and is counted.
    """

    algorithm: PolicyGradient
    correction: Correction
    aggregate: Aggregation

    @classmethod
    def of(cls, batch: TokenBatch, algorithm: PolicyGradient) -> Self:
        """The objective of a step on `batch`, which needs `advantages`, and `rollout_logprobs` unless the
        experiment turns the correction off.

        Raises:
            ValueError: a field is missing, an advantage of a used token is not finite, or no token is usable.
        """
        correction = algorithm.correction
        engines = correction.corrects or algorithm.ratio == "bypass"
        needed = ["advantages"] + (["rollout_logprobs"] if engines else [])
        missing = [name for name in needed if name not in batch.fields]
        if missing:
            raise ValueError(f"fields: found {sorted(batch.fields)}, expected also {missing}; add them to the batch")
        used = used_tokens(batch)
        if not bool(torch.isfinite(batch.fields["advantages"][used]).all()):
            raise ValueError("advantages: found non-finite values on target tokens, expected finite ones")
        if not bool(used.any()):
            raise ValueError(
                f"found no usable token among {int(batch.loss_mask.sum())} target tokens, expected at least one; "
                "the rollout logprobs are missing or not finite, so check the engine"
            )
        return cls(algorithm, correction, Aggregation.of(used, algorithm.loss_aggregation, algorithm.loss_length or 1))

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        used, fields = used_tokens(batch), batch.fields
        bypass = self.algorithm.ratio == "bypass"
        old = fields["rollout_logprobs"] if bypass else fields.get("old_logprobs", logprobs.detach())
        advantages = torch.where(used, fields["advantages"], 0.0)
        term = self.algorithm.surrogate(logprobs, old, advantages, used)
        # Without rollout logprobs nothing is corrected: every ratio is 1.
        weight, kept = self.correction(old, fields.get("rollout_logprobs", old), used)
        losses = torch.where(kept, term.losses * weight, 0.0)
        if self.algorithm.entropy:
            losses = losses - self.algorithm.entropy * torch.where(used, entropy, 0.0)
        loss = self.aggregate(losses, used)

        def token_mean(values: Tensor) -> Tensor:
            return torch.where(used, values, 0.0).sum().detach() / self.aggregate.tokens

        metrics = {
            "train/ratio_mean": token_mean(term.ratio),
            "train/clip_fraction": token_mean((term.below | term.above).float()),
            "train/clip_fraction_low": token_mean(term.below.float()),
            "train/clip_fraction_high": token_mean(term.above.float()),
            "train/entropy": token_mean(entropy),
            "train/dropped_tokens": (batch.loss_mask & ~used).sum().float(),
        }
        if self.correction.weighs:
            metrics["train/tis_weight_mean"] = token_mean(weight * kept)
        if self.correction.rejects:
            metrics["train/rejected_tokens"] = token_mean((~kept).float())
            rejected = used.any(dim=1) & ~kept.any(dim=1)
            metrics["train/rejected_sequences"] = rejected.sum() / self.aggregate.sequences
        return ObjectiveOutput(loss, metrics)

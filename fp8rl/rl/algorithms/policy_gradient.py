"""The settings that all algorithms with rewards share. Their objective is `parts.loss.PolicyObjective`.

An algorithm is a subclass of `PolicyGradient`, in a file of this package: with its name, its defaults, its advantages,
and its surrogate if it is not PPO's.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from fp8rl.rl.algorithms.base import AlgorithmConfig, Needs, Outcomes, UnwrittenMethodError, used_tokens
from fp8rl.rl.algorithms.parts import loss
from fp8rl.rl.algorithms.parts.corrections import OWN_WEIGHT, Correction, RejectionSection
from fp8rl.rl.algorithms.parts.loss import Aggregation, AggregationMode, PolicyObjective, Surrogate
from fp8rl.rl.algorithms.parts.penalties import KlSection, OverlongSection
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.step.batch import Objective, TokenBatch


class PolicyGradient(AlgorithmConfig):
    """Settings of every algorithm that learns from rewards."""

    token_rewards: ClassVar[bool] = False
    """True if tokens have their own rewards, from which a penalty can be subtracted."""

    least_group: ClassVar[int] = 1
    """The smallest group in which an answer can have an advantage."""

    dynamic_sampling: bool = False
    """Replace groups of equal rewards, which teach nothing, by newly sampled groups (DAPO, Yu et al. 2025)."""
    whiten_advantages: bool = False
    """Give the advantages of all tokens of a batch mean 0 and variance 1."""
    overlong: OverlongSection | None = None
    """The treatment of answers that come near the length limit, or are truncated by it."""
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0)
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.28, gt=0.0)
    """The upper bound of the clip; see `clip_low`."""
    clip_dual: float | None = Field(default=None, gt=1.0)
    """If the advantage A is negative, the loss is at most clip_dual · |A| (dual clip). Null: off, as in PPO's paper;
    verl has 3.0."""
    entropy: float = Field(default=0.0, ge=0.0)
    """Entropy bonus: entropy · H is subtracted from a token's loss, so that the policy stays varied. H is the policy's
    entropy in nats, over the tokens that top-p, top-k and min-p keep. 0: H is only a metric."""
    kl: KlSection = KlSection()
    """Penalties that keep the policy near the model that the run started from: in the loss, or in the reward."""
    updates_per_batch: int = Field(default=1, ge=1)
    """Number of mini-batches of a batch. Each gets an optimizer step, and consists of whole groups in the batch's
    order. From the second mini-batch on, the policy differs from the one that scored the batch, so the clip acts."""
    epochs: int = Field(default=1, ge=1)
    """Number of passes over all mini-batches of a batch."""
    ratio: Literal["recompute", "bypass"] | None = None
    """Where the old log-probabilities of the policy ratio come from. `recompute`: from the trainer, before the first
    update of the batch. With one update they are the training pass's own, and the ratio is 1. `bypass`: from the
    engine, so that the clip acts on the change of the policy since a token was sampled; no importance weight is used.
    Null: `bypass` with `rollout.staleness`, unless `rejection`, `veto` or `centering` is set; else `recompute`."""
    centering: int | None = Field(default=None, ge=1, le=256)
    """Centre each token's score over this number of the engine's likeliest tokens (arXiv 2609.20807), so that a bias
    between the two sides does not add up. Null: off. In exact mode tokens of the trainer's weights need no centring."""
    tis_cap: float | None = Field(default=2.0, ge=1.0)
    """Cap of the importance weight trainer / rollout. Null: no importance weight. The rejections `icepop` and `mis`
    have their own weight. With them null is the default, and means that this weight has no cap."""
    tis_level: Literal["token", "sequence"] = "token"
    """The importance weight is a token's own ratio, or the product of the ratios of its sequence's tokens."""
    rejection: RejectionSection | None = None
    """Tokens or sequences that are not trained on because trainer and engine disagree too much."""
    veto: float | None = Field(default=None, gt=0.0, lt=1.0)
    """If a token's ratio trainer / rollout is below this number, its sequence is not trained on; 1e-4 is usual."""
    loss_aggregation: AggregationMode = "token_mean"
    """How token losses become one number. `token_mean`: the mean over all tokens of a batch. Otherwise each answer gets
    a number, and the loss is the mean over answers: `seq_mean_token_mean`, the mean over the answer's tokens;
    `seq_mean_token_sum`, their sum; `seq_mean_token_sum_norm`, their sum / `loss_length`."""
    loss_length: int | None = Field(default=None, ge=1)
    """The length that `seq_mean_token_sum_norm` divides by. Null: `rollout.max_new_tokens`."""
    _group_size: int = PrivateAttr(default=1)
    """`rollout.group_size`. A group has fewer answers if an environment failed."""

    @model_validator(mode="before")
    @classmethod
    def _published_weights(cls, values: Any) -> Any:
        """Set `tis_cap` to null for `icepop` and `mis`, unless the spec sets it: their bounds limit their weights. In
        old specs the ratio `on_policy` means `recompute` with one update."""
        if isinstance(values, dict) and values.get("ratio") == "on_policy":
            values = values | {"ratio": "recompute"}
        rejection = values.get("rejection") if isinstance(values, dict) else None
        name = rejection.get("name") if isinstance(rejection, dict) else getattr(rejection, "name", None)
        return {"tis_cap": None} | values if name in OWN_WEIGHT else values

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        rejection = self.rejection
        if self.ratio == "bypass" and (rejection is not None or self.veto is not None):
            found = f"rejection {rejection.name}" if rejection else f"veto={self.veto:g}"
            raise ValueError(
                f"found {found} with ratio=bypass, expected none: the old log-probabilities are then the engine's, and "
                "no ratio rejects a token. Set algorithm.ratio=recompute"
            )
        if rejection is not None and rejection.name == "icepop" and self.tis_level == "sequence":
            raise ValueError(
                "found tis_level=sequence with rejection icepop, expected token, as icepop weighs each token by its "
                "own ratio. Set algorithm.tis_level=token, or another rejection"
            )
        if self.loss_length is not None and self.loss_aggregation != "seq_mean_token_sum_norm":
            raise ValueError(
                f"found loss_length={self.loss_length} with loss_aggregation={self.loss_aggregation}, expected "
                "seq_mean_token_sum_norm, the only mode that divides by it. Remove algorithm.loss_length"
            )
        if self.centering is not None:
            sequence = self.tis_level == "sequence" or (rejection is not None and rejection.name == "mis")
            wrong = {
                f"updates_per_batch={self.updates_per_batch} and epochs={self.epochs}": self.updates > 1,
                "ratio=bypass": self.ratio == "bypass",
                "weights of whole sequences (tis_level=sequence, rejection mis)": sequence,
            }
            if found := next((each for each, holds in wrong.items() if holds), ""):
                raise ValueError(
                    f"found centering={self.centering} with {found}, expected one update of a batch, ratio=recompute "
                    "and weights per token: the expected score is computed before the first update. Change that "
                    "setting, or remove algorithm.centering"
                )
        if self.kl.reward.coefficient and not self.token_rewards:
            raise ValueError(
                f"found kl.reward.coefficient={self.kl.reward.coefficient:g} with {self.name}, expected 0: {self.name} "
                "compares whole answers, and has no rewards of tokens to subtract the penalty from. Set "
                "algorithm.kl.loss.coefficient, or choose ppo, reinforce++ or reinforce++-baseline"
            )
        return self

    @property
    def loss_summary(self) -> str:
        overlong, kl, dual = self.overlong, self.kl, self.clip_dual
        parts = {
            f"clip to [{1 - self.clip_low:g}, {1 + self.clip_high:g}]": "clip(" in self.formula,
            f"at most {dual or 0:g} |A| where A < 0": dual is not None,
            "A whitened over the batch": self.whiten_advantages,
            "R less a length penalty": overlong is not None and overlong.penalty > 0,
            "truncated answers left out": overlong is not None and overlong.filter,
            f"R less {kl.reward.coefficient:g} KL to the reference": kl.reward.coefficient > 0,
            f"plus {kl.loss.coefficient:g} {kl.loss.estimator} of the KL to the reference": kl.loss.coefficient > 0,
            **dict.fromkeys(self.correction.summary, True),
            f"scores centred over {self.centering} tokens": self.centering is not None,
            f"less {self.entropy:g} entropy": self.entropy > 0,
            self.loss_aggregation: True,
        }
        return "; ".join([super().loss_summary, *(said for said, holds in parts.items() if holds)])

    def resolved(self, rollout: RolloutSection) -> Self:
        stale = rollout.staleness > 0 and not self.correction.rejects and self.centering is None
        found: dict[str, Any] = {"ratio": self.ratio or ("bypass" if stale else "recompute")}
        if self.loss_aggregation == "seq_mean_token_sum_norm":
            found["loss_length"] = self.loss_length or rollout.max_new_tokens
        if self.overlong is not None:
            found["overlong"] = self.overlong.resolved(rollout.max_new_tokens)
        resolved = self.model_copy(update=found)
        resolved._group_size = rollout.group_size
        return resolved

    @property
    def correction(self) -> Correction:
        """Importance weights and rejections for tokens on which trainer and engine disagree."""
        tis_cap, rejection = None if self.ratio == "bypass" else self.tis_cap, self.rejection
        if rejection is None:
            return Correction(tis_cap, self.tis_level, veto=self.veto)
        low, high = rejection.low or 0.0, rejection.high or math.inf
        return Correction(tis_cap, self.tis_level, rejection.name, low, high, self.veto)

    def keeps_group(self, rewards: Tensor) -> bool:
        return not self.dynamic_sampling or bool((rewards != rewards[0]).any())

    @property
    def likeliest(self) -> int:
        return self.centering or 0

    @property
    def updates(self) -> int:
        return self.updates_per_batch * self.epochs

    def mini_batches(self, groups: Tensor) -> list[list[int]]:
        different = list(dict.fromkeys(groups.tolist()))
        bounds = [len(different) * part // self.updates_per_batch for part in range(self.updates_per_batch + 1)]
        parts = [set(different[first:end]) for first, end in pairwise(bounds) if first < end]
        return [[row for row, group in enumerate(groups.tolist()) if group in part] for part in parts] * self.epochs

    @property
    def needs(self) -> Needs:
        in_loss, in_reward = self.kl.loss.coefficient > 0, self.kl.reward.coefficient > 0
        old = self.updates > 1 or (in_reward and self.ratio != "bypass")
        return Needs(old_logprobs=old, reference=in_loss or in_reward)

    def advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        outcomes = self.shaped(outcomes, batch)
        return self.finished(self.measured_advantages(outcomes, batch), outcomes, batch)

    def training_fields(self, outcomes: Outcomes, batch: TokenBatch) -> dict[str, Tensor]:
        return super().training_fields(outcomes, batch) | self.filtered(outcomes, batch)

    def filtered(self, outcomes: Outcomes, batch: TokenBatch) -> dict[str, Tensor]:
        """The batch field that takes truncated answers out of the loss, if `overlong.filter` is on."""
        if self.overlong is None or not self.overlong.filter:
            return {}
        return {loss.LEARNT_FROM: per_token(outcomes.finished, batch.loss_mask)}

    def shaped(self, outcomes: Outcomes, batch: TokenBatch) -> Outcomes:
        """Return the outcomes with the length penalty, if there is one, subtracted from their rewards."""
        if self.overlong is None:
            return outcomes
        # From the first sampled token to the end of the row. An environment's tokens in between count, too.
        lengths = batch.lengths - batch.loss_mask.int().argmax(dim=1)
        return self.overlong.shaped(outcomes, torch.where(batch.loss_mask.any(dim=1), lengths, 0))

    def finished(self, advantages: Tensor, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        """The advantages that the loss uses: whitened if the spec says so, and 0 in filtered answers."""
        if self.whiten_advantages:
            advantages = whitened(advantages, used_tokens(batch))
        if self.overlong is not None and self.overlong.filter:
            advantages = per_token(outcomes.finished, batch.loss_mask) * advantages
        return advantages

    def measured_advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        """Return the advantages of `token_advantages`; the metrics that it may return go to `outcomes.metrics`."""
        found: Any = self.token_advantages(outcomes, batch)
        advantages, metrics = found if isinstance(found, tuple) else (found, {})
        outcomes.metrics.update((name, float(value)) for name, value in metrics.items())
        return cast(Tensor, advantages)

    def token_advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Tensor:
        """The advantage of each token, float32 [B, S]: here its trajectory's. A subclass may return a pair (advantages,
        metrics by name); the metrics enter the step's row."""
        return per_token(self.trajectory_advantages(outcomes.rewards, outcomes.groups), batch.loss_mask)

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """The advantage of each trajectory, float32 [N]. rewards, groups: as in `Outcomes`."""
        raise UnwrittenMethodError(self, "trajectory_advantages")

    def kl_penalty(self, batch: TokenBatch) -> Tensor:
        """The KL penalty (`kl.reward`) of each token: coefficient · (logprob - reference logprob). float64 [B, S], 0 on
        unused tokens. logprob: by the weights that scored the batch; under `bypass`, by those that sampled it."""
        old = batch.fields["rollout_logprobs" if self.ratio == "bypass" else "old_logprobs"]
        x = old.double() - batch.fields["reference_logprobs"].double()
        return torch.where(used_tokens(batch), self.kl.reward.coefficient * x, 0.0)

    def surrogate(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, used: Tensor, batch: TokenBatch
    ) -> Surrogate:
        """The loss of each token before weight and aggregation. All tensors are [b, S]; rows are whole sequences.
        batch: the same rows, with all fields."""
        ratio = loss.token_ratio(logprobs, old, used)
        return loss.clipped(ratio, advantages, self.clip_low, self.clip_high, self.clip_dual)

    def objective(self, batch: TokenBatch) -> Objective:
        aggregate = Aggregation.of(used_tokens(batch), self.loss_aggregation, self.loss_length or 1)
        centers, bypass = self.centering is not None, self.ratio == "bypass"
        return PolicyObjective(self.surrogate, centers, self.correction, aggregate, self.kl, self.entropy, bypass)

    def notes(self) -> list[str]:
        said = []
        if self.loss_aggregation == "token_mean":
            said.append("loss_aggregation: token_mean, as in verl and NeMo-RL; slime and miles: seq_mean_token_mean")
        if self.clip_dual is None and "clip_dual" in type(self).model_fields:
            said.append("clip_dual: off; verl always bounds the loss at 3 |A| where A < 0")
        if self.kl.loss.coefficient and self.kl.loss.estimator == "k3":
            said.append("kl.loss.estimator: k3, as in verl and NeMo-RL, lacks the gradient of the KL; k2 has it")
        return said


VARIANCE_FLOOR = 1e-8
"""Keeps equal advantages at 0 when they are whitened."""


def per_token(values: Tensor, batch_mask: Tensor) -> Tensor:
    """Give each row's value [B] to its target tokens, which `batch_mask` [B, S] marks. float32 [B, S], 0 elsewhere."""
    return torch.where(batch_mask, values.float()[:, None], 0.0)


def whitened(advantages: Tensor, used: Tensor) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8) over all used tokens of the batch, as in REINFORCE++ (Hu et al. 2025). float32
    [B, S], 0 on tokens that are not used; computed in float64."""
    values = advantages[used].double()
    variance, mean = torch.var_mean(values, correction=0)
    white = torch.zeros(advantages.shape, dtype=torch.float32)
    white[used] = ((values - mean) / (variance + VARIANCE_FLOOR).sqrt()).float()
    return white

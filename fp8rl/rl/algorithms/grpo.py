"""GRPO and its relatives: an answer's reward is compared with the rewards of the other answers to its prompt."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from fp8rl.rl.algorithms.parts.advantages import group_advantages, leave_one_out, relative_to_mean
from fp8rl.rl.algorithms.parts.penalties import OverlongSection
from fp8rl.rl.algorithms.parts.surrogates import (
    AggregationMode,
    Surrogate,
    clipped,
    clipped_weight,
    sequence_ratio,
    token_ratio,
)
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.trainer.step.batch import TokenBatch


class GroupRelative(PolicyGradient):
    """The base of algorithms that compare an answer's reward with the other rewards of its prompt."""

    compares_in_group: ClassVar[bool] = True
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R - mean of the group, over its std with group_norm_std"

    group_norm_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return group_advantages(rewards, groups, normalize_std=self.group_norm_std, group_size=self._group_size)


class Grpo(GroupRelative):
    """Group-relative policy optimisation (Shao et al. 2024, "DeepSeekMath")."""

    name: Literal["grpo"] = "grpo"


class DrGrpo(GroupRelative):
    """GRPO done right (Liu et al. 2025, "Understanding R1-Zero-Like Training"). Advantages are not divided by a
    standard deviation, and losses are divided by a constant instead of the answer's length."""

    name: Literal["drgrpo"]
    group_norm_std: bool = False
    loss_aggregation: AggregationMode = "seq_mean_token_sum_norm"


class Dapo(GroupRelative):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, "DAPO"). Groups are filtered by rewards without the length
    penalty, because with the penalty the rewards of nearly every group differ."""

    name: Literal["dapo"]
    dynamic_sampling: bool = True
    overlong: OverlongSection | None = OverlongSection()


WIDE_CLIP = 0.01
"""In GSPO a clip of this width never acts: a sequence's ratio is a geometric mean, and stays within about 1e-3 of 1."""


class Gspo(GroupRelative):
    """Group sequence policy optimisation (Zheng et al. 2025). Its clip is several hundred times narrower than PPO's."""

    name: Literal["gspo"]
    clip_low: float = Field(default=3e-4, gt=0.0, lt=1.0)
    clip_high: float = Field(default=4e-4, gt=0.0)
    loss_aggregation: AggregationMode = "seq_mean_token_mean"
    formula: ClassVar[str] = "max(-A s, -A clip(s)), s the geometric mean of r over the answer; A as in grpo"

    def surrogate(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, used: Tensor, batch: TokenBatch
    ) -> Surrogate:
        ratio = sequence_ratio(logprobs, old, used)
        return clipped(ratio, advantages, self.clip_low, self.clip_high, self.clip_dual)

    def notes(self) -> list[str]:
        wide = {key: getattr(self, key) for key in ("clip_low", "clip_high") if getattr(self, key) >= WIDE_CLIP}
        return super().notes() + [
            f"algorithm.{key}: found {value:g}, expected about {type(self).model_fields[key].default:g} with gspo: a "
            "sequence's ratio is a geometric mean near 1, and a clip this wide never acts on it"
            for key, value in wide.items()
        ]


class Cispo(GroupRelative):
    """Clipped importance-sampling policy optimisation (MiniMax 2025, "MiniMax-M1")."""

    name: Literal["cispo"]
    clip_low: float = Field(default=1.0, gt=0.0, le=1.0)
    """The weight is at least 1 - clip_low. 1: no lower bound, as in the paper."""
    clip_high: float = Field(default=4.0, gt=0.0)
    """The weight is at most 1 + clip_high: 5 by default, as in ScaleRL (Khatri et al. 2025)."""
    clip_dual: None = None
    """Not for CISPO, which has no clipped loss that a dual clip could bound."""
    formula: ClassVar[str] = "-A sg(clip(r)) logprob; A = R - mean of the group, over its std with group_norm_std"

    def surrogate(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, used: Tensor, batch: TokenBatch
    ) -> Surrogate:
        ratio = token_ratio(logprobs, old, used)
        return clipped_weight(logprobs, ratio, advantages, used, self.clip_low, self.clip_high)


class MaxRl(PolicyGradient):
    """Maximum-likelihood reinforcement learning (Tajwar et al. 2026), for rewards of at least 0."""

    name: Literal["maxrl"]
    least_group: ClassVar[int] = 2
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = (R - mean of the group) / mean, 0 where the mean is 0"

    @model_validator(mode="after")
    def _no_penalty_makes_rewards_negative(self) -> Self:
        if self.overlong is not None and self.overlong.penalty:
            raise ValueError(
                f"found overlong.penalty={self.overlong.penalty:g} with maxrl, expected 0: maxrl divides by the mean "
                "reward of a group, and a length penalty could make rewards negative. Set overlong.penalty=0 "
                "(overlong.filter=true leaves truncated answers out of the loss), or choose dapo"
            )
        return self

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return relative_to_mean(rewards, groups)


class Rloo(PolicyGradient):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics")."""

    name: Literal["rloo"]
    least_group: ClassVar[int] = 2
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R - mean of the group's other answers"

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return leave_one_out(rewards, groups)

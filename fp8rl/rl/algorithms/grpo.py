"""GRPO and its relatives: an answer's reward is compared with the rewards of the other answers to its prompt."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl.rl.algorithms.parts import loss
from fp8rl.rl.algorithms.parts.loss import AggregationMode, Surrogate
from fp8rl.rl.algorithms.parts.penalties import OverlongSection
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
        ratio = loss.sequence_ratio(logprobs, old, used)
        return loss.clipped(ratio, advantages, self.clip_low, self.clip_high, self.clip_dual)

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
        ratio = loss.token_ratio(logprobs, old, used)
        return loss.clipped_weight(logprobs, ratio, advantages, used, self.clip_low, self.clip_high)


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
        """Return (R - mean) / mean, 0 in a group of mean 0. The fewer answers of a prompt are right, the more each of
        them counts. Raises UserError: a reward is negative."""
        rewards, _, _, means = _grouped(rewards, groups)
        if bool((rewards < 0).any()):
            expected = "none below 0, as maxrl divides by the mean reward of a group"
            remedy = "Correct the reward functions or their weights, or choose another algorithm."
            raise user_error("rewards", float(rewards.min()), expected, remedy)
        return torch.where(means > 0, (rewards - means) / means, 0.0).float()


class Rloo(PolicyGradient):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, "Back to Basics")."""

    name: Literal["rloo"]
    least_group: ClassVar[int] = 2
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R - mean of the group's other answers"

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return the reward less the mean of the *other* trajectories of the prompt; 0 in a group of one."""
        rewards, _, counts, means = _grouped(rewards, groups)
        return ((rewards - means) * counts / (counts - 1).clamp(min=1)).float()


# Advantages within groups, which may differ in size. rewards, groups: as in `Outcomes`.

STD_EPSILON = 1e-6
"""Keeps a group of equal rewards at advantage 0 instead of 0/0."""


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool, group_size: int = 1) -> Tensor:
    """Return the advantage of each trajectory within the group of its prompt.

    With `normalize_std` it is (R - mean) / (std + 1e-6) with the sample standard deviation (ddof 1), as in GRPO
    (DeepSeekMath); without, it is R - mean, as in Dr. GRPO. A group of one has the mean 0 and the std 1 if `group_size`
    is 1. If `group_size`, the number of answers sampled for a prompt, is larger, its other answers have failed, and its
    advantage is 0. float32 [N], computed in float64.
    """
    rewards, member, counts, means = _grouped(rewards, groups)
    alone = counts == 1
    centred = torch.where(alone, rewards, rewards - means) if group_size == 1 else rewards - means
    if not normalize_std:
        return centred.float()
    variance = _sums(centred.square(), member) / (counts - 1).clamp(min=1)
    std = torch.where(alone, 1.0, variance.sqrt())
    return (centred / (std + STD_EPSILON)).float()


def _grouped(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reward of each trajectory in float64, and the index, size and mean reward of its group; all [N]."""
    rewards = rewards.double()
    _, member = torch.unique(groups, return_inverse=True)
    counts = _sums(torch.ones_like(rewards), member)
    return rewards, member, counts, _sums(rewards, member) / counts


def _sums(values: Tensor, member: Tensor) -> Tensor:
    """Return for each trajectory the sum of `values` [N] over its group."""
    return torch.zeros_like(values).index_add(0, member, values)[member]

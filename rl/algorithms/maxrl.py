"""MaxRL: the rarer a right answer is, the more it counts."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import model_validator
from torch import Tensor

from fp8rl.rl.algorithms.parts.advantages import relative_to_mean
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient


class MaxRl(PolicyGradient):
    """Maximum-likelihood reinforcement learning (Tajwar et al. 2026), for rewards of at least 0."""

    name: Literal["maxrl"]
    least_group: ClassVar[int] = 2
    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = (R - mean of the group) / mean, 0 where the mean is 0"

    @model_validator(mode="after")
    def _no_price_makes_rewards_negative(self) -> Self:
        if self.overlong is not None and self.overlong.penalty:
            raise ValueError(
                f"found overlong.penalty={self.overlong.penalty:g} with maxrl, expected 0: it divides by the mean "
                "reward of a group, and a length penalty could make rewards negative. Set overlong.penalty=0 "
                "(overlong.filter=true leaves truncated answers out of the loss), or choose dapo"
            )
        return self

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return relative_to_mean(rewards, groups)

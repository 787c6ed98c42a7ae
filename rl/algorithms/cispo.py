"""CISPO: the weight of a token is clipped, never its gradient."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fp8rl.rl.algorithms.grpo import GroupRelative
from fp8rl.rl.algorithms.parts.surrogates import Surrogate, clipped_weight, token_ratio


class Cispo(GroupRelative):
    """Clipped importance-sampling policy optimisation (MiniMax 2025, "MiniMax-M1")."""

    name: Literal["cispo"]
    clip_low: float = Field(default=1.0, gt=0.0, le=1.0)
    """1 leaves the weight without a lower bound, as in the paper."""
    clip_high: float = Field(default=4.0, gt=0.0)
    """Weights up to 5, as in ScaleRL (Khatri et al. 2025)."""
    clip_dual: None = None
    """There is no clipped loss that it could bound."""
    formula: ClassVar[str] = "-A sg(clip(r)) logprob; A = R - mean of the group, over its std with group_norm_std"

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, used: Tensor) -> Surrogate:
        ratio = token_ratio(logprobs, old, used)
        return clipped_weight(logprobs, ratio, advantages, used, self.clip_low, self.clip_high)

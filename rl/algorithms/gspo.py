"""GSPO: the ratio of a whole sequence, clipped for all its tokens at once."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fp8rl.rl.algorithms.grpo import GroupRelative
from fp8rl.rl.algorithms.parts.surrogates import Mode, Surrogate, clipped, sequence_ratio

WIDE_CLIP = 0.01
"""A sequence's ratio, a geometric mean, stays within some 1e-3 of 1: such a clip would never act."""


class Gspo(GroupRelative):
    """Group sequence policy optimisation (Zheng et al. 2025). Its clip is some hundred times narrower than PPO's."""

    name: Literal["gspo"]
    clip_low: float = Field(default=3e-4, gt=0.0, lt=1.0)
    clip_high: float = Field(default=4e-4, gt=0.0)
    loss_aggregation: Mode = "seq_mean_token_mean"
    formula: ClassVar[str] = "max(-A s, -A clip(s)), s the geometric mean of r over the answer; A as in grpo"

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, used: Tensor) -> Surrogate:
        ratio = sequence_ratio(logprobs, old, used)
        return clipped(ratio, advantages, self.clip_low, self.clip_high, self.clip_dual)

    def remarks(self) -> list[str]:
        wide = {key: getattr(self, key) for key in ("clip_low", "clip_high") if getattr(self, key) >= WIDE_CLIP}
        return super().remarks() + [
            f"algorithm.{key}: found {value:g}, expected about {type(self).model_fields[key].default:g} with gspo: the "
            "ratio of a sequence is a geometric mean, which so wide a clip never touches"
            for key, value in wide.items()
        ]

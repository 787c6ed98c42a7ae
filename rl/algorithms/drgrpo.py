"""Dr. GRPO: GRPO without its two biases, towards short right answers and towards problems of small spread."""

from __future__ import annotations

from typing import Literal

from fp8rl.rl.algorithms.grpo import GroupRelative
from fp8rl.rl.algorithms.parts.surrogates import Mode


class DrGrpo(GroupRelative):
    """GRPO done right (Liu et al. 2025, "Understanding R1-Zero-Like Training"): no standard deviation, and a constant
    in place of an answer's length. Both halves belong to it."""

    name: Literal["drgrpo"]
    group_norm_std: bool = False
    loss_aggregation: Mode = "seq_mean_token_sum_norm"

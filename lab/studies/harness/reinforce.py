"""REINFORCE without a learnt baseline: what an answer's reward is, is its advantage."""

from typing import ClassVar

from torch import Tensor

from fp8rl import PolicyGradient


class Reinforce(PolicyGradient):
    """Advantages do not average to zero: with rewards of 0 and 1 they are above zero, less 1 below it."""

    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R - baseline"
    baseline: float = 0.0
    """What is subtracted from every reward."""

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return rewards - self.baseline

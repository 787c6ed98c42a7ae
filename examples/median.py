"""An algorithm of one's own: an answer is measured by the median of its prompt's answers."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fp8rl import PolicyGradient


class Median(PolicyGradient):
    """Half of a prompt's answers are reinforced, whatever the outliers among its rewards."""

    formula: ClassVar[str] = "max(-A r, -A clip(r)); A = R - median of the group"
    quantile: float = Field(default=0.5, ge=0.0, le=1.0)
    """Which of the sorted rewards an answer is measured by; 0.5 is the median."""

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        advantages = torch.empty(len(rewards))
        for group in groups.unique():
            members = groups == group
            advantages[members] = rewards[members] - rewards[members].quantile(self.quantile)
        return advantages

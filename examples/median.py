"""An algorithm of one's own: an answer is measured by the median of its prompt's answers."""

from typing import Literal

import torch
from torch import Tensor

from rl.algorithms.policy_gradient import PolicyGradient


class Median(PolicyGradient):
    """Half of a prompt's answers are reinforced, whatever the outliers among its rewards."""

    name: Literal["median"]

    def trajectory_advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:
        advantages = torch.empty(len(rewards))
        for group in groups.unique():
            members = groups == group
            advantages[members] = rewards[members] - rewards[members].quantile(0.5)
        return advantages

    @property
    def advantage_text(self) -> str:
        return "R - median"

"""DAPO: clip-higher, a mean over tokens, dynamic sampling and a price on overlong answers."""

from __future__ import annotations

from typing import Literal

from fp8rl.rl.algorithms.grpo import GroupRelative
from fp8rl.rl.algorithms.parts.surrogates import OverlongSection


class Dapo(GroupRelative):
    """Decoupled clip and dynamic sampling (Yu et al. 2025, "DAPO"). Groups are filtered by their
    rewards before the length penalty, which would make the rewards of every group differ."""

    name: Literal["dapo"]
    dynamic_sampling: bool = True
    overlong: OverlongSection | None = OverlongSection()

"""Losses that the trainer runs: supervised fine-tuning and GRPO."""

from rl.objectives.grpo import GrpoObjective
from rl.objectives.sft import SftObjective

__all__ = ["GrpoObjective", "SftObjective"]

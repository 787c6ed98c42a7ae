"""Sampling from the engines, at the trainer's current weights."""

from __future__ import annotations

from rl.recovery import recovering
from rl.stack import Stack
from rollout.types import Prompt, SamplingParams, Trajectory


def sample(stack: Stack, prompts: list[Prompt], group_size: int, sampling: SamplingParams) -> list[Trajectory]:
    """`group_size` answers to each prompt; engines that die on the way are replaced.

    Raises `StaleWeightsError` for tokens of other weights than the trainer's.
    """
    pool = stack.pool
    assert pool is not None
    return recovering(stack, lambda: pool.sample(prompts, group_size, sampling, stack.trainer.weight_version))

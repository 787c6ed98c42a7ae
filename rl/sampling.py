"""Sampling from the engines, at the trainer's current weights."""

from __future__ import annotations

from rl.recovery import recovering, resyncing
from rl.stack import Stack
from rollout.types import Prompt, SamplingParams, Trajectory


def sample(stack: Stack, prompts: list[Prompt], group_size: int, sampling: SamplingParams) -> list[Trajectory]:
    """`group_size` answers to each prompt. Engines that die on the way are replaced, stale ones synced.

    Raises `StaleWeightsError` for tokens of other weights than the trainer's, if a sync did not help.
    """
    pool = stack.pool
    assert pool is not None

    def answers() -> list[Trajectory]:
        return pool.sample(prompts, group_size, sampling, stack.trainer.weight_version)

    return resyncing(stack, lambda: recovering(stack, answers))

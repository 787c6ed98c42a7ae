"""Sampling a step's groups, and going on when an engine dies."""

from __future__ import annotations

from rl.stack import Stack
from rollout.errors import EngineDiedError
from rollout.types import Prompt, Trajectory


def sample(stack: Stack, prompts: list[Prompt]) -> list[Trajectory]:
    """`rollout.group_size` answers to each prompt, every token from the trainer's current weights.

    An engine that died is replaced once, from a checkpoint of those weights and with a verified sync, and the step is
    sampled anew. Raises `EngineDiedError` if that one dies too, `StaleWeightsError` for tokens of other weights.
    """
    assert stack.pool is not None and stack.bridge is not None
    rollout, version = stack.spec.rollout, stack.trainer.weight_version
    sampling = stack.sampling(rollout.temperature)
    try:
        return stack.pool.sample(prompts, rollout.group_size, sampling, version)
    except EngineDiedError as died:
        stack.console.note(f"an engine died and is being replaced: {str(died).splitlines()[0]}", style="bold yellow")
        stack.pool.recover(stack.bridge.write_checkpoint(), version)
        stack.bridge.sync(stack.pool.endpoints())
        return stack.pool.sample(prompts, rollout.group_size, sampling, version)

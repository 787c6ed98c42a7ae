"""Groups of answers for prompts, each token checked to come from the expected weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from rollout.client import EngineClient
from rollout.errors import StaleWeightsError
from rollout.types import Completion, Prompt, SamplingParams, Trajectory


async def sample_groups(
    client: EngineClient,
    prompts: list[Prompt],
    group_size: int,
    sampling: SamplingParams,
    expected_version: int,
) -> list[Trajectory]:
    """`group_size` answers to each prompt, in the order of the prompts; `group` is the index of the prompt.

    Raises StaleWeightsError if any token was sampled at another weight version than `expected_version`.
    """
    completions = await client.complete(_rows(prompts, group_size), sampling)
    check_versions(completions, expected_version)
    return [
        _trajectory(prompts[row // group_size], completion, row // group_size)
        for row, completion in enumerate(completions)
    ]


async def sample_groups_as_completed(
    client: EngineClient,
    prompts: list[Prompt],
    group_size: int,
    sampling: SamplingParams,
    expected_version: int,
) -> AsyncGenerator[list[Trajectory], None]:
    """The groups of `sample_groups`, each as soon as its last answer ends. Closing it ends the rest early."""
    groups: dict[int, dict[int, Trajectory]] = {}
    async with aclosing(client.complete_each(_rows(prompts, group_size), sampling)) as stream:
        async for row, completion in stream:
            check_versions([completion], expected_version)
            index = row // group_size
            group = groups.setdefault(index, {})
            group[row] = _trajectory(prompts[index], completion, index)
            if len(group) == group_size:
                yield [group[row] for row in sorted(group)]


def check_versions(completions: Iterable[Completion], expected: int) -> None:
    """Raise StaleWeightsError, with counts, if a token was sampled at another weight version than `expected`."""
    found = Counter(version for completion in completions for version in completion.weight_versions)
    stale = found.total() - found[expected]
    if stale:
        counts = ", ".join(f"{count} at version {version}" for version, count in sorted(found.items()))
        raise StaleWeightsError(
            f"{stale} of {found.total()} tokens were sampled at other weights than expected: found {counts}, "
            f"expected all at version {expected}. Sync the weights before sampling."
        )


def _rows(prompts: list[Prompt], group_size: int) -> list[list[int]]:
    return [prompt.token_ids for prompt in prompts for _ in range(group_size)]


def _trajectory(prompt: Prompt, completion: Completion, group: int) -> Trajectory:
    return Trajectory(
        prompt_ids=prompt.token_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finished=completion.finished,
        weight_versions=completion.weight_versions,
        group=group,
        routed_experts=completion.routed_experts,
    )

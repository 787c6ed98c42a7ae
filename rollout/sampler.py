"""Groups of answers for prompts, each token checked to come from the expected weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from rollout.client import EngineClient
from rollout.errors import StaleWeightsError
from rollout.types import Completion, Group, SamplingParams, Trajectory


async def sample_groups(
    client: EngineClient, groups: Sequence[Group], sampling: SamplingParams, expected_version: int
) -> list[Trajectory]:
    """The answers of all groups, in their order; `group` is the index of their group.

    Raises StaleWeightsError if any token was sampled at another weight version than `expected_version`.
    """
    rows = _rows(groups)
    completions = await client.complete([row.prompt_ids for row in rows], sampling, [row.seed for row in rows])
    check_versions(completions, expected_version)
    return [row.answered(completion) for row, completion in zip(rows, completions, strict=True)]


async def sample_groups_as_completed(
    client: EngineClient, groups: Sequence[Group], sampling: SamplingParams, expected_version: int
) -> AsyncGenerator[list[Trajectory], None]:
    """The answers of `sample_groups`, those of a group as soon as its last one ends. Closing it ends the rest early."""
    rows = _rows(groups)
    answers: list[dict[int, Trajectory]] = [{} for _ in groups]
    stream = client.complete_each([row.prompt_ids for row in rows], sampling, [row.seed for row in rows])
    async with aclosing(stream):
        async for index, completion in stream:
            check_versions([completion], expected_version)
            row = rows[index]
            answered = answers[row.group]
            answered[index] = row.answered(completion)
            if len(answered) == len(groups[row.group].seeds):
                yield [answered[index] for index in sorted(answered)]


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


@dataclass(frozen=True)
class _Row:
    """One answer that is asked for."""

    prompt_ids: list[int]
    seed: int
    group: int

    def answered(self, completion: Completion) -> Trajectory:
        return Trajectory(
            prompt_ids=self.prompt_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finished=completion.finished,
            weight_versions=completion.weight_versions,
            group=self.group,
            seed=self.seed,
            routed_experts=completion.routed_experts,
        )


def _rows(groups: Sequence[Group]) -> list[_Row]:
    return [_Row(group.prompt.token_ids, seed, index) for index, group in enumerate(groups) for seed in group.seeds]

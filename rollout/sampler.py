"""Samples groups of answers on one engine, and checks weight versions. An answer that updates have cut is continued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fp8rl.rollout.errors import EngineError, StaleWeightsError
from fp8rl.rollout.server.client import EngineClient
from fp8rl.rollout.types import Completion, Group, SamplingParams, Trajectory

_MOST_CUTS = 1000
"""The most cuts of one answer: an engine that cuts more often than it is updated would keep its caller forever."""
_NOTHING = Completion([], [], [], finished=False, cut=True)
"""An answer before it is first asked for."""


async def sample_groups(client: EngineClient, groups: Sequence[Group], sampling: SamplingParams) -> list[Trajectory]:
    """Sample all groups, in their order; `group` is the index of an answer's group.

    An answer that a pause by `abort` has cut is retried from its last token on, with the same seed and the rest of its
    budget. Each token names the weights that sampled it.
    """
    asked = [(group.prompt.token_ids, seed, index) for index, group in enumerate(groups) for seed in group.seeds]
    answers = [_NOTHING for _ in asked]
    for _ in range(_MOST_CUTS):
        cut = [row for row, answer in enumerate(answers) if answer.cut]
        if not cut:
            return [_trajectory(*one, answer) for one, answer in zip(asked, answers, strict=True)]
        completions = await client.complete(
            [asked[row][0] + answers[row].token_ids for row in cut],
            sampling,
            [asked[row][1] for row in cut],
            [len(answers[row].token_ids) for row in cut],
        )
        for row, completion in zip(cut, completions, strict=True):
            answers[row] = answers[row].then(completion)
    raise EngineError(f"found answers that were cut {_MOST_CUTS} times, expected the engine to end them")


def _trajectory(prompt_ids: list[int], seed: int, group: int, answer: Completion) -> Trajectory:
    return Trajectory(
        prompt_ids=prompt_ids,
        token_ids=answer.token_ids,
        logprobs=answer.logprobs,
        finished=answer.finished,
        weight_versions=answer.weight_versions,
        group=group,
        seed=seed,
        routed_experts=answer.routed_experts,
        supports=answer.supports,
        decoding=answer.decoding,
    )


def check_versions(trajectories: Iterable[Trajectory], oldest: int, newest: int) -> None:
    """Raise StaleWeightsError, with counts, if a token was sampled at a weight version out of `oldest` to `newest`."""
    found = Counter(version for trajectory in trajectories for version in trajectory.weight_versions)
    wrong = sum(count for version, count in found.items() if not oldest <= version <= newest)
    if wrong:
        counts = ", ".join(f"{count} at version {version}" for version, count in sorted(found.items()))
        expected = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        raise StaleWeightsError(
            f"{wrong} of {found.total()} tokens were sampled at other weights than expected: found {counts}, "
            f"expected all at {expected}. Sync the weights before sampling."
        )

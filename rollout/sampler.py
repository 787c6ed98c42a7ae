"""Groups of answers from one engine, each answer whole although updates may have cut it, and the check of versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rollout.errors import EngineError, StaleWeightsError
from rollout.server.client import EngineClient
from rollout.types import Completion, Group, SamplingParams, Trajectory

_MOST_CUTS = 1000
"""How often one answer may be cut: an engine that cuts more often than it is updated would keep its caller forever."""


async def sample_groups(client: EngineClient, groups: Sequence[Group], sampling: SamplingParams) -> list[Trajectory]:
    """The answers of all groups, in their order; `group` is the index of their group.

    An answer that a pause by `abort` has cut is asked for again, from its last token on, with the same seed and what is
    left of its budget. Each token says which weights sampled it.
    """
    answers = [
        _Answer(group.prompt.token_ids, seed, index) for index, group in enumerate(groups) for seed in group.seeds
    ]
    for _ in range(_MOST_CUTS):
        cut = [answer for answer in answers if not answer.whole]
        if not cut:
            return [answer.trajectory() for answer in answers]
        completions = await client.complete(
            [answer.prompt_ids + answer.token_ids for answer in cut],
            sampling,
            [answer.seed for answer in cut],
            [len(answer.token_ids) for answer in cut],
        )
        for answer, completion in zip(cut, completions, strict=True):
            answer.add(completion)
    raise EngineError(f"found answers that were cut {_MOST_CUTS} times, expected the engine to end them")


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


@dataclass
class _Answer:
    """One answer while it is sampled. whole: the engine ended it, not a pause."""

    prompt_ids: list[int]
    seed: int
    group: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    routed_experts: Tensor | None = None
    finished: bool = False
    whole: bool = False

    def add(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.weight_versions += completion.weight_versions
        self.routed_experts = completion.routed_experts
        self.finished, self.whole = completion.finished, not completion.cut

    def trajectory(self) -> Trajectory:
        return Trajectory(
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finished=self.finished,
            weight_versions=self.weight_versions,
            group=self.group,
            seed=self.seed,
            routed_experts=self.routed_experts,
        )

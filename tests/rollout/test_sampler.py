"""Group sampling: order, groups, answers that an update cuts, and the check of weight versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from fp8rl.rollout.engine.actor import check_versions, sample_groups
from fp8rl.rollout.types import Completion, EngineError, SamplingParams, StaleWeightsError, Trajectory
from tests.support.servers import EOS, groups

SAMPLING = SamplingParams(max_new_tokens=12, stop_token_ids=(EOS,))


class ScriptedClient:
    """Answers each row with tokens that count on from 100 times its prompt's first, up to three; `cuts` says after how
    many tokens each call is cut."""

    def __init__(self, cuts: Sequence[int] = ()) -> None:
        self.cuts = list(cuts)
        self.calls: list[tuple[list[list[int]], Sequence[int], Sequence[int]]] = []

    async def complete(
        self, input_ids: list[list[int]], sampling: SamplingParams, seeds: Sequence[int], spent: Sequence[int]
    ) -> list[Completion]:
        cut, version = (self.cuts.pop(0) if self.cuts else None), len(self.calls)
        self.calls.append((input_ids, seeds, spent))
        return [self.answer(ids, begun, cut, version) for ids, begun in zip(input_ids, spent, strict=True)]

    def answer(self, ids: list[int], begun: int, cut: int | None, version: int) -> Completion:
        length = 3 - begun if cut is None else min(cut, 3 - begun)
        tokens = [100 * ids[0] + begun + index for index in range(length)]
        whole = begun + length == 3
        routes = torch.full((len(ids) + length - 1, 1, 1), version, dtype=torch.int16)
        return Completion(tokens, [-0.5] * length, [version] * length, whole, routes, aborted=not whole)


def test_groups_come_in_their_order_with_their_seeds() -> None:
    client = ScriptedClient()
    trajectories = asyncio.run(sample_groups(client, groups(3, 2), SAMPLING))
    assert [t.group for t in trajectories] == [0, 0, 1, 1, 2, 2]
    assert [t.prompt_ids for t in trajectories] == [[10, 20]] * 2 + [[11, 21]] * 2 + [[12, 22]] * 2
    assert [t.token_ids[0] for t in trajectories] == [1000, 1000, 1100, 1100, 1200, 1200]
    assert [t.seed for t in trajectories] == [0, 1, 2, 3, 4, 5]
    assert [calls[1:] for calls in client.calls] == [([0, 1, 2, 3, 4, 5], [0] * 6)]


def test_an_answer_that_is_cut_goes_on_from_its_last_token_with_its_seed_and_the_rest_of_its_budget() -> None:
    client = ScriptedClient(cuts=[2, 0])
    trajectories = asyncio.run(sample_groups(client, groups(1, 2), SAMPLING))
    assert [t.token_ids for t in trajectories] == [[1000, 1001, 1002]] * 2
    assert [t.weight_versions for t in trajectories] == [[0, 0, 2]] * 2
    assert [len(t.logprobs) for t in trajectories] == [3, 3]
    again = ([[10, 20, 1000, 1001]] * 2, [0, 1], [2, 2])
    assert client.calls == [([[10, 20]] * 2, [0, 1], [0, 0]), again, again]
    assert len(trajectories[0].routed_experts) == 4 and trajectories[0].finished


def test_an_engine_that_only_cuts_is_given_up() -> None:
    with pytest.raises(EngineError, match="cut 1000 times"):
        asyncio.run(sample_groups(ScriptedClient(cuts=[0] * 2000), groups(1, 1), SAMPLING))


def sampled_at(*versions: int) -> Trajectory:
    return Trajectory([1], list(versions), [-1.0] * len(versions), True, list(versions), 0, 0)


def test_stale_tokens_are_counted_by_version() -> None:
    trajectories = [sampled_at(4, 5, 5), sampled_at(4)]
    with pytest.raises(StaleWeightsError, match=r"2 of 4 tokens .* 2 at version 4, 2 at version 5, .* at version 5"):
        check_versions(trajectories, 5, 5)
    with pytest.raises(StaleWeightsError, match=r"2 of 4 tokens .* expected all at versions 2 to 4"):
        check_versions(trajectories, 2, 4)
    check_versions([*trajectories, sampled_at()], 4, 5)

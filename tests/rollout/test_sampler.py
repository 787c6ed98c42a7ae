"""Group sampling: order, groups and the check of weight versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
import torch

from rollout.client import EngineClient
from rollout.errors import EngineError, StaleWeightsError
from rollout.sampler import check_versions, sample_groups, sample_groups_as_completed
from rollout.server import SGLangServer
from rollout.types import Completion, SamplingParams, Trajectory
from tests.support.servers import EOS, groups, use

SAMPLING = SamplingParams(max_new_tokens=12, stop_token_ids=(EOS,))


class ScriptedClient:
    """Answers row r with the token 100 + r; streams in the order it is told."""

    def __init__(self, order: Sequence[int] = (), version: int = 1) -> None:
        self.order = order
        self.version = version
        self.closed = False
        self.calls: list[Sequence[int]] = []

    async def complete(
        self, input_ids: list[list[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        self.calls.append(seeds)
        return [self.answer(row) for row in range(len(input_ids))]

    async def complete_each(
        self, input_ids: list[list[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        try:
            for row in self.order:
                yield row, self.answer(row)
        finally:
            self.closed = True

    def answer(self, row: int) -> Completion:
        routes = torch.full((2, 1, 1), row, dtype=torch.int16)
        return Completion([100 + row], [-0.5], [self.version], True, routes)


def test_groups_come_in_the_order_of_their_prompts() -> None:
    client = ScriptedClient()
    trajectories = asyncio.run(sample_groups(client, groups(3, 2), SAMPLING, expected_version=1))
    assert [t.group for t in trajectories] == [0, 0, 1, 1, 2, 2]
    assert [t.prompt_ids for t in trajectories] == [[10, 20]] * 2 + [[11, 21]] * 2 + [[12, 22]] * 2
    assert [t.token_ids for t in trajectories] == [[100 + row] for row in range(6)]
    assert [t.routed_experts.flatten().tolist() for t in trajectories] == [[row, row] for row in range(6)]
    assert [t.seed for t in trajectories] == [0, 1, 2, 3, 4, 5]
    assert client.calls == [[0, 1, 2, 3, 4, 5]]


def test_a_group_is_yielded_when_its_last_answer_ends() -> None:
    async def run() -> list[list[Trajectory]]:
        client = ScriptedClient(order=[4, 0, 5, 3, 1, 2])
        return [g async for g in sample_groups_as_completed(client, groups(3, 2), SAMPLING, expected_version=1)]

    answered = asyncio.run(run())
    assert [group[0].group for group in answered] == [2, 0, 1]
    assert [[t.token_ids[0] for t in group] for group in answered] == [[104, 105], [100, 101], [102, 103]]


def test_leaving_early_closes_the_stream() -> None:
    async def run() -> bool:
        client = ScriptedClient(order=[0, 1, 2, 3])
        answered = sample_groups_as_completed(client, groups(2, 2), SAMPLING, expected_version=1)
        await anext(answered)
        await answered.aclose()
        return client.closed

    assert asyncio.run(run())


def test_stale_tokens_are_counted_by_version() -> None:
    completions = [Completion([1, 2, 3], [-1.0] * 3, [4, 5, 5], False), Completion([1], [-1.0], [4], True)]
    with pytest.raises(StaleWeightsError, match=r"2 of 4 tokens .* 2 at version 4, 2 at version 5, expected .* 5"):
        check_versions(completions, 5)
    check_versions([Completion([], [], [], False)], 5)


@pytest.mark.parametrize("streaming", [False, True])
def test_stale_answers_are_refused(streaming: bool) -> None:
    async def run() -> None:
        client = ScriptedClient(order=[0, 1], version=2)
        if streaming:
            async for _ in sample_groups_as_completed(client, groups(1, 2), SAMPLING, expected_version=3):
                raise AssertionError("a stale group was handed out")
        else:
            await sample_groups(client, groups(1, 2), SAMPLING, expected_version=3)

    with pytest.raises(StaleWeightsError):
        asyncio.run(run())


@pytest.mark.e2e
@pytest.mark.parametrize("streaming", [False, True])
def test_groups_from_a_real_server(server: SGLangServer, streaming: bool) -> None:
    asked = groups(5, 4)

    async def run(client: EngineClient) -> list[Trajectory]:
        if streaming:
            answered = [g async for g in sample_groups_as_completed(client, asked, SAMPLING, 3)]
            return [t for group in sorted(answered, key=lambda g: g[0].group) for t in group]
        return await sample_groups(client, asked, SAMPLING, 3)

    trajectories = use(server, run)
    assert [t.group for t in trajectories] == [g for g in range(5) for _ in range(4)]
    assert all(t.prompt_ids == asked[t.group].prompt.token_ids for t in trajectories)
    assert len({tuple(t.token_ids) for t in trajectories if t.group == 0}) > 1, "a group's answers must differ"


@pytest.mark.e2e
def test_leaving_early_ends_the_rest(server: SGLangServer) -> None:
    """After the first group the caller goes on: the server becomes idle, so its cache can be flushed."""

    async def run(client: EngineClient) -> None:
        answered = sample_groups_as_completed(client, groups(16, 4), SamplingParams(max_new_tokens=400), 3)
        await anext(answered)
        await answered.aclose()
        async with asyncio.timeout(60):
            while True:
                try:
                    return await client.flush()
                except EngineError:
                    await asyncio.sleep(0.2)

    use(server, run)

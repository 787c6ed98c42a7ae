"""An engine that gives up its memory and gets it back, and a trainer beside it that does the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fp8rl.models import read_shape
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.engine.protocol import Memory
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import EngineError, SamplingParams, Trajectory
from tests.support.rig import Pipeline, Rig, Setup, prompts
from tests.support.servers import use
from tests.support.updates import requests

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SETUP = Setup("moe")
SAMPLING = SamplingParams(max_new_tokens=24)


@pytest.fixture
def pipeline(rig: Rig) -> Iterator[Pipeline]:
    """Left awake, whatever became of the test."""
    pipeline = rig.open(SETUP)
    yield pipeline
    pipeline.sync(wakes=True)


def memory(pipeline: Pipeline) -> Memory:
    (rank,) = use(pipeline.endpoint, EngineClient.memory)
    return rank


def answers(pipeline: Pipeline) -> list[tuple[list[int], list[float]]]:
    groups = to_groups(prompts(0), 2, run_seed=0, step=1)
    return [(each.token_ids, each.logprobs) for each in pipeline.generate(groups, SAMPLING)]


def test_what_is_asked_of_an_engine_that_sleeps_is_answered_under_the_weights_that_wake_it(pipeline: Pipeline) -> None:
    said = answers(pipeline)
    groups = to_groups(prompts(0), 2, run_seed=0, step=1)

    async def asked_asleep() -> list[Trajectory]:
        async with EngineClient(pipeline.endpoint) as client:
            under_way = asyncio.create_task(client.generate(groups, SAMPLING))
            while (await requests(client))[0] == 0 and not under_way.done():
                await asyncio.sleep(0.01)
            await pipeline.engine.sleep()  # some run, others wait
            assert await client.ping() is None
            late = asyncio.create_task(client.generate(groups[:1], SAMPLING))
            await asyncio.sleep(0.3)
            assert not late.done()
            await pipeline.engine.sleep()  # once more changes nothing
            await asyncio.to_thread(pipeline.bridge(wakes=True).sync, [pipeline.endpoint])
            return [*await under_way, *await late]

    found = [(each.token_ids, each.logprobs) for each in pipeline.rig.run(asked_asleep())]
    assert found == [*said, *said[:2]]


def test_an_engine_sleeps_and_wakes_as_it_was(rig: Rig) -> None:
    """Nothing is read of the states of sequences in a memory that was given up."""
    pipeline = rig.open(Setup("qwen3_next"))
    said, awake = answers(pipeline), memory(pipeline)
    shape = read_shape(rig.models["qwen3_next"])
    assert awake.kv_cache == shape.kv_bytes() * (16384 + 1) + shape.request_bytes() * (3 * 64 + 1)
    slept = pipeline.rig.run(pipeline.engine.sleep())
    asleep = memory(pipeline)
    assert (asleep.weights, asleep.kv_cache) == (0, 0)
    assert slept.released == awake.weights + awake.kv_cache
    assert awake.in_use - slept.behind > awake.weights, "the process gave at least the weights' memory back"
    with pytest.raises(EngineError, match="memory was released"):
        use(pipeline.endpoint, EngineClient.manifest)
    report = pipeline.sync("disk", wakes=True)
    assert report.bytes == report.weight_bytes and report.mismatched_tensors == 0
    assert memory(pipeline).weights == awake.weights and memory(pipeline).kv_cache == awake.kv_cache
    assert answers(pipeline) == said

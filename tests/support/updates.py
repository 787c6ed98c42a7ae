"""Answers across updates of the weights, and what a trainer that holds each version says of their tokens."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from fp8rl.numerics.sampling import Truncation
from fp8rl.rl.run.batching import batch_from_trajectories, token_versions
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Endpoint, Group, SamplingParams, Trajectory
from tests.support.rig import Pipeline, prompts

PLAIN = SamplingParams(max_new_tokens=150)
UPDATES = 2
GROUP = 2
ASKED = prompts(0)[::2]


def sampled_across_updates(
    pipeline: Pipeline, folder: Path, sync: Callable[[Endpoint], object], sampling: SamplingParams = PLAIN
) -> tuple[list[Trajectory], dict[int, Path]]:
    """Answers with UPDATES in their midst, and a checkpoint of the trainer at each version that sampled a part."""
    endpoint = pipeline.endpoint
    first, *later = trained_versions(pipeline, folder)  # the engine still holds the first
    pipeline.trainer.load(later[0])
    asked = to_groups(ASKED, GROUP, run_seed=0, step=1)

    async def run() -> list[Trajectory]:
        async with EngineClient(endpoint) as client:
            answers = asyncio.create_task(client.generate(asked, sampling))
            for version in later:
                if version is not later[0]:  # on a busy machine it takes the time of many tokens
                    await asyncio.to_thread(pipeline.trainer.load, version)
                await a_little_later(client, answers)
                await asyncio.to_thread(sync, endpoint)
            return await answers

    return pipeline.rig.run(run()), {int(path.name): path for path in (first, *later)}


def trained_versions(pipeline: Pipeline, folder: Path) -> list[Path]:
    """Checkpoints of the trainer before and after UPDATES steps, each named by its version. They are made beforehand:
    a first step takes longer than answers do on a busy machine."""
    batch, made = pipeline.sample(1.0, count=4), []
    for number in range(1 + UPDATES):
        if number:
            pipeline.train_step(batch)
        made.append(folder / str(pipeline.trainer.weight_version))
        pipeline.trainer.stage(made[-1], {}, {})
        pipeline.trainer.write(made[-1])
    return made


async def a_little_later(client: EngineClient, answers: asyncio.Task[list[Trajectory]]) -> None:
    """Half of the answers have reached the engine, and those that run are some tokens longer: as many as a request
    that came after them has got."""
    while sum(await requests(client)) < GROUP * len(ASKED) / 2:
        await asyncio.sleep(0.02)
    await client.generate([Group(prompts(1)[0], seeds=(0,))], SamplingParams(max_new_tokens=8))
    assert not answers.done(), f"no answer was under way any more: {answers.exception() or 'all had ended'}"


async def requests(client: EngineClient) -> tuple[int, int]:
    """How many requests run in an engine of one rank, and how many wait."""
    (load,) = (await client._send("GET", "/v1/loads", params={"include": "core"})).json()["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


def differences_by_version(
    pipeline: Pipeline, trajectories: list[Trajectory], checkpoints: dict[int, Path], sampling: SamplingParams = PLAIN
) -> dict[int, torch.Tensor]:
    """d of the tokens that each version sampled, against a trainer that holds it, over the whole prefix."""
    cut = Truncation(sampling.top_p, sampling.top_k, sampling.min_p)
    batch = batch_from_trajectories(trajectories, 1.0, redraws=len(trajectories), truncation=cut)
    assert (batch.supports is not None) == sampling.supports
    versions = token_versions(trajectories, batch.loss_mask)
    found = {}
    for version, path in checkpoints.items():
        pipeline.trainer.load(path)
        scored = pipeline.trainer.score_routed(batch)
        mine = batch.loss_mask & (versions == version)
        found[version] = (scored.logprobs - batch.fields["rollout_logprobs"])[mine]
        if sampling.supports:  # the trainer finds them again, and has others at other weights
            own = pipeline.trainer.score(dataclasses.replace(batch, supports=None))
            assert own[mine].equal(scored.logprobs[mine])
            assert not own[batch.loss_mask & ~mine].equal(scored.logprobs[batch.loss_mask & ~mine])
        if not found[version].any():
            assert scored.draws is not None and scored.draws[mine].equal(batch.tokens[mine])
    return found

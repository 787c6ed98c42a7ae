"""Weights that change while answers are under way: every token is one of the weights that it names, bit for bit."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from numerics.sampling import Truncation
from numerics.spec import QuantSpec
from rl.mismatch import token_versions
from rl.run.feed.batching import batch_from_trajectories
from rl.run.feed.feed import to_groups
from rollout.sampler import sample_groups
from rollout.server.client import EngineClient
from rollout.types import Endpoint, SamplingParams, Trajectory
from tests.support.rig import Pipeline, Rig, Setup, prompts
from tests.support.syncs import push
from weight_sync.transports import TensorTransport

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SETUP = Setup("moe")
PLAIN = SamplingParams(max_new_tokens=150)
CUT = dataclasses.replace(PLAIN, top_p=0.9, min_p=0.02, supports=True)
UPDATES = 2
GROUP = 3
ANSWERS = GROUP * len(prompts(0))


def sampled_across_updates(
    pipeline: Pipeline, folder: Path, sync: Callable[[Endpoint], object], sampling: SamplingParams = PLAIN
) -> tuple[list[Trajectory], dict[int, Path]]:
    """Answers with UPDATES in their midst, and a checkpoint of the trainer at each version that sampled a part."""
    endpoint = pipeline.endpoint
    first, *later = trained_versions(pipeline, folder)
    pipeline.trainer.load(first)
    asked = to_groups(prompts(0), GROUP, run_seed=0, step=1)

    async def run() -> list[Trajectory]:
        async with EngineClient(endpoint) as client:
            answers = asyncio.create_task(sample_groups(client, asked, sampling))
            for version in later:
                await until_they_run(client, answers)
                await asyncio.sleep(0.3)
                await asyncio.to_thread(pipeline.trainer.load, version)
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
        pipeline.trainer.save(made[-1], {})
    return made


async def until_they_run(client: EngineClient, answers: asyncio.Task[list[Trajectory]]) -> None:
    """Half of them are there, and some run: what comes to the engine after an update is of its weights alone."""
    load = await client.load()
    while load.running + load.waiting < ANSWERS / 2 or load.running < ANSWERS / 4:
        assert not answers.done(), f"no answer was under way any more: {answers.exception() or 'all had ended'}"
        await asyncio.sleep(0.02)
        load = await client.load()


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


@pytest.mark.parametrize(("pause", "sampling"), [("retract", PLAIN), ("abort", CUT)], ids=["retract", "abort-top-p"])
def test_each_token_is_one_of_the_weights_that_it_names(
    rig: Rig, tmp_path: Path, pause: str, sampling: SamplingParams
) -> None:
    pipeline = rig.open(SETUP)
    bridge = pipeline.bridge(pause=pause)
    trajectories, checkpoints = sampled_across_updates(
        pipeline, tmp_path, lambda endpoint: bridge.sync([endpoint]), sampling
    )
    assert all(t.weight_versions == sorted(t.weight_versions) for t in trajectories)
    assert sum(len(set(t.weight_versions)) == 1 + UPDATES for t in trajectories) >= ANSWERS / 3
    assert max(len(t.token_ids) for t in trajectories) == PLAIN.max_new_tokens
    for version, d in differences_by_version(pipeline, trajectories, checkpoints, sampling).items():
        assert len(d) > 10, f"version {version} has sampled {len(d)} tokens"
        assert (d == 0).all(), f"version {version}: {int((d != 0).sum())} of {len(d)} tokens differ"


def test_old_keys_under_new_weights_are_seen(rig: Rig, tmp_path: Path) -> None:
    """Without the flush, retracted answers find their prefix in the cache of the old weights: no weights have sampled
    what follows, and d says so."""
    pipeline = rig.open(SETUP)

    def sync(endpoint: Endpoint) -> None:
        pipeline.trainer.apply(push_without_flush, SETUP.numerics.rollout_spec, endpoint)

    trajectories, checkpoints = sampled_across_updates(pipeline, tmp_path, sync)
    first, *later = differences_by_version(pipeline, trajectories, checkpoints).values()
    assert (first == 0).all()
    assert (torch.cat(later) != 0).float().mean() > 0.5


def push_without_flush(trainer: Any, spec: QuantSpec, endpoint: Endpoint) -> None:
    async def nothing(client: EngineClient) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "flush", nothing)
        push(trainer, TensorTransport(1 << 20), spec, [endpoint], trainer.weight_version)

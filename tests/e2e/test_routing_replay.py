"""Routing replay between real engine and real trainer: cached prefixes, chunked prefill, answers cut at the limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.trainer.step.batch import UNKNOWN, TokenBatch
from fp8rl.trainer.step.objective import PassResult, Scored
from tests.support.rig import NEW_TOKENS, Rig, Setup, differences

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SETUP = Setup(
    "moe", layout=(("ep", 2), ("dp", 2), ("recompute", "attention"), ("packing", True)), router_replay="record"
)


def test_engine_and_trainer_choose_the_same_experts_before_and_after_an_update(rig: Rig) -> None:
    pipeline = rig.open(SETUP)
    first = pipeline.sample(1.0, answers=1)
    cached = pipeline.sample(0.7, answers=1)  # of the same prompts, which are all in the prefix cache now
    assert_agree(pipeline.trainer.score_routed(cached), cached)
    assert_agree(pipeline.train_step(replace(first, replay=True)), first)
    pipeline.sync()
    after = pipeline.sample(1.0, answers=1)
    assert_agree(pipeline.trainer.score_routed(after), after)
    # The update moved routes, so that those of prompts that were cached before it are new ones.
    prompts = slice(0, 300)
    assert (after.routes[-1, prompts] != first.routes[-1, prompts]).any()


def test_experts_are_reported_for_every_turn_of_a_conversation_and_what_it_is_told(rig: Rig) -> None:
    pipeline = rig.open(SETUP)

    async def environment(conversation: Conversation) -> None:
        for _ in range(3):
            await conversation.sample(max_new_tokens=NEW_TOKENS // 4)
            conversation.tell("13),")
        await conversation.sample(max_new_tokens=NEW_TOKENS - 3 * (NEW_TOKENS // 4))

    batch = batch_from_trajectories(pipeline.converse(environment, count=3), 1.0)
    assert_agree(pipeline.trainer.score_routed(batch), batch)


def test_replay_brings_a_trainer_with_another_router_closer(rig: Rig) -> None:
    pipeline = rig.open(SETUP)
    batch = pipeline.sample(1.0, answers=1)
    pipeline.trainer.apply(perturb_routers, 0.02)
    alone = pipeline.trainer.score_routed(batch)
    replayed = pipeline.trainer.score_routed(replace(batch, replay=True))
    known = batch.routes != UNKNOWN
    assert 0.01 < (alone.routes != batch.routes)[known].float().mean() < 0.5
    apart, closer = (differences(scored.logprobs, batch).abs().mean() for scored in (alone, replayed))
    assert 0 < closer < apart


def assert_agree(scored: Scored | PassResult, batch: TokenBatch) -> None:
    """The engine reports the experts of every token but the last ones, and they are the trainer's own; d == 0."""
    assert batch.routes is not None and scored.routes is not None
    generated = batch.loss_mask.sum(dim=1)
    assert (generated == NEW_TOKENS).any() and (batch.lengths - generated).max() > 300
    computed = torch.arange(batch.width) < batch.lengths[:, None] - 1
    assert (batch.routes[~computed] == UNKNOWN).all() and (batch.routes[computed] >= 0).all()
    assert torch.equal(scored.routes[computed], batch.routes[computed])
    assert not differences(scored.logprobs, batch).any()


def perturb_routers(trainer: Any, scale: float) -> None:
    """Other router weights on every rank, the same on each."""
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in trainer.model.decoder.layers:
            weight = layer.mlp.router.weight
            weight += scale * weight.std() * torch.randn(weight.shape, generator=noise).to(weight)
    trainer.weights_changed()

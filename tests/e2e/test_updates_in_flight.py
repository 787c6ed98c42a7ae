"""Weights that change while answers are under way: every token is one of the weights that it names, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Endpoint, SamplingParams
from fp8rl.weight_sync.transports.tensor import TensorTransport
from tests.support.rig import Rig, Setup
from tests.support.syncs import push
from tests.support.updates import PLAIN, UPDATES, differences_by_version, sampled_across_updates

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SETUP = Setup("moe")
CUT = dataclasses.replace(PLAIN, top_p=0.9, min_p=0.02, supports=True)


@pytest.mark.parametrize(
    ("model", "pause", "sampling"),
    [("qwen3_next", "retract", PLAIN), ("moe", "abort", CUT)],
    ids=["linear-attention-retract", "abort-top-p"],
)
def test_each_token_is_one_of_the_weights_that_it_names(
    rig: Rig, tmp_path: Path, model: str, pause: str, sampling: SamplingParams
) -> None:
    pipeline = rig.open(Setup(model))
    bridge = pipeline.bridge(pause=pause)
    trajectories, checkpoints = sampled_across_updates(
        pipeline, tmp_path, lambda endpoint: bridge.sync([endpoint]), sampling
    )
    assert all(t.weight_versions == sorted(t.weight_versions) for t in trajectories)
    assert any(len(set(t.weight_versions)) == 1 + UPDATES for t in trajectories), "how many is a question of time"
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

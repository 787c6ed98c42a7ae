"""Weights that change while answers are under way: every token is one of the weights that it names, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fp8rl.rollout.types import SamplingParams
from tests.support.rig import Rig, Setup
from tests.support.updates import PLAIN, UPDATES, differences_by_version, sampled_across_updates

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

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

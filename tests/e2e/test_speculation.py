"""An engine that drafts: every token is the seeded draw from the trainer's logits, whatever was drafted before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8rl.numerics.sampling import Truncation
from fp8rl.rl.run.batching import batch_from_trajectories
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.config import SpeculationSection
from fp8rl.rollout.types import Decoding, SamplingParams, Trajectory
from fp8rl.trainer.step.batch import UNKNOWN
from tests.support.rig import NEW_TOKENS, Pipeline, Rig, Setup, differences, prompts
from tests.support.updates import UPDATES, differences_by_version, sampled_across_updates

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SETUP = Setup("moe", router_replay="record", speculation=SpeculationSection(drafts=4))
KINDS = {
    "greedy": SamplingParams(NEW_TOKENS, temperature=0.0),
    "top-p": SamplingParams(NEW_TOKENS, temperature=0.9, top_p=0.9, top_k=20),
}
TRIES = 5
"""Whether a draft pays is a question of time; that some do is only probable."""


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
def test_what_is_said_again_is_drafted_and_no_bit_differs(rig: Rig, sampling: SamplingParams) -> None:
    """The model says random things, so that drafts are wrong at first; they are right once it says the same again."""
    pipeline = rig.open(SETUP)
    first = answers(pipeline, sampling)
    agree(pipeline, first, sampling)
    for _ in range(TRIES):
        again = answers(pipeline, sampling)
        assert [a.token_ids for a in again] == [a.token_ids for a in first]
        assert [a.logprobs for a in again] == [a.logprobs for a in first]
        said = sum((answer.decoding for answer in again), Decoding())
        if said.accepted > said.passes / 2:
            break
    assert said.passes / 2 < said.accepted <= said.drafted <= 4 * said.passes
    agree(pipeline, again, sampling)


def test_drafts_of_old_weights_change_no_token_of_new_ones(rig: Rig, tmp_path: Path) -> None:
    pipeline = rig.open(SETUP)
    bridge = pipeline.bridge()
    trajectories, checkpoints = sampled_across_updates(pipeline, tmp_path, lambda endpoint: bridge.sync([endpoint]))
    # How many an answer lives through is a question of time; that some goes on under others is not.
    assert max(len(set(t.weight_versions)) for t in trajectories) > 1
    found = differences_by_version(pipeline, trajectories, checkpoints)
    assert len(found) == 1 + UPDATES
    for version, d in found.items():
        assert len(d) > 10 and (d == 0).all(), f"version {version}: {int((d != 0).sum())} of {len(d)} tokens differ"


def answers(pipeline: Pipeline, sampling: SamplingParams) -> list[Trajectory]:
    return pipeline.generate(to_groups(prompts(0), 1, run_seed=0, step=1), sampling)


def agree(pipeline: Pipeline, trajectories: list[Trajectory], sampling: SamplingParams) -> None:
    """The trainer finds the log-probabilities, the draws and the experts in its own logits."""
    greedy = sampling.temperature == 0
    cut = Truncation(sampling.top_p, sampling.top_k, sampling.min_p)
    batch = batch_from_trajectories(
        trajectories, sampling.temperature or 1.0, redraws=len(trajectories), truncation=cut
    )
    scored = pipeline.trainer.score_routed(batch)
    assert (differences(scored.logprobs, batch) == 0).all()
    assert scored.draws is not None and batch.routes is not None and scored.routes is not None
    assert scored.draws[batch.loss_mask].equal(batch.tokens[batch.loss_mask]) != greedy
    known = batch.routes != UNKNOWN
    assert known.any((0, 1, 3)).all() and scored.routes[known].equal(batch.routes[known])

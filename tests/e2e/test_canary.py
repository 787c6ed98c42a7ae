"""The canary of a sync, at a real engine: what it sees and nothing else does. What follows is tested at the pool of
engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fp8rl.rl.run.engines.canary import Canary
from fp8rl.rollout.types import SamplingParams
from tests.support.plants import PLANT, stale_operands
from tests.support.rig import MODELS, Pipeline, Rig, Setup

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CANARY = Canary.of(0, MODELS["moe"].vocab, 512, exact=True)


def differences(pipeline: Pipeline) -> float:
    """Between the engine's canary, which is asked for as runs do it, and the trainer's."""
    scored = pipeline.trainer.begin_score(CANARY.batch)
    (answer,) = pipeline.generate([CANARY.group], CANARY.sampling)
    assert answer.token_ids == CANARY.answer_ids and answer.prompt_ids == CANARY.prompt_ids
    return CANARY.difference(answer, scored())


def trained(pipeline: Pipeline) -> None:
    """A step that moves the codes of every layer, and a sync of which every digest is right."""
    pipeline.train_step(pipeline.sample(1.0, seed=3, count=4))
    report = pipeline.sync()
    assert report.mismatched == () and report.version == pipeline.trainer.weight_version


@pytest.fixture
def with_stale_operands(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    rig.only_ray()  # before the fault, or Ray would hand it on to engines of its own actors
    monkeypatch.setenv(PLANT, stale_operands.__name__)
    yield rig.open(Setup("moe"))
    rig.stop_engine()


def test_stale_operands_behind_right_parameters_are_seen_by_the_canary_and_by_no_digest(
    with_stale_operands: Pipeline,
) -> None:
    pipeline = with_stale_operands
    trained(pipeline)
    held = pipeline.rig.run(pipeline.engine.held())
    assert all(entry.endswith(f"@{pipeline.trainer.weight_version}") for entry in held.values() if "@" in entry)
    assert differences(pipeline) > 0.01


def test_a_canary_is_answered_as_the_trainer_scores_it_alone_and_among_others(rig: Rig) -> None:
    pipeline = rig.open(Setup("moe"))
    assert differences(pipeline) == 0.0
    trained(pipeline)
    scored = pipeline.trainer.score(CANARY.batch)
    groups = [replace(CANARY.group, seeds=(CANARY.seed, 11)), CANARY.group]
    among, other, again = pipeline.generate(groups, SamplingParams(len(CANARY.answer_ids)))
    assert CANARY.difference(among, scored) == CANARY.difference(again, scored) == 0.0
    assert other.token_ids != CANARY.answer_ids, "what is drawn by an ordinary seed follows the logits"

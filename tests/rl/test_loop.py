"""The training loop over a trainer and engines that play their part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import fp8rl.rl.loop as loop
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.run.feed.judging import Judge
from fp8rl.rl.run.feed.state import FeedState
from fp8rl.rl.run.interrupts import ShutdownStack
from fp8rl.rollout.tasks.rewards import RewardsSection
from fp8rl.rollout.types import Group, Trajectory
from tests.rl.run.feed.test_feed import Letters
from tests.support.experiments import experiment
from tests.support.pools import Pool, sampling_of


def test_after_a_lost_trainer_nothing_is_asked_of_engines_that_still_hold_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"question": "{i}", "answer": "#### 1"}}\n' for i in range(60)))
    settings = experiment(
        run={"steps": 20},
        data={"train": str(tmp_path / "train.jsonl")},
        eval={"problems": 0},
        rollout={"prompts_per_step": 2, "group_size": 2, "staleness": 1, "in_flight": True},
        algorithm={"name": "grpo"},
    )
    held = [10]  # of the trainer that was lost; the checkpoint of step 8 has version 8

    def reply(group: Group) -> list[Trajectory]:
        return [Trajectory(group.prompt.token_ids, [5], [-1.0], True, held[:], 0, seed) for seed in group.seeds]

    judge = Judge(RewardsSection(), cast(Any, Letters()))
    sampling = sampling_of(Pool(reply, at_once=True), settings, Letters(), judge)
    trainer = cast(Any, sampling.syncing.bridge.trainer)
    trainer.weight_version = 8

    def sync() -> Any:
        held[0] = 8
        return SimpleNamespace(verified_tensors=1, bytes=1)

    trained: list[set[int]] = []

    def forward_backward(trainer: Any, rollouts: Any, guard: Any) -> Any:
        trained.append({version for each in rollouts.answers for version in each.trajectory.weight_versions})
        raise InterruptedError

    monkeypatch.setattr(loop, "forward_backward", forward_backward)
    stack = SimpleNamespace(
        trainer=trainer,
        sampling=sampling,
        engines=[sampling.engines],
        closing=ShutdownStack(),
        replays=False,
        metrics=dict,
        turn=sampling.turns.turn,
    )
    run = SimpleNamespace(
        experiment=settings,
        step=8,
        feed=FeedState(20, [16, 17, 18, 19], []),
        gate_state=GateState(),
        sync=sync,
        console=SimpleNamespace(note=lambda *_: None),
        files=SimpleNamespace(metrics=tmp_path / "metrics.jsonl"),
        tracker=SimpleNamespace(write=lambda: None),
        stack=stack,
        steps=lambda: iter([9]),
    )
    with pytest.raises(InterruptedError):
        loop.train(cast(Any, run))
    judge.close()
    assert trained == [{8}]

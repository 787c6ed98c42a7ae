import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.record.rollouts import shown
from fp8rl.rl.run.feed.batching import batch_from_trajectories
from fp8rl.rl.run.feed.feed import RolloutBatch, rollout_metrics
from fp8rl.rl.run.feed.judging import JudgedAnswer
from fp8rl.rl.run.step import rollout_records, scored_records, throughput, train_metrics
from fp8rl.rollout.data.tasks import Problem
from fp8rl.rollout.types import Trajectory
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.result import PassResult


def trajectory(group: int, tokens: int, *, finished: bool = True, version: int = 4) -> Trajectory:
    return Trajectory(
        prompt_ids=[1, 2],
        token_ids=list(range(10, 10 + tokens)),
        logprobs=[-1.0] * tokens,
        finished=finished,
        weight_versions=[version] * tokens,
        group=group,
        seed=group,
    )


@pytest.fixture
def trajectories() -> list[Trajectory]:
    """Three groups of two."""
    lengths = [3, 5, 4, 4, 2, 6]
    return [trajectory(row // 2, n, finished=row != 5, version=3 if row == 4 else 4) for row, n in enumerate(lengths)]


@pytest.fixture
def batch(trajectories: list[Trajectory]) -> TokenBatch:
    batch = batch_from_trajectories(trajectories, 1.0)
    return batch.with_fields(advantages=torch.zeros(batch.tokens.shape))


def result(logprobs: Tensor) -> PassResult:
    return PassResult(logprobs=logprobs, metrics={"train/entropy": 0.5}, loss=0.25, grad_norm=2.0, seconds=1.0)


def test_rollout_metrics_against_hand_counts(trajectories: list[Trajectory]) -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    metrics = rollout_metrics(trajectories, rewards, torch.tensor([t.group for t in trajectories]), version=4)
    assert metrics == {
        "rollout/reward_mean": 0.5,
        "rollout/reward_std": 0.5,
        "rollout/equal_reward_groups": pytest.approx(2 / 3),
        "rollout/finished_fraction": pytest.approx(5 / 6),
        "rollout/response_tokens_mean": 4.0,
        "rollout/response_tokens_max": 6.0,
        "rollout/tokens": 24.0,
        "rollout/trajectories": 6.0,
        "rollout/staleness_max": 1.0,
        "rollout/tokens_age_0": 22.0,
        "rollout/tokens_age_1": 2.0,
    }


def test_train_metrics_count_the_target_tokens(batch: TokenBatch) -> None:
    batch.fields["rollout_logprobs"][4, 2] = math.nan
    metrics = {"train/loss": 0.25, "train/grad_norm": 2.0, "train/tokens": 24.0, "train/entropy": 0.5}
    assert train_metrics(result(torch.zeros(6, 8)), batch) == metrics | {"train/dropped_tokens": 1.0}
    assert train_metrics(result(torch.zeros(6, 8)), replace(batch, fields={})) == metrics, "of examples"


def test_throughput_counts_prompts_for_training_and_answers_for_sampling(batch: TokenBatch) -> None:
    metrics = {"perf/train_seconds": 2.0, "perf/sampling_seconds": 4.0, "rollout/tokens": 24.0}
    assert throughput(metrics, batch) == {
        "perf/train_tokens_per_second": (24 + 6 * 2) / 2.0,
        "perf/rollout_tokens_per_second": 6.0,
    }
    assert list(throughput({"perf/train_seconds": 2.0}, batch)) == ["perf/train_tokens_per_second"]


def test_records_keep_a_whole_trajectory_with_both_log_probabilities(
    trajectories: list[Trajectory], batch: TokenBatch
) -> None:
    problems = [Problem(f"question {group}", "#### 1") for group in range(3)]
    answers = tuple(
        JudgedAnswer(problems[t.group], t, [("model", f"text {row}")], float(row == 4), {})
        for row, t in enumerate(trajectories)
    )
    logprobs = batch.fields["rollout_logprobs"].clone()
    logprobs[4, 2] += 0.5  # one of the two tokens of row 4
    logprobs[5, 3] = math.nan
    groups = torch.tensor([t.group for t in trajectories])
    outcomes = Outcomes(torch.zeros(6), groups, torch.ones(6, dtype=torch.bool))
    records = rollout_records(RolloutBatch(batch, outcomes=outcomes, answers=answers), logprobs)
    assert [record.group for record in records] == [0, 0, 1, 1, 2, 2]
    fifth = records[4]
    assert (fifth.prompt, fifth.text, fifth.reward, fifth.abs_diff_mean) == ("question 2", "text 4", 1.0, 0.25)
    assert (fifth.prompt_ids, fifth.token_ids, fifth.weight_versions) == ([1, 2], [10, 11], [3, 3])
    assert (fifth.rollout_logprobs, fifth.train_logprobs) == ([-1.0, -1.0], [-0.5, -1.0])
    assert fifth.advantage == 0.0 and math.isnan(records[5].train_logprobs[1])
    assert [record.text for record in shown(records)] == ["text 0", "text 2", "text 4"]
    assert rollout_records(RolloutBatch(batch), logprobs) == [], "of examples there is nothing to keep"


def test_answers_that_were_scored_ahead_are_kept_token_by_token(trajectories: list[Trajectory]) -> None:
    batch = batch_from_trajectories(trajectories[:2], 1.0)
    versions = torch.where(batch.loss_mask, 4, 0)
    scored = torch.where(batch.loss_mask, -1.5, math.nan)
    first, second = scored_records(ScoredBatch(batch, versions, 4, scored))
    assert (first.token_ids, first.sampled) == ([1, 2, 10, 11, 12], [2, 3, 4])
    assert (second.train_logprobs, second.rollout_logprobs) == ([-1.5] * 5, [-1.0] * 5)
    assert second.weight_versions == [4] * 5
    assert scored_records(None) == []

"""What a step does with its batch, on a real model in this process: which passes, on which rows, at which weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.rl.algorithms.base import Needs, Outcomes
from fp8rl.rl.algorithms.parts.loss import Surrogate
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.rl.loop import rollout_records, scored_records
from fp8rl.rl.record.rollouts import shown
from fp8rl.rl.run.batching import RolloutBatch, batch_from_trajectories, rollout_metrics
from fp8rl.rl.run.feed.judging import JudgedAnswer
from fp8rl.rl.run.step import explained_variance, plan_updates
from fp8rl.rollout.types import Problem, Trajectory
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import NonFiniteLossError, TokenBatch
from tests.support.batches import random_batch
from tests.support.dry_run import dry_run
from tests.support.experiments import algorithm
from tests.support.local_group import LocalGroup
from tests.support.models import write_model

GROUPS = torch.tensor([4, 4, 9, 1, 9, 1, 4, 7])
"""Of eight answers, out of order and of unequal sizes."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "moe")


def sampled(group: Any) -> tuple[TokenBatch, Outcomes]:
    """Answers whose rollout log-probabilities are the trainer's, as in exact mode."""
    batch = random_batch(rows=8, longest=40)
    rollout = group.score(batch)
    group.calls.clear()
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5, 1.0])
    return batch.with_fields(rollout_logprobs=rollout), Outcomes(rewards, GROUPS, torch.ones(8, dtype=torch.bool))


def step(group: Any, chosen: PolicyGradient, batch: TokenBatch, outcomes: Outcomes) -> dict[str, float]:
    plan = plan_updates(group, batch, outcomes, chosen)
    first = plan.forward_backward(group, 0)
    metrics, error = plan.update_all(group, first, step=1)
    assert error is None
    return metrics


@pytest.mark.slow
def test_one_update_is_one_pass_over_the_whole_batch_bit_for_bit(path: Path, layout: Layout) -> None:
    group, plain = LocalGroup(path, layout), LocalGroup(path, layout)
    batch, outcomes = sampled(group)
    metrics = step(group, algorithm("grpo"), batch, outcomes)
    assert group.calls == [("pass", "policy"), ("update", "policy")], "nothing else is scored"
    given = batch.with_fields(advantages=algorithm("grpo").advantages(outcomes, batch))
    done = plain.roles.policy.train_step(given, algorithm("grpo").objective(given)).result
    assert (metrics["train/loss"], metrics["train/grad_norm"]) == (done.loss, done.grad_norm)
    ours, theirs = group.parameters(), plain.parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_two_updates_are_two_passes_with_the_old_logprobs_of_the_first_weights(path: Path, layout: Layout) -> None:
    epochs = 2
    group, plain = LocalGroup(path, layout), LocalGroup(path, layout)
    batch, outcomes = sampled(group)
    chosen = algorithm("grpo", updates_per_batch=2, epochs=epochs, clip_low=1e-3, clip_high=1e-3)
    metrics = step(group, chosen, batch, outcomes)

    advantages, old = chosen.advantages(outcomes, batch), batch.fields["rollout_logprobs"]
    whole = batch.with_fields(advantages=advantages, old_logprobs=old)
    results = []
    for rows in [[0, 1, 2, 4, 6], [3, 5, 7]] * epochs:  # the groups 4 and 9, then 1 and 7
        part = whole.select(rows)
        results.append(plain.roles.policy.train_step(part, chosen.objective(part)).result)
    ours, theirs = group.parameters(), plain.parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert group.weight_version == 2 * epochs
    assert metrics["train/loss"] == pytest.approx(sum(result.loss for result in results) / len(results), rel=1e-12)
    clipped = [result.metrics["train/clip_fraction"] for result in results]
    assert clipped[0] == 0 and clipped[1] > 0, "the second update finds another policy than has sampled"
    assert metrics["train/clip_fraction"] == pytest.approx(sum(clipped) / len(clipped))


def test_more_updates_than_groups_and_groups_without_a_token_make_fewer(path, layout, monkeypatch) -> None:
    group = LocalGroup(path, layout)
    batch, outcomes = sampled(group)
    batch.loss_mask[7] = False  # all of group 7
    monkeypatch.setattr(PolicyGradient, "needs", Needs())  # a user's class may forget what several updates need
    plan = plan_updates(group, batch, outcomes, algorithm("grpo", updates_per_batch=9))
    assert plan.parts == [[0, 1, 6], [2, 4], [3, 5]] and "old_logprobs" in plan.batch.fields


def test_a_fault_in_a_later_update_names_its_rows_and_leaves_the_earlier_ones(path: Path, layout: Layout) -> None:
    group = LocalGroup(path, layout)
    batch, outcomes = sampled(group)
    plan = plan_updates(group, batch, outcomes, algorithm("grpo", updates_per_batch=2))
    first = plan.forward_backward(group, 0)
    plan.batch.fields["old_logprobs"][5] = torch.nan
    metrics, error = plan.update_all(group, first, step=1)
    assert isinstance(error, NonFiniteLossError) and 5 in error.rows and set(error.rows) <= {3, 5, 7}
    assert group.weight_version == 1 and metrics["train/loss"] == first.loss


class Own(PolicyGradient):
    """A loss that the length of a row weighs, advantages with a metric, and a reference without a coefficient."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, reference=True)

    def token_advantages(self, outcomes: Outcomes, batch: TokenBatch) -> Any:
        spread = outcomes.rewards.max() - outcomes.rewards.min()
        return outcomes.rewards[:, None] * batch.loss_mask.float(), {"train/spread": spread, "train/loss": 9.0}

    def surrogate(
        self, logprobs: Tensor, old: Tensor, advantages: Tensor, used: Tensor, batch: TokenBatch
    ) -> Surrogate:
        given = super().surrogate(logprobs, old, advantages, used, batch)
        return replace(given, losses=given.losses * batch.lengths[:, None])


@pytest.mark.slow
def test_an_algorithm_of_ones_own_sees_the_batch_and_adds_metrics(path: Path, layout: Layout) -> None:
    group, chosen = LocalGroup(path, layout, reference=True), Own(name="own.py:Own")
    dry_run(chosen, 2)
    batch, outcomes = sampled(group)
    metrics = step(group, chosen, batch, outcomes)
    weighed = outcomes.rewards * batch.lengths * batch.loss_mask.sum(1)
    assert metrics["train/loss"] == pytest.approx(-float(weighed.sum() / batch.loss_mask.sum()), rel=1e-5)
    assert metrics["train/spread"] == 1.0 and metrics["train/kl"] == 0.0
    assert step(group, chosen, batch, outcomes)["train/kl"] > 0


@pytest.mark.slow
def test_a_reference_is_the_start_of_the_run_in_the_same_forward(path: Path, layout: Layout) -> None:
    group = LocalGroup(path, layout, reference=True)
    batch, outcomes = sampled(group)
    chosen = algorithm("grpo", kl={"loss": {"coefficient": 0.1}})
    first = step(group, chosen, batch, outcomes)
    assert first["train/kl"] == 0.0, "exactly: the policy is its reference"
    assert group.calls[0] == ("score", "reference")
    second = step(group, chosen, batch, outcomes)
    assert second["train/kl"] > 0 and group.weight_version == 2
    assert torch.equal(group.score(batch, "reference"), batch.fields["rollout_logprobs"])


@pytest.mark.slow
def test_a_critic_learns_beside_the_policy_and_alone_while_it_warms_up(path: Path, layout: Layout) -> None:
    from fp8rl.trainer.config import TrainerSection

    critic = TrainerSection(lr=2e-3, warmup_steps=0, micro_batch_tokens=256)
    group = LocalGroup(path, layout, critic=critic)
    batch, outcomes = sampled(group)
    chosen = algorithm("ppo", critic_warmup=1, updates_per_batch=2)
    before = group.parameters()
    metrics = step(group, chosen, batch, outcomes)
    assert group.weight_version == 0 and "train/lr" not in metrics and metrics["critic/lr"] == 2e-3
    assert all(torch.equal(value, before[name]) for name, value in group.parameters().items())
    assert group.calls.count(("update", "critic")) == 2 and ("score", "critic") in group.calls
    assert metrics["critic/explained_variance"] == 0.0, "a head of zeros knows nothing"
    losses = [metrics["critic/loss"]]
    for _ in range(7):
        plan = plan_updates(group, batch, outcomes, chosen)
        losses.append(plan.update_all(group, plan.forward_backward(group, 0), step=1)[0]["critic/loss"])
    assert losses[-1] < losses[0] / 4
    plan = plan_updates(group, batch, outcomes, chosen)
    metrics, _ = plan.update_all(group, plan.forward_backward(group, 0), step=2)
    assert group.weight_version == 2 and metrics["train/lr"] == 1e-3
    assert metrics["critic/explained_variance"] > 0.5


def test_a_score_that_is_not_finite_is_a_fault_of_its_rows(path: Path, layout: Layout) -> None:
    group = LocalGroup(path, layout, reference=True)
    batch, outcomes = sampled(group)
    with torch.no_grad():
        group.roles.models["reference"].model.output_layer.weight[:] = torch.nan
    with pytest.raises(NonFiniteLossError, match="reference_logprobs: found values that are not finite in rows"):
        plan_updates(group, batch, outcomes, algorithm("grpo", kl={"loss": {"coefficient": 0.1}}))


def test_explained_variance_worked_by_hand() -> None:
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0]).double()
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 0.3).double(), returns) == 0.0
    assert explained_variance(torch.tensor([0.0, 0.5, 0.0, 0.5]).double(), returns) == 0.75
    assert explained_variance(torch.zeros(4).double(), torch.ones(4).double()) == 0.0


def trajectory(group: int, tokens: int, *, finished: bool = True, version: int = 4) -> Trajectory:
    ids, logprobs = list(range(10, 10 + tokens)), [-1.0] * tokens
    return Trajectory([1, 2], ids, logprobs, finished, [version] * tokens, group, group)


@pytest.fixture
def trajectories() -> list[Trajectory]:
    """Three groups of two."""
    lengths = [3, 5, 4, 4, 2, 6]
    return [trajectory(row // 2, n, finished=row != 5, version=3 if row == 4 else 4) for row, n in enumerate(lengths)]


@pytest.fixture
def batch(trajectories: list[Trajectory]) -> TokenBatch:
    batch = batch_from_trajectories(trajectories, 1.0)
    return batch.with_fields(advantages=torch.zeros(batch.tokens.shape))


def test_rollout_metrics_against_hand_counts(trajectories: list[Trajectory]) -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    metrics = rollout_metrics(trajectories, rewards, torch.tensor([t.group for t in trajectories]), version=4)
    expected = {"reward_mean": 0.5, "reward_std": 0.5, "equal_reward_groups": 2 / 3, "finished_fraction": 5 / 6}
    expected |= {"response_tokens_mean": 4.0, "response_tokens_max": 6.0, "tokens": 24.0, "trajectories": 6.0}
    expected |= {"staleness_max": 1.0, "tokens_age_0": 22.0, "tokens_age_1": 2.0}
    assert metrics == pytest.approx({f"rollout/{name}": value for name, value in expected.items()})


def test_records_keep_a_trajectory_with_both_logprobs(trajectories: list[Trajectory], batch: TokenBatch) -> None:
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

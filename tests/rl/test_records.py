import pytest
import torch
from torch import Tensor

from rl.batching import batch_from_trajectories
from rl.records import rollout_metrics, samples_to_show, throughput, train_metrics
from rollout.tasks import Problem
from rollout.types import Prompt, Trajectory
from trainer.batch import TokenBatch
from trainer.result import PassResult


def trajectory(group: int, tokens: int, *, finished: bool = True, version: int = 4) -> Trajectory:
    return Trajectory(
        prompt_ids=[1, 2],
        token_ids=list(range(10, 10 + tokens)),
        logprobs=[-1.0] * tokens,
        finished=finished,
        weight_versions=[version] * tokens,
        group=group,
    )


@pytest.fixture
def trajectories() -> list[Trajectory]:
    """Three groups of two."""
    lengths = [3, 5, 4, 4, 2, 6]
    return [trajectory(row // 2, n, finished=row != 5, version=3 if row == 4 else 4) for row, n in enumerate(lengths)]


@pytest.fixture
def batch(trajectories: list[Trajectory]) -> TokenBatch:
    return batch_from_trajectories(trajectories, torch.zeros(6), 1.0)


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
    }


def test_train_metrics_count_the_target_tokens(batch: TokenBatch) -> None:
    assert train_metrics(result(torch.zeros(6, 8)), batch) == {
        "train/loss": 0.25,
        "train/grad_norm": 2.0,
        "train/tokens": 24.0,
        "train/entropy": 0.5,
    }


def test_throughput_counts_prompts_for_training_and_answers_for_sampling(batch: TokenBatch) -> None:
    metrics = {"perf/train_seconds": 2.0, "perf/rollout_seconds": 4.0, "rollout/tokens": 24.0}
    assert throughput(metrics, batch) == {
        "perf/train_tokens_per_second": (24 + 6 * 2) / 2.0,
        "perf/rollout_tokens_per_second": 6.0,
    }
    assert list(throughput({"perf/train_seconds": 2.0}, batch)) == ["perf/train_tokens_per_second"]


def test_samples_show_one_answer_of_each_group_with_its_own_difference(
    trajectories: list[Trajectory], batch: TokenBatch
) -> None:
    prompts = [Prompt(Problem(f"question {group}", "#### 1"), [1, 2]) for group in range(3)]
    texts = [f"text {row}" for row in range(6)]
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    logprobs = batch.fields["rollout_logprobs"].clone()
    logprobs[4, 2] += 0.5  # one of the two tokens of row 4
    samples = samples_to_show(prompts, trajectories, texts, rewards, logprobs, batch)
    assert [(s.prompt, s.text, s.reward, s.abs_diff_mean) for s in samples] == [
        ("question 0", "text 0", 1.0, 0.0),
        ("question 1", "text 2", 0.0, 0.0),
        ("question 2", "text 4", 1.0, 0.25),
    ]

"""The batch of a step with the answers in it, and the metrics of these answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.mismatch.logprobs import tokens_by_age
from fp8rl.rl.record.metrics import OUTCOMES, REWARD_PARTS
from fp8rl.rl.run.feed.judging import JudgedAnswer
from fp8rl.rollout.types import Trajectory
from fp8rl.trainer.step.batch import TokenBatch


@dataclass(frozen=True)
class RolloutBatch:
    """A batch of sampled answers or of examples. A step trains on the batch, or only scores it."""

    batch: TokenBatch
    versions: Tensor | None = None
    """int64 [B, S], the weight version that sampled each token; None where nothing was sampled."""
    outcomes: Outcomes | None = None
    """Rewards of the rows, for the advantages; None if the batch is only scored, or has examples."""
    answers: tuple[JudgedAnswer, ...] = ()
    """The answers by row of the batch; empty if the batch is only scored, or has examples."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`rollout/...`."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], rewards: Tensor, groups: Tensor, version: int
) -> dict[str, float]:
    """`rollout/...` of a step. rewards, groups: [N], one per trajectory; version: the trainer's while sampling."""
    lengths = [len(t.logprobs) for t in trajectories]
    by_group: dict[int, list[float]] = {}
    for group, reward in zip(groups.tolist(), rewards.tolist(), strict=True):
        by_group.setdefault(group, []).append(reward)
    equal = sum(all(reward == of_group[0] for reward in of_group) for of_group in by_group.values())
    versions = torch.tensor([v for t in trajectories for v in t.weight_versions] or [version])
    return {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std(correction=0).item(),
        "rollout/equal_reward_groups": equal / len(by_group),
        "rollout/finished_fraction": sum(t.finished for t in trajectories) / len(trajectories),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/trajectories": float(len(trajectories)),
        "rollout/staleness_max": float(version - int(versions.min())),
        **{f"rollout/tokens_age_{age}": float(count) for age, count in tokens_by_age(versions, version).items()},
    }


def reward_metrics(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
    """Return the mean of each part of the reward over the answers that have it, if there are several parts."""
    means = _means(REWARD_PARTS, (answer.parts for answer in answers))
    return means if len(means) > 1 else {}


def _means(prefix: str, numbers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the mappings that have it."""
    found: dict[str, list[float]] = {}
    for name, value in (item for each in numbers for item in each.items()):
        found.setdefault(name, []).append(value)
    return {f"{prefix}{name}": sum(values) / len(values) for name, values in found.items()}


def conversation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the `rollout/...` metrics of environments; a mean is over the answers that have the number."""
    told = [sum(end - begin for begin, end in trajectory.environment_spans) for trajectory in trajectories]
    return {
        "rollout/turns_mean": sum(len(each.environment_spans) + 1 for each in trajectories) / len(trajectories),
        "rollout/environment_tokens_mean": sum(told) / len(told),
        "rollout/branches": float(sum(trajectory.branch > 0 for trajectory in trajectories)),
        **_means(OUTCOMES, (trajectory.outcome for trajectory in trajectories)),
    }


def dropped_metrics(groups: Sequence[Sequence[JudgedAnswer]]) -> dict[str, float]:
    """Return the `rollout/dropped_...` metrics of the groups that the algorithm did not keep."""
    lengths = [len(answer.trajectory.logprobs) for group in groups for answer in group]
    rewards = [answer.reward for group in groups for answer in group]
    metrics = {"rollout/dropped_groups": float(len(groups))}
    if lengths:
        metrics["rollout/dropped_tokens_mean"] = sum(lengths) / len(lengths)
        metrics["rollout/dropped_reward_mean"] = sum(rewards) / len(rewards)
    return metrics


def teacher_logprobs(scored: Sequence[JudgedAnswer], batch: TokenBatch) -> Tensor:
    """float32 [B, S]: the teacher's log-probability of each target token, 0 elsewhere. scored: the answers by row.

    Raises ValueError: a row was not scored.
    """
    found = torch.zeros(batch.tokens.shape)
    for row, each in enumerate(scored):
        if each.teacher_logprobs is None:
            raise ValueError(f"row {row}: found no log-probabilities of the teacher, expected one for each token")
        begin = len(each.trajectory.prompt_ids)
        found[row, begin : begin + len(each.teacher_logprobs)] = torch.tensor(each.teacher_logprobs)
    return torch.where(batch.loss_mask, found, 0.0)

"""Turns a step's answers into the trainer's padded batch, and measures the answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fp8rl.numerics.sampling import EVERY_TOKEN, GREEDY, Truncation
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.mismatch.logprobs import tokens_by_age
from fp8rl.rl.record.metrics import OUTCOMES, REWARD_PARTS
from fp8rl.rl.run.feed.judging import JudgedAnswer
from fp8rl.rollout.types import Trajectory
from fp8rl.trainer.step.batch import LIKELY_IDS, LIKELY_LOGPROBS, UNKNOWN, TokenBatch
from fp8rl.trainer.step.kept_tokens import KeptTokenPool


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


def batch_from_trajectories(
    trajectories: Sequence[Trajectory],
    temperature: float,
    *,
    replay: bool = False,
    redraws: int = 0,
    truncation: Truncation = EVERY_TOKEN,
) -> TokenBatch:
    """Make a batch with a row per trajectory: prompt, then answer. Targets are the tokens that the model sampled. The
    batch has the engine's routes if it reported them.

    The field `rollout_logprobs` is the engine's logprob of each target as received (NaN and inf included), 0 elsewhere.
    If the engine reported its likeliest tokens, there are `LIKELY_IDS` and `LIKELY_LOGPROBS`, too.

    trajectories: one without sampled tokens gives a row without targets. temperature, replay, truncation: as in
    `TokenBatch`. redraws: number of rows, spread over the batch, whose tokens the trainer is to draw again.

    Raises ValueError: numbers of logprobs, routes or supports do not fit the tokens, or a prompt is empty.
    """
    batch = TokenBatch.of([t.prompt_ids for t in trajectories], [t.token_ids for t in trajectories], temperature)
    for row, trajectory in enumerate(trajectories):
        answer = batch.loss_mask[row, len(trajectory.prompt_ids) :]
        for begin, end in trajectory.environment_spans:  # nothing is learnt from an environment's words
            answer[begin:end] = False
        if (found := len(trajectory.logprobs)) != (sampled := int(answer.sum())):
            raise ValueError(f"trajectory {row}: found {found} logprobs, expected {sampled}, one per sampled token")
    rollout_logprobs = torch.zeros(batch.tokens.shape)
    # Row-major, so the mask lists each row's sampled tokens in order, row after row.
    rollout_logprobs[batch.loss_mask] = torch.tensor([x for t in trajectories for x in t.logprobs], dtype=torch.float32)
    seeds, count = torch.full((batch.rows,), GREEDY), min(redraws, batch.rows)
    for row in (index * batch.rows // count for index in range(count)):
        seeds[row] = trajectories[row].seed
    return replace(
        batch,
        fields={"rollout_logprobs": rollout_logprobs, **_likeliest(trajectories, batch)},
        routes=_routes(trajectories, batch),
        replay=replay,
        seeds=seeds if redraws else None,
        truncation=truncation,
        supports=_supports(trajectories, batch),
    )


def token_versions(trajectories: Sequence[Trajectory], mask: Tensor) -> Tensor:
    """int64 [B, S], the weight version that sampled each token, 0 elsewhere. mask: the batch's `loss_mask`."""
    versions = torch.zeros(mask.shape, dtype=torch.int64)
    versions[mask] = torch.tensor([v for t in trajectories for v in t.weight_versions], dtype=torch.int64)
    return versions


def _routes(trajectories: Sequence[Trajectory], batch: TokenBatch) -> Tensor | None:
    """int16 [B, S, L, K], -1 for last tokens and padding; None if no trajectory has routes."""
    reported = [t.routed_experts for t in trajectories if t.routed_experts is not None]
    if not reported:
        return None
    routes = torch.full((*batch.tokens.shape, *reported[0].shape[1:]), UNKNOWN, dtype=torch.int16)
    for row, (trajectory, length) in enumerate(zip(trajectories, batch.lengths.tolist())):
        experts = trajectory.routed_experts
        if experts is None or len(experts) != length - 1:
            found = "no routes" if experts is None else f"routes of {len(experts)} tokens"
            raise ValueError(f"trajectory {row}: found {found}, expected routes of {length - 1} tokens")
        routes[row, : length - 1] = experts
    return routes


def _supports(trajectories: Sequence[Trajectory], batch: TokenBatch) -> KeptTokenPool | None:
    """Return the tokens that each sampled token was drawn from, for rows that have them; None if no trajectory has."""
    reported = [t.supports for t in trajectories if t.supports is not None]
    if not reported or reported[0].logprobs is not None:
        return None
    for row, t in enumerate(trajectories):
        if t.supports is not None and len(t.supports.counts) != len(t.logprobs):
            found, expected = len(t.supports.counts), len(t.logprobs)
            raise ValueError(f"trajectory {row}: found {found} supports, expected {expected}, one per sampled token")
    has = torch.tensor([t.supports is not None for t in trajectories])
    counts, ids = torch.cat([each.counts for each in reported]), torch.cat([each.ids for each in reported])
    return KeptTokenPool.of(batch.loss_mask & has[:, None], counts, ids)


def _likeliest(trajectories: Sequence[Trajectory], batch: TokenBatch) -> dict[str, Tensor]:
    """Return the fields of the likeliest tokens, if reported: float32 [B, S, k], 0 where nothing was sampled."""
    reported = [t.supports for t in trajectories if t.supports is not None and t.supports.logprobs is not None]
    if not reported:
        return {}
    counts, targets = torch.cat([each.counts for each in reported]), int(batch.loss_mask.sum())
    if len(counts) != targets or bool((counts != counts[0]).any()):
        raise ValueError(f"likeliest: found lists for {len(counts)} tokens, expected {targets} lists of equal length")
    ids, logprobs = (torch.zeros(*batch.tokens.shape, int(counts[0])) for _ in range(2))
    ids[batch.loss_mask] = torch.cat([each.ids for each in reported]).float().view(targets, -1)
    logprobs[batch.loss_mask] = torch.cat([each.logprobs for each in reported if each.logprobs is not None]).view(
        targets, -1
    )
    return {LIKELY_IDS: ids, LIKELY_LOGPROBS: logprobs}


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
    """float32 [B, S]: the teacher's log-probability of each target token, 0 elsewhere. scored: the answers by row."""
    found = torch.zeros(batch.tokens.shape)
    for row, each in enumerate(scored):
        begin, end = len(each.trajectory.prompt_ids), int(batch.lengths[row])
        found[row, begin:end] = torch.tensor(each.teacher_logprobs)
    return torch.where(batch.loss_mask, found, 0.0)

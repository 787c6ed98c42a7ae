"""What a step leaves behind: its metrics, and a few of its rollouts to look at."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rl.mismatch import row_abs_diff_means
from rl.tracking import RolloutSample
from rollout.types import Prompt, Trajectory
from trainer.batch import TokenBatch
from trainer.result import PassResult

_SAMPLES = 8


def rollout_metrics(
    trajectories: Sequence[Trajectory], rewards: Tensor, groups: Tensor, version: int
) -> dict[str, float]:
    """`rollout/...` of a step. rewards, groups: [N], one per trajectory; version: the trainer's while sampling."""
    lengths = [len(t.token_ids) for t in trajectories]
    by_group = [rewards[groups == group] for group in groups.unique()]
    oldest = min((v for t in trajectories for v in t.weight_versions), default=version)
    return {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std(correction=0).item(),
        "rollout/equal_reward_groups": sum(bool((g == g[0]).all()) for g in by_group) / len(by_group),
        "rollout/finished_fraction": sum(t.finished for t in trajectories) / len(trajectories),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/tokens": float(sum(lengths)),
        "rollout/trajectories": float(len(trajectories)),
        "rollout/staleness_max": float(version - oldest),
    }


def train_metrics(result: PassResult, batch: TokenBatch) -> dict[str, float]:
    """`train/...` of a pass."""
    return {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/tokens": float(batch.loss_mask.sum()),
        **result.metrics,
    }


def throughput(metrics: dict[str, float], batch: TokenBatch) -> dict[str, float]:
    """Tokens per second of the phases that `metrics` has the seconds of."""
    rates = {"perf/train_tokens_per_second": float(batch.lengths.sum()) / metrics["perf/train_seconds"]}
    if "perf/rollout_seconds" in metrics:
        rates["perf/rollout_tokens_per_second"] = metrics["rollout/tokens"] / metrics["perf/rollout_seconds"]
    return rates


def samples_to_show(
    prompts: Sequence[Prompt],
    trajectories: Sequence[Trajectory],
    texts: Sequence[str],
    rewards: Tensor,
    train_logprobs: Tensor,
    batch: TokenBatch,
) -> list[RolloutSample]:
    """One trajectory of each of the first groups, with its agreement."""
    stride = max(1, len(trajectories) // len(prompts))
    rows = range(0, len(trajectories), stride)[:_SAMPLES]
    chosen = list(rows)
    differences = row_abs_diff_means(
        train_logprobs[chosen], batch.fields["rollout_logprobs"][chosen], batch.loss_mask[chosen]
    )
    return [
        RolloutSample(prompts[trajectories[row].group].problem.question, texts[row], rewards[row].item(), difference)
        for row, difference in zip(chosen, differences, strict=True)
    ]

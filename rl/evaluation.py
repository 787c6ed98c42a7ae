"""Held-out problems answered greedily."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.batching import batch_from_trajectories
from rl.guard.evidence import Evidence
from rl.mismatch import token_versions
from rl.sampling import sample
from rl.stack import Stack
from rollout.tasks import verify
from rollout.types import Prompt


def evaluate(stack: Stack, prompts: Sequence[Prompt], *, tis_cap: float | None = None) -> dict[str, float]:
    """Accuracy with greedy decoding at the current weights, as `eval/...` metrics.

    tis_cap: also score the answers with the trainer and add the `mismatch/...` metrics over them, with this C of the
        clip fractions. The engine reports the logprobs of greedy answers at temperature 1.
    """
    if stack.pool is None or not prompts:
        return {}
    answers = sample(stack, list(prompts), 1, stack.sampling(0.0))
    rewards = [
        verify(prompt.problem, stack.text(answer), answer.finished, stack.spec.data.reward)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    metrics = {"eval/accuracy": sum(rewards) / len(rewards), "eval/problems": float(len(rewards))}
    if tis_cap is not None:
        batch = batch_from_trajectories(
            answers, torch.zeros(len(answers)), 1.0, replay=stack.standing.replays(stack.numerics)
        )
        scored, versions = stack.trainer.score_routed(batch), token_versions(answers, batch.loss_mask)
        evidence = Evidence(batch, versions, stack.trainer.weight_version, scored.logprobs, scored.routes)
        metrics |= evidence.metrics(tis_cap)
    return metrics

"""Held-out problems answered greedily."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.batching import batch_from_trajectories
from rl.mismatch import agreement
from rl.sampling import sample
from rl.stack import Stack
from rollout.tasks import verify
from rollout.types import Prompt


def evaluate(stack: Stack, prompts: Sequence[Prompt], *, compare: bool = False) -> dict[str, float]:
    """Accuracy with greedy decoding at the current weights, as `eval/...` metrics.

    compare: also score the answers with the trainer and add the `mismatch/...` metrics over them. The engine reports
    the logprobs of greedy answers at temperature 1.
    """
    if stack.pool is None or not prompts:
        return {}
    answers = sample(stack, list(prompts), 1, stack.sampling(0.0))
    rewards = [
        verify(prompt.problem, stack.text(answer), answer.finished, stack.spec.data.reward)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    metrics = {"eval/accuracy": sum(rewards) / len(rewards), "eval/problems": float(len(rewards))}
    if compare:
        batch = batch_from_trajectories(answers, torch.zeros(len(answers)), 1.0)
        metrics |= agreement(stack.trainer.score(batch), batch.fields["rollout_logprobs"], batch.loss_mask)
    return metrics

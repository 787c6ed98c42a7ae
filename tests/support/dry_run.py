"""A step of an algorithm on made-up answers."""

import torch
from torch import Tensor

from fp8rl.rl.algorithms.base import AlgorithmConfig, Outcomes
from fp8rl.trainer.step.batch import LIKELY_LOGPROBS, OWN_LIKELY, TokenBatch

LENGTHS = (4, 8, 8, 1, 3, 6)
"""Tokens of the answers."""
CUT = 8
"""The length from which on an answer counts as cut by the limit."""
REWARDS = ((1.0, 0.0, 0.5, 1.0, 0.0, 0.0), (0.0,) * 6, (1.0,) * 6)
"""Those of the answers, of a step each."""
_PROMPT = 2


def dry_run(algorithm: AlgorithmConfig, group_size: int) -> None:
    """Take a step for each of `REWARDS`: compute the training fields, and the loss of each update with its gradient.
    All that must be finite is, and has the shape that is expected."""
    groups = torch.arange(len(LENGTHS)) // group_size
    finished = torch.tensor(LENGTHS) < CUT
    for rewards in REWARDS if algorithm.samples else REWARDS[:1]:
        batch, logprobs = _scored(algorithm)
        if algorithm.samples:
            outcomes = Outcomes(torch.tensor(rewards), groups, finished)
            batch = batch.with_fields(**algorithm.training_fields(outcomes, batch))
            _check("advantages", batch.fields["advantages"], batch.tokens.shape)
            _check("metrics", torch.tensor([*outcomes.metrics.values()]))
        for rows in algorithm.mini_batches(groups):
            part = batch.select(rows)
            scores = logprobs[rows, : part.width].clone().requires_grad_()
            output = algorithm.objective(part)(scores, torch.ones_like(scores), part)
            output.loss.backward()
            _check("the gradient of the loss", torch.zeros_like(scores) if scores.grad is None else scores.grad)
            for name, value in {"the loss": output.loss, **output.metrics}.items():
                _check(name, value, torch.Size())
            if algorithm.needs.critic:
                critic = algorithm.critic_objective(part)(scores.detach(), torch.ones_like(scores), part)
                _check("the critic's loss", critic.loss, torch.Size())


def _scored(algorithm: AlgorithmConfig) -> tuple[TokenBatch, Tensor]:
    """The answers with the fields that the algorithm needs and no others, and the policy's log-probabilities."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    position = torch.arange(_PROMPT + max(LENGTHS))
    mask = (position >= _PROMPT) & (position < _PROMPT + lengths[:, None])
    logprobs = -torch.rand(mask.shape, generator=draw)
    needs = algorithm.needs
    given = {"rollout_logprobs": algorithm.samples, "old_logprobs": needs.old_logprobs, "values": needs.critic}
    given |= {"reference_logprobs": needs.reference, "teacher_logprobs": needs.teacher}
    fields = {name: logprobs + 0.3 * torch.randn(mask.shape, generator=draw) for name, each in given.items() if each}
    if algorithm.likeliest:
        scores = torch.randn(2, *mask.shape, 2 * algorithm.likeliest, generator=draw).log_softmax(-1)
        fields[LIKELY_LOGPROBS], fields[OWN_LIKELY] = scores[..., : algorithm.likeliest]
    return TokenBatch(torch.ones(mask.shape, dtype=torch.int64), lengths + _PROMPT, mask, 1.0, fields), logprobs


def _check(name: str, values: Tensor, shape: torch.Size | None = None) -> None:
    assert shape is None or values.shape == shape, name
    assert values.isfinite().all(), f"{name}: {values}"

"""On-policy distillation against loops in float64 and numbers worked by hand; what all algorithms share is beside."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.experiments import algorithm

OUTCOMES = Outcomes(torch.tensor([1.0, 0.0]), torch.tensor([4, 4]), torch.tensor([True, False]))
"""Two answers to one prompt; the length has cut the second."""


opd = partial(algorithm, "opd", 3)


def batch() -> TokenBatch:
    """One prompt token; an answer of two tokens and one of three, of which the engine lost a log-probability."""
    mask = torch.tensor([[False, True, True, False], [False, True, True, True]])
    rollout = torch.tensor([[0.0, -1.0, -0.5, 0.0], [0.0, -2.0, math.nan, -0.25]])
    teacher = torch.tensor([[0.0, -0.25, -1.5, 0.0], [0.0, -2.0, -3.0, -0.75]])
    fields = {"rollout_logprobs": rollout, "teacher_logprobs": teacher}
    return TokenBatch(torch.ones(2, 4, dtype=torch.int64), torch.tensor([3, 4]), mask, 1.0, fields)


def test_a_token_that_the_teacher_finds_likelier_than_the_policy_did_is_encouraged() -> None:
    advantages = opd(teacher_weight=2.0).advantages(OUTCOMES, batch())
    assert advantages.tolist() == [[0.0, 1.5, -2.0, 0.0], [0.0, 0.0, 0.0, -1.0]]


def test_a_reward_is_added_by_its_weight() -> None:
    """Of two answers with rewards 1 and 0 the standard deviation is sqrt(1/2)."""
    scale = 0.5 / (math.sqrt(0.5) + 1e-6)
    found = opd(reward_weight=0.5).advantages(OUTCOMES, batch())
    teacher, half = torch.tensor([[0.0, 0.75, -1.0, 0.0], [0.0, 0.0, 0.0, -0.5]]), 0.5 * scale
    rewards = torch.tensor([[0.0, half, half, 0.0], [0.0, -half, -half, -half]])
    assert torch.allclose(found, teacher + rewards, atol=1e-6)


SIX = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
"""Logits of a sampler, a teacher and a policy over a vocabulary of six."""


@pytest.mark.parametrize("ratio", ["bypass", "recompute"])
@pytest.mark.parametrize("step", [0.0, 0.05], ids=["fresh", "older"])
def test_the_gradient_is_that_of_the_divergence_from_the_teacher(ratio: str, step: float) -> None:
    """Over all tokens of a softmax, weighted by how often they are sampled: the estimate's mean is d KL / d logits."""
    sampler, teacher = SIX[0].log_softmax(0), SIX[1].log_softmax(0)
    logits = (SIX[0] + step * SIX[2]).requires_grad_()
    policy = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    found = torch.zeros_like(logits)
    for token, probability in enumerate(sampler.exp()):
        row = torch.stack([torch.zeros(()), policy[token].float()])[None]
        said = {"rollout_logprobs": sampler, "teacher_logprobs": teacher}
        fields = {name: torch.tensor([[0.0, float(x[token])]]) for name, x in said.items()}
        mask = torch.tensor([[False, True]])
        one = TokenBatch(torch.ones(1, 2, dtype=torch.int64), torch.tensor([2]), mask, 1.0, fields)
        outcome = Outcomes(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
        one = one.with_fields(**opd().training_fields(outcome, one))
        loss = opd(ratio=ratio).objective(one)(row, torch.zeros(1, 2), one).loss
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += probability * gradient
    assert torch.allclose(found, expected, atol=1e-6)


def test_on_fresh_tokens_the_loss_is_that_of_the_engine_s_logprobs_bit_for_bit() -> None:
    given = batch()
    given = given.with_fields(**opd(teacher_weight=0.3).training_fields(OUTCOMES, given))
    logprobs = given.fields["rollout_logprobs"].nan_to_num().requires_grad_()
    found = opd(teacher_weight=0.3).objective(given)
    losses = [each(logprobs, torch.zeros(2, 4), given).loss for each in (found, found.policy)]
    assert torch.equal(*losses) and torch.equal(*(torch.autograd.grad(loss, logprobs)[0] for loss in losses))


def test_the_distance_to_the_teacher_is_the_mean_over_the_used_tokens() -> None:
    given = batch().with_fields(advantages=torch.zeros(2, 4))
    logprobs = torch.tensor([[9.0, -1.0, -0.5, 9.0], [9.0, -1.75, -1.0, -0.25]])
    found = opd().objective(given)(logprobs, torch.zeros(2, 4), given).metrics["train/teacher_kl"]
    assert found.item() == pytest.approx((-0.75 + 1.0 + 0.25 + 0.5) / 4)


def make_batch() -> TokenBatch:
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)
    return TokenBatch(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]]), torch.tensor([4, 3]), mask)


def test_loss_entropy_and_gradient_by_hand_whatever_stands_outside_the_mask() -> None:
    # Targets have logprobs -1, -2 and -6: the mean negative log-likelihood is 9 / 3 = 3. Entropies 1, 2, 3: mean 2.
    nan = math.nan
    logprobs = torch.tensor([[nan, nan, -1, -2], [nan, -6, nan, -math.inf]], requires_grad=True)
    entropy = torch.tensor([[7.0, 7, 1, 2], [7, 3, 7, 7]])
    output = SftObjective.of(make_batch())(logprobs, entropy, make_batch())
    output.loss.backward()
    assert output.loss.item() == 3.0 and output.metrics["train/entropy"].item() == 2.0
    third = pytest.approx(-1 / 3)
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[0, 0, third, third], [0, third, 0, 0]]


def test_micro_batches_add_up_with_the_global_denominator() -> None:
    batch = make_batch()
    logprobs = torch.tensor([[-9.0, -9, -1, -2], [-9, -6, -9, -9]])
    objective = SftObjective.of(batch)
    parts = []
    for row in range(2):
        part = batch.select([row])
        parts.append(objective(logprobs[row : row + 1, : part.width], torch.zeros(1, part.width), part).loss.item())
    assert parts == [1.0, 2.0]  # (1 + 2) / 3 and 6 / 3, not each row's own mean

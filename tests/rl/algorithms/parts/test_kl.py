"""KL to a reference: gradients against the divergence itself, prices against loops over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fp8rl.rl.algorithms import ALGORITHMS, Algorithm
from fp8rl.rl.algorithms.base import Needs, Outcomes
from fp8rl.rl.algorithms.parts.surrogates import k2, k3
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.step.batch import TokenBatch

VOCABULARY = 7


def algorithm(name: str, *, loss: float = 0.0, reward: float = 0.0, estimator: str = "k2", **settings: Any) -> Any:
    kl = {"loss": {"coefficient": loss, "estimator": estimator}, "reward": {"coefficient": reward}}
    found = TypeAdapter(Algorithm).validate_python({"name": name, "kl": kl, **settings})
    return found.resolved(RolloutSection(max_new_tokens=20))


def softmaxes(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy, log-probabilities of what has sampled and of a reference: float64 over one vocabulary."""
    noise = torch.Generator().manual_seed(seed)
    policy, sampler, reference = torch.randn(3, VOCABULARY, dtype=torch.float64, generator=noise)
    return policy.requires_grad_(), sampler.log_softmax(-1), reference.log_softmax(-1)


def every_token(old: torch.Tensor, reference: torch.Tensor) -> TokenBatch:
    """A row for each token of the vocabulary, of one prompt token and itself, without an advantage."""
    tokens = torch.stack([torch.zeros(VOCABULARY, dtype=torch.int64), torch.arange(VOCABULARY)], dim=1)
    mask = torch.tensor([False, True]).expand(VOCABULARY, 2).clone()

    def field(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros(VOCABULARY), values.detach().float()], dim=1)

    fields = {"old_logprobs": field(old), "rollout_logprobs": field(old), "reference_logprobs": field(reference)}
    return TokenBatch(tokens, torch.full((VOCABULARY,), 2), mask, 1.0, fields | {"advantages": torch.zeros(mask.shape)})


def expected_gradient(chosen: Any, policy: torch.Tensor, old: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss in the mean over what the sampler may sample, by the logits of the policy."""
    batch = every_token(old, reference)
    logprobs = torch.nn.functional.pad(policy.log_softmax(-1).float()[:, None], (1, 0)).requires_grad_()
    total = torch.zeros(VOCABULARY, dtype=torch.float64)
    for row in range(VOCABULARY):
        one = batch.select([row])
        loss = chosen.objective(one)(logprobs[row : row + 1], torch.zeros(1, 2), one).loss
        (grad,) = torch.autograd.grad(loss, policy, retain_graph=True)
        total += old[row].exp() * grad
    return total.detach()


def gradient_of_the_kl(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    logps = policy.log_softmax(-1)
    (grad,) = torch.autograd.grad((logps.exp() * (logps - reference)).sum(), policy)
    return grad


@pytest.mark.parametrize("on_policy", [True, False])
def test_k2_in_the_loss_has_the_gradient_of_the_kl_and_k3_has_not(on_policy: bool) -> None:
    policy, sampler, reference = softmaxes()
    old = policy.detach().log_softmax(-1) if on_policy else sampler
    expected = 0.5 * gradient_of_the_kl(policy, reference)
    found = {
        name: expected_gradient(algorithm("grpo", loss=0.5, estimator=name), policy, old, reference)
        for name in ("k2", "k3")
    }
    assert torch.allclose(found["k2"], expected, rtol=1e-4, atol=1e-6)
    assert (found["k3"] - expected).abs().max() > 0.05


def test_the_mean_of_the_gradient_of_k1_is_zero_and_k3_has_the_value_of_the_kl() -> None:
    policy, _, reference = softmaxes(1)
    logps = policy.log_softmax(-1)
    x = logps - reference
    probabilities = logps.detach().exp()
    (of_k1,) = torch.autograd.grad((probabilities * x).sum(), policy, retain_graph=True)
    assert of_k1.abs().max() < 1e-12
    divergence = (probabilities * x).sum().item()
    assert (probabilities * k3(x)).sum().item() == pytest.approx(divergence, rel=1e-12)
    assert k2(torch.tensor(0.5)).item() == 0.125 and k3(torch.tensor(0.5)).item() == pytest.approx(math.exp(-0.5) - 0.5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_term_is_weighed_and_rejected_like_the_surrogate(estimator: str) -> None:
    policy, sampler, reference = softmaxes(2)
    batch = every_token(sampler, reference)
    batch.fields["rollout_logprobs"][:, 1] -= math.log(1.5)  # the trainer gave 1.5 times as much as the engine
    logprobs = torch.nn.functional.pad(policy.detach().log_softmax(-1).float()[:, None], (1, 0))
    x = (policy.detach().log_softmax(-1) - reference).double()
    value = x.square() / 2 if estimator == "k2" else (-x).exp() - 1 + x
    expected = (0.01 * (policy.detach().log_softmax(-1) - sampler).exp() * value * 1.5).mean().item()
    chosen = algorithm("grpo", loss=0.01, estimator=estimator)
    output = chosen.objective(batch)(logprobs, torch.zeros_like(logprobs), batch)
    assert output.loss.item() == pytest.approx(expected, rel=1e-4)
    assert output.metrics["train/kl"].item() == pytest.approx(((-x).exp() - 1 + x).mean().item(), rel=1e-4)
    rejecting = algorithm("grpo", loss=0.01, rejection={"name": "icepop", "high": 1.4})
    assert rejecting.objective(batch)(logprobs, torch.zeros_like(logprobs), batch).loss == 0


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_policy_that_is_its_reference_pays_nothing_bit_for_bit(estimator: str) -> None:
    policy, _, _ = softmaxes(3)
    same = policy.detach().log_softmax(-1)
    batch = every_token(same, same)
    batch.fields["advantages"][:, 1] = torch.linspace(-1, 1, VOCABULARY)
    logprobs = batch.fields["old_logprobs"].clone().requires_grad_()
    losses = [
        chosen.objective(batch)(logprobs, torch.zeros_like(logprobs), batch).loss
        for chosen in (algorithm("grpo"), algorithm("grpo", loss=0.3, estimator=estimator))
    ]
    grads = [torch.autograd.grad(loss, logprobs)[0] for loss in losses]
    assert torch.equal(losses[0], losses[1]) and torch.equal(grads[0], grads[1])


def spans() -> tuple[TokenBatch, Outcomes]:
    """Two answers, the first with a tool's tokens in its midst."""
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0]]).bool()
    noise = torch.Generator().manual_seed(4)
    fields = {
        name: -torch.rand(mask.shape, generator=noise)
        for name in ("old_logprobs", "rollout_logprobs", "reference_logprobs")
    }
    batch = TokenBatch(torch.ones(2, 8, dtype=torch.int64), torch.tensor([8, 4]), mask, 1.0, fields)
    return batch, Outcomes(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([True, True]))


@pytest.mark.parametrize("ratio", ["recompute", "bypass"])
@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_each_token_pays_for_its_distance_in_the_reward(name: str, ratio: str) -> None:
    batch, outcomes = spans()
    chosen = algorithm(name, reward=0.1, ratio=ratio, whiten_advantages=False)
    found = chosen.advantages(outcomes, batch)
    old = batch.fields["old_logprobs" if ratio == "recompute" else "rollout_logprobs"]
    assert chosen.needs == Needs(old_logprobs=ratio == "recompute", reference=True)
    for row, start in ((0, 1.0), (1, 0.0)):
        used = [t for t in range(8) if batch.loss_mask[row, t]]
        price = [0.1 * float(old[row, t] - batch.fields["reference_logprobs"][row, t]) for t in used]
        baseline = 0.5 if name == "reinforce++-baseline" else 0.0
        for place, t in enumerate(used):
            paid = sum(price[place:]) if name == "reinforce++" else price[place]
            assert found[row, t].item() == pytest.approx(start - baseline - paid, abs=1e-6)
    assert (found[~batch.loss_mask] == 0).all()


def test_a_reference_is_asked_for_only_where_a_coefficient_is_not_zero() -> None:
    assert algorithm("grpo").needs == Needs()
    assert algorithm("grpo", loss=0.01).needs == Needs(reference=True)
    assert algorithm("grpo", loss=0.01, updates_per_batch=2).needs == Needs(old_logprobs=True, reference=True)
    assert algorithm("ppo", reward=0.01).needs == Needs(old_logprobs=True, reference=True, critic=True)


def test_what_teaches_nothing_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ValidationError, match="found k1, expected k2 or k3: as a loss, k1 has a gradient whose mean is"
    ):
        algorithm("grpo", loss=0.1, estimator="k1")
    with_rewards = {"reinforce++", "reinforce++-baseline", "ppo"}
    for name, kind in ALGORITHMS.items():
        if not issubclass(kind, PolicyGradient):
            continue
        if name in with_rewards:
            assert algorithm(name, reward=0.1).kl.needs_reference
        else:
            with pytest.raises(ValidationError, match="expected 0: it compares whole answers, and has no rewards per"):
                algorithm(name, reward=0.1)


def test_k3_as_a_loss_is_remarked_on() -> None:
    assert any("k2 has" in remark for remark in algorithm("grpo", loss=0.01, estimator="k3").remarks())

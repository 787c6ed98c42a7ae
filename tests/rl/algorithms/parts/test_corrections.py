import math
from typing import Any

import pytest
import torch
import yaml

from fp8rl.rl.algorithms.base import Needs, Outcomes
from fp8rl.rl.algorithms.parts.corrections import Correction
from fp8rl.rl.algorithms.parts.penalties import k3
from fp8rl.rl.experiment.validation import parse_experiment
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.experiments import algorithm, experiment

LN2 = math.log(2.0)


def correct(correction: Correction, d: list[list[float]], used: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """Weights and kept tokens for rollout logprobs of 0."""
    old = torch.tensor(d, dtype=torch.float64)
    weights, kept = correction(old, torch.zeros_like(old), torch.tensor(used).bool())
    return weights.tolist(), kept.tolist()


# rho of the first row: 2, 1/4, 4; their product 2, their geometric mean 2^(1/3). The second row: rho 8, unused, unused.
DIFFERENCES = [[LN2, -2 * LN2, 2 * LN2], [3 * LN2, 99.0, math.nan]]
USED = [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("correction", "weights", "kept"),
    [
        (Correction(), [[1, 1, 1], [1, 1, 1]], USED),
        (Correction(tis_cap=3.0), [[2, 0.25, 3], [3, 1, 1]], USED),
        (Correction(tis_cap=3.0, level="sequence"), [[2, 2, 2], [3, 1, 1]], USED),
        (Correction(rejection="icepop", low=0.3, high=5.0), [[2, 0.25, 4], [8, 1, 1]], [[1, 0, 1], [0, 0, 0]]),
        (Correction(3.0, rejection="icepop", low=0.2, high=5.0), [[2, 0.25, 3], [3, 1, 1]], [[1, 1, 1], [0, 0, 0]]),
        (Correction(rejection="mis", high=2.5), [[2, 2, 2], [8, 1, 1]], [[1, 1, 1], [0, 0, 0]]),
        (Correction(1.5, rejection="mis", high=1.9), [[1.5] * 3, [1.5, 1, 1]], [[0, 0, 0], [0, 0, 0]]),
        (Correction(rejection="geometric", low=0.7, high=3.0), [[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [0, 0, 0]]),
        (Correction(3.0, rejection="geometric", low=0.7, high=1.2), [[2, 0.25, 3], [3, 1, 1]], [[0] * 3, [0] * 3]),
        (Correction(3.0, "sequence", "geometric", 0.7, 9.0), [[2, 2, 2], [3, 1, 1]], USED),
    ],
)
def test_weights_and_rejection_by_hand(correction: Correction, weights: list[Any], kept: list[Any]) -> None:
    found_weights, found_kept = correct(correction, DIFFERENCES, USED)
    assert torch.allclose(torch.tensor(found_weights), torch.tensor(weights, dtype=torch.float32))
    assert found_kept == [[bool(x) for x in row] for row in kept]


def test_a_bound_itself_is_accepted() -> None:
    below, above = math.log(math.nextafter(0.5, 0) - 1e-15), math.log(2.0 + 1e-14)
    kept = correct(Correction(rejection="icepop", low=0.5, high=2.0), [[-LN2, LN2, below, above, 0.0]], [[1] * 5])[1]
    assert kept == [[True, True, False, False, True]]


def test_long_sequences_are_cut_to_exponents_of_twenty() -> None:
    weights, kept = correct(Correction(rejection="mis", high=2.0), [[3.0] * 500, [-3.0] * 500], [[1] * 500] * 2)
    assert weights[0][0] == pytest.approx(math.exp(20)) and weights[1][0] == pytest.approx(math.exp(-20))
    assert not any(kept[0]) and all(kept[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rejection", ["icepop", "geometric", "mis"])
def test_a_trainer_logprob_that_is_not_finite_is_not_swept_away(rejection: Any, bad: float) -> None:
    old = torch.tensor([[bad, -0.1], [-0.1, -0.1]])
    correction = Correction(2.0, rejection=rejection, low=0.9, high=1.1)
    weights, kept = correction(old, torch.full((2, 2), -0.1), torch.ones(2, 2, dtype=torch.bool))
    assert math.isnan(weights[0, 0])
    assert kept.tolist() == [[True, True], [True, True]]
    assert weights[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("rejection", "low", "high"),
    [
        ({"name": "mis"}, None, 2.0),
        ({"name": "icepop", "low": None, "high": 3.0}, 0.5, 3.0),
        ({"name": "geometric", "low": 0.0}, 0.0, 1.01),
    ],
)
def test_bounds_that_are_not_given_are_filled_in(rejection: dict[str, Any], low: float | None, high: float) -> None:
    spec = experiment(algorithm={"name": "grpo", "rejection": rejection})
    assert (spec.algorithm.rejection.low, spec.algorithm.rejection.high) == (low, high)
    resolved = yaml.safe_load(spec.to_yaml())
    assert resolved["algorithm"]["rejection"] == {"name": rejection["name"], "low": low, "high": high}
    assert parse_experiment(resolved) == spec
    tis_cap = 2.0 if rejection["name"] == "geometric" else None
    assert spec.algorithm.correction == Correction(tis_cap, "token", rejection["name"], low or 0.0, high)


VOCABULARY = 7


def with_kl(coefficient: float, estimator: str = "k2", **settings: Any) -> Any:
    """GRPO with a KL term in its loss."""
    return algorithm("grpo", kl={"loss": {"coefficient": coefficient, "estimator": estimator}}, **settings)


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
    chosen = {name: with_kl(0.5, name) for name in ("k2", "k3")}
    found = {name: expected_gradient(each, policy, old, reference) for name, each in chosen.items()}
    assert torch.allclose(found["k2"], expected, rtol=1e-4, atol=1e-6)
    assert (found["k3"] - expected).abs().max() > 0.05


def test_k3_has_the_value_of_the_kl() -> None:
    policy, _, reference = softmaxes(1)
    logps = policy.detach().log_softmax(-1)
    divergence = (logps.exp() * (logps - reference)).sum().item()
    assert (logps.exp() * k3(logps - reference)).sum().item() == pytest.approx(divergence, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_term_is_weighed_and_rejected_like_the_surrogate(estimator: str) -> None:
    policy, sampler, reference = softmaxes(2)
    batch = every_token(sampler, reference)
    batch.fields["rollout_logprobs"][:, 1] -= math.log(1.5)  # the trainer gave 1.5 times as much as the engine
    logprobs = torch.nn.functional.pad(policy.detach().log_softmax(-1).float()[:, None], (1, 0))
    x = (policy.detach().log_softmax(-1) - reference).double()
    value = x.square() / 2 if estimator == "k2" else (-x).exp() - 1 + x
    expected = (0.01 * (policy.detach().log_softmax(-1) - sampler).exp() * value * 1.5).mean().item()
    chosen = with_kl(0.01, estimator)
    output = chosen.objective(batch)(logprobs, torch.zeros_like(logprobs), batch)
    assert output.loss.item() == pytest.approx(expected, rel=1e-4)
    assert output.metrics["train/kl"].item() == pytest.approx(((-x).exp() - 1 + x).mean().item(), rel=1e-4)
    rejecting = with_kl(0.01, rejection={"name": "icepop", "high": 1.4})
    assert rejecting.objective(batch)(logprobs, torch.zeros_like(logprobs), batch).loss == 0


@pytest.mark.parametrize("ratio", ["recompute", "bypass"])
@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_each_token_s_reward_has_its_kl_penalty(name: str, ratio: str) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0]]).bool()  # a tool's tokens in the midst
    sources = ("old_logprobs", "rollout_logprobs", "reference_logprobs")
    fields = dict(zip(sources, -torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(4))))
    batch = TokenBatch(torch.ones(2, 8, dtype=torch.int64), torch.tensor([8, 4]), mask, 1.0, fields)
    outcomes = Outcomes(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([True, True]))
    chosen = algorithm(name, kl={"reward": {"coefficient": 0.1}}, ratio=ratio, whiten_advantages=False)
    found = chosen.advantages(outcomes, batch)
    old = batch.fields["old_logprobs" if ratio == "recompute" else "rollout_logprobs"]
    assert chosen.needs == Needs(old_logprobs=ratio == "recompute", reference=True)
    for row, start in ((0, 1.0), (1, 0.0)):
        used = [t for t in range(8) if batch.loss_mask[row, t]]
        penalty = [0.1 * float(old[row, t] - batch.fields["reference_logprobs"][row, t]) for t in used]
        baseline = 0.5 if name == "reinforce++-baseline" else 0.0
        for place, t in enumerate(used):
            lost = sum(penalty[place:]) if name == "reinforce++" else penalty[place]
            assert found[row, t].item() == pytest.approx(start - baseline - lost, abs=1e-6)
    assert (found[~batch.loss_mask] == 0).all()

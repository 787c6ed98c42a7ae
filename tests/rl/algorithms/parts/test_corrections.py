import itertools
import math
from typing import Any

import pytest
import torch
import yaml
from pydantic import TypeAdapter, ValidationError

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.algorithms import ALGORITHMS, Algorithm
from fp8rl.rl.algorithms.base import Needs, Outcomes
from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rl.algorithms.parts.corrections import Correction
from fp8rl.rl.algorithms.parts.penalties import k2, k3
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment.experiment import Experiment
from fp8rl.rl.experiment.validation import parse_experiment
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.objective import Objective

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
        (Correction(rejection="geometric", low=0.7, high=1.3), [[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [0, 0, 0]]),
        (Correction(3.0, rejection="geometric", low=0.7, high=1.2), [[2, 0.25, 3], [3, 1, 1]], [[0] * 3, [0] * 3]),
        (Correction(3.0, "sequence", "geometric", 0.7, 9.0), [[2, 2, 2], [3, 1, 1]], USED),
    ],
)
def test_weights_and_rejection_by_hand(correction: Correction, weights: list[Any], kept: list[Any]) -> None:
    found_weights, found_kept = correct(correction, DIFFERENCES, USED)
    assert torch.allclose(torch.tensor(found_weights), torch.tensor(weights, dtype=torch.float32))
    assert found_kept == [[bool(x) for x in row] for row in kept]


def test_a_bound_itself_is_accepted() -> None:
    correction = Correction(rejection="icepop", low=0.5, high=2.0)
    below, above = math.log(math.nextafter(0.5, 0) - 1e-15), math.log(2.0 + 1e-14)
    assert correct(correction, [[-LN2, LN2, below, above, 0.0]], [[1] * 5])[1] == [[True, True, False, False, True]]


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


def make_batch(seed: int) -> tuple[TokenBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (9,), generator=generator)
    width = int(lengths.max())
    mask = (torch.arange(width) >= 2) & (torch.arange(width) < lengths[:, None])
    mask[6] = False
    old = -torch.rand(9, width, generator=generator) * 4
    rollout = old + 0.6 * torch.randn(9, width, generator=generator)
    rollout[:3] = old[:3] + 0.02 * torch.randn(3, width, generator=generator)
    rollout[4, 2] = math.nan
    advantages = torch.randn(9, 1, generator=generator).expand(9, width).contiguous()
    fields = {"advantages": advantages, "old_logprobs": old, "rollout_logprobs": rollout}
    batch = TokenBatch(torch.ones(9, width, dtype=torch.int64), lengths, mask, 1.0, fields)
    return batch, old + 0.3 * torch.randn(9, width, generator=generator)


def oracle(batch: TokenBatch, logprobs: torch.Tensor, settings: Grpo) -> tuple[float, float, float, float]:
    """Loss, rejected fractions of tokens and sequences, and mean weight; row by row in float64, from the formulas."""
    rejection, tis_cap = settings.rejection, settings.tis_cap
    row_losses, rejected_tokens, rejected_rows, weights = [], 0, 0, []
    for row in range(batch.rows):
        tokens = []
        for t in range(batch.width):
            new, old, rollout, advantage = (
                float(x[row, t])
                for x in (logprobs, *(batch.fields[n] for n in ("old_logprobs", "rollout_logprobs", "advantages")))
            )
            if batch.loss_mask[row, t] and math.isfinite(rollout):
                tokens.append((math.exp(new - old), old - rollout, advantage))
        if not tokens:
            continue
        total = math.fsum(d for _, d, _ in tokens)
        losses = []
        for ratio, d, advantage in tokens:
            rho = math.exp(d)
            weight = math.exp(total) if settings.tis_level == "sequence" else rho
            accepted = True
            if rejection is not None and rejection.name == "icepop":
                accepted = rejection.low <= rho <= rejection.high
            elif rejection is not None and rejection.name == "geometric":
                accepted = rejection.low <= math.exp(total / len(tokens)) <= rejection.high
            elif rejection is not None:
                weight, accepted = math.exp(total), math.exp(total) <= rejection.high
            if tis_cap is not None:
                weight = min(weight, tis_cap)
            elif rejection is None or rejection.name == "geometric":
                weight = 1.0
            surrogate = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28))
            losses.append(surrogate * weight if accepted else 0.0)
            weights.append(weight if accepted else 0.0)
            rejected_tokens += not accepted
        rejected_rows += not any(weights[-len(losses) :])
        row_losses.append(losses)
    count = sum(map(len, row_losses))
    if settings.loss_aggregation == "seq_mean_token_mean":
        loss = math.fsum(math.fsum(losses) / len(losses) for losses in row_losses) / len(row_losses)
    else:
        loss = math.fsum(x for losses in row_losses for x in losses) / count
    return loss, rejected_tokens / count, rejected_rows / len(row_losses), math.fsum(weights) / count


CHOICES: list[dict[str, Any]] = [
    {"tis_level": "sequence"},
    {"rejection": {"name": "icepop"}},
    {"rejection": {"name": "icepop", "low": 0.8, "high": 1.2}, "tis_cap": None},
    {"rejection": {"name": "geometric"}},
    {"rejection": {"name": "geometric", "low": 0.9, "high": 1.3}, "tis_cap": None},
    {"rejection": {"name": "geometric", "low": 0.7, "high": 1.4}, "tis_level": "sequence", "tis_cap": 1.5},
    {"rejection": {"name": "mis"}},
    {"rejection": {"name": "mis", "high": 4.0}, "tis_cap": None},
]


def settings(choice: dict[str, Any], aggregation: str) -> Grpo:
    return Grpo.model_validate({"tis_cap": 2.0, **choice, "loss_aggregation": aggregation})


def run(objective: Objective, batch: TokenBatch, logprobs: torch.Tensor) -> tuple[float, dict[str, float], Any]:
    logprobs = logprobs.clone().requires_grad_()
    output = objective(logprobs, torch.full_like(logprobs, 0.5).detach(), batch)
    output.loss.backward()
    return output.loss.item(), {name: value.item() for name, value in output.metrics.items()}, logprobs.grad


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_objective_against_a_float64_oracle_with_the_denominators_of_the_whole_batch(
    choice: dict[str, Any], aggregation: str
) -> None:
    algorithm = settings(choice, aggregation)
    rejections = []
    for seed in range(4):
        batch, logprobs = make_batch(seed)
        loss, metrics, _ = run(algorithm.objective(batch), batch, logprobs)
        expected, tokens, sequences, weight = oracle(batch, logprobs, algorithm)
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        if algorithm.rejection is None:
            assert "train/rejected_tokens" not in metrics and "train/rejected_sequences" not in metrics
        else:
            rejections.append(metrics["train/rejected_tokens"])
            assert metrics["train/rejected_tokens"] == pytest.approx(tokens, abs=1e-6)
            assert metrics["train/rejected_sequences"] == pytest.approx(sequences, abs=1e-6)
        if "train/tis_weight_mean" in metrics:
            assert metrics["train/tis_weight_mean"] == pytest.approx(weight, rel=1e-5)
    assert algorithm.rejection is None or 0.0 < sum(rejections) < len(rejections), "some tokens, and not all"


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_micro_batches_add_up(choice: dict[str, Any], aggregation: str) -> None:
    batch, logprobs = make_batch(7)
    objective = settings(choice, aggregation).objective(batch)
    whole_loss, whole_metrics, whole_grad = run(objective, batch, logprobs)
    for split in ([[8, 0], [3, 4, 5, 1], [2, 6, 7]], [[row] for row in range(9)]):
        loss, metrics, grad = 0.0, dict.fromkeys(whole_metrics, 0.0), torch.zeros_like(logprobs)
        for rows in split:
            part = batch.select(rows)
            part_loss, part_metrics, part_grad = run(objective, part, logprobs[rows, : part.width])
            loss += part_loss
            metrics = {name: metrics[name] + part_metrics[name] for name in metrics}
            grad[rows, : part.width] += part_grad
        assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-7)
        assert metrics == pytest.approx(whole_metrics, rel=1e-5)
        assert torch.allclose(grad, whole_grad, rtol=1e-5, atol=1e-8)


def test_rejection_leaves_the_weight_of_the_other_tokens_as_it_was() -> None:
    # The second row's ratio is far outside; the first row's gradient is the same with and without the rejection.
    fields = {
        "advantages": torch.tensor([[0.0, 1.0, 1.0], [0.0, 2.0, 2.0]]),
        "rollout_logprobs": torch.tensor([[0.0, -1.0, -1.0], [0.0, -5.0, -5.0]]),
    }
    mask = torch.tensor([[False, True, True], [False, True, True]])
    batch = TokenBatch(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 3]), mask, 1.0, fields)
    logprobs = torch.tensor([[0.0, -1.0, -1.0], [0.0, -1.0, -1.0]])
    for name, aggregation in itertools.product(("icepop", "geometric", "mis"), ("token_mean", "seq_mean_token_mean")):
        kept, rejecting = settings({}, aggregation), settings({"rejection": {"name": name}}, aggregation)
        _, _, free = run(kept.objective(batch), batch, logprobs)
        loss, metrics, grad = run(rejecting.objective(batch), batch, logprobs)
        assert torch.equal(grad[0], free[0]) and bool((free[1, 1:] != 0).all()) and bool((grad[1] == 0).all())
        assert loss == pytest.approx(-0.5)  # -1 on two of four tokens, or on one of two sequences
        assert metrics["train/rejected_tokens"] == metrics["train/rejected_sequences"] == 0.5
        assert metrics["train/tis_weight_mean"] == 0.5


def test_a_batch_that_is_rejected_whole_has_no_loss_and_no_gradient() -> None:
    batch, logprobs = make_batch(1)
    strict = settings({"rejection": {"name": "icepop", "low": 1 - 1e-12, "high": 1 + 1e-12}}, "token_mean")
    loss, metrics, grad = run(strict.objective(batch), batch, logprobs)
    assert loss == 0.0 and not grad.any()
    assert metrics["train/rejected_tokens"] == pytest.approx(1.0)
    assert metrics["train/rejected_sequences"] == pytest.approx(1.0)


def test_a_nan_of_the_trainer_reaches_the_loss_through_every_rejection() -> None:
    for choice in CHOICES:
        batch, logprobs = make_batch(2)
        del batch.fields["old_logprobs"]
        logprobs[0, 2] = math.nan
        loss, _, _ = run(settings(choice, "token_mean").objective(batch), batch, logprobs)
        assert math.isnan(loss), choice


def parsed(algorithm: dict[str, Any]) -> Experiment:
    return parse_experiment(
        {"model": {"path": "/m"}, "data": {"train": "/t", "eval": "/e"}, "algorithm": {"name": "grpo", **algorithm}}
    )


@pytest.mark.parametrize(
    ("rejection", "low", "high"),
    [
        ({"name": "icepop"}, 0.5, 5.0),
        ({"name": "geometric"}, 0.99, 1.01),
        ({"name": "mis"}, None, 2.0),
        ({"name": "icepop", "low": None, "high": 3.0}, 0.5, 3.0),
        ({"name": "geometric", "low": 0.0}, 0.0, 1.01),
    ],
)
def test_bounds_that_are_not_given_are_filled_in_and_kept_with_the_run(
    rejection: dict[str, Any], low: float | None, high: float
) -> None:
    spec = parsed({"rejection": rejection})
    assert (spec.algorithm.rejection.low, spec.algorithm.rejection.high) == (low, high)
    resolved = yaml.safe_load(spec.to_yaml())
    assert resolved["algorithm"]["rejection"] == {"name": rejection["name"], "low": low, "high": high}
    assert parse_experiment(resolved) == spec
    tis_cap = 2.0 if rejection["name"] == "geometric" else None
    assert spec.algorithm.correction == Correction(tis_cap, "token", rejection["name"], low, high)


def test_published_weights_are_uncapped_unless_a_cap_is_asked_for() -> None:
    """IcePop (Ring-1T) weighs by ratios of up to 5, MIS by those up to its bound."""
    for name in ("icepop", "mis"):
        rejection = {"name": name, "high": 5.0}
        assert parsed({"rejection": rejection}).algorithm.tis_cap is None
        assert parsed({"rejection": rejection, "tis_cap": 3.0}).algorithm.tis_cap == 3.0
    d = torch.tensor([[math.log(0.4), math.log(4.0), math.log(5.1)]])
    weights, kept = parsed({"rejection": {"name": "icepop"}}).algorithm.correction(d, d * 0, d < 9)
    assert weights[0, 1].item() == pytest.approx(4.0) and kept.tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (
            {"rejection": {"name": "icepop", "low": 1.5}},
            "algorithm.rejection: found low=1.5 and high=5.0, expected low < 1 <",
        ),
        (
            {"rejection": {"name": "mis", "high": 0.9}},
            "algorithm.rejection: found low=None and high=0.9, expected low < 1 <",
        ),
        ({"rejection": {"name": "mis", "low": 0.5}}, "algorithm.rejection: found low=0.5 with mis, expected none"),
        (
            {"rejection": {"name": "geometric", "low": -0.1}},
            "algorithm.rejection.low: found -0.1, expected a number greater",
        ),
        (
            {"rejection": {"name": "opsm"}},
            "algorithm.rejection.name: found 'opsm', expected 'icepop', 'geometric' or 'mis'",
        ),
        ({"rejection": {"low": 0.5}}, "algorithm.rejection.name: found nothing, expected a value"),
        ({"rejection": {"name": "mis", "hihg": 2.0}}, "Did you mean algorithm.rejection.high?"),
        ({"rejection": "icepop"}, "algorithm.rejection: found 'icepop', expected"),
        ({"rejection": {"name": "icepop"}, "tis_level": "sequence"}, "found tis_level=sequence with rejection icepop"),
        ({"tis_level": "row"}, "algorithm.tis_level: found 'row', expected 'token' or 'sequence'"),
    ],
)
def test_an_impossible_rejection_is_refused(algorithm: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as refusal:
        parsed(algorithm)
    assert expected in str(refusal.value) and len(str(refusal.value).splitlines()) == 1


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
def test_each_token_s_reward_has_its_kl_penalty(name: str, ratio: str) -> None:
    batch, outcomes = spans()
    chosen = algorithm(name, reward=0.1, ratio=ratio, whiten_advantages=False)
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


def test_k3_as_a_loss_is_noted() -> None:
    assert any("k2 has" in note for note in algorithm("grpo", loss=0.01, estimator="k3").notes())

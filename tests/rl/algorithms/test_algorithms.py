"""Every algorithm that learns from rewards against a computation in float64, token by token."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fp8rl.rl.algorithms import ALGORITHMS
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.algorithms.parts.loss import AggregationMode
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.experiments import algorithm, experiment

LEARNS_FROM_REWARDS = sorted(name for name, kind in ALGORITHMS.items() if issubclass(kind, PolicyGradient))
MODES: list[AggregationMode] = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
GROUPS = torch.tensor([7, 2, 7, 9, 2, 7, 5, 5])
"""Out of order, of unequal sizes, and one of which a single answer is left."""
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 1.0])
LENGTHS = [6, 20, 9, 17, 1, 0, 12, 18]
"""Of the answers: one is empty, one is cut by the length."""
PROMPT = 3
VALUES = torch.rand(len(LENGTHS), PROMPT + max(LENGTHS), generator=torch.Generator().manual_seed(9))
"""A critic's, where there is one."""


def outcomes() -> Outcomes:
    return Outcomes(REWARDS, GROUPS, torch.tensor([length < 20 for length in LENGTHS]))


def sampled(seed: int = 0, *, fresh: bool = False) -> tuple[TokenBatch, torch.Tensor]:
    """A batch without advantages, whose old and rollout log-probabilities lie around the logprobs."""
    noise = torch.Generator().manual_seed(seed)
    width = PROMPT + max(LENGTHS)
    mask = torch.zeros(len(LENGTHS), width, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, PROMPT : PROMPT + length] = True
    logprobs = -2.0 * torch.rand(mask.shape, generator=noise)
    old = logprobs + (0.0 if fresh else 0.3) * torch.randn(mask.shape, generator=noise)
    rollout = old + (0.0 if fresh else 0.5) * torch.randn(mask.shape, generator=noise)
    if not fresh:
        rollout[1, PROMPT + 4] = -math.inf
    lengths = torch.tensor(LENGTHS) + PROMPT
    tokens = torch.ones(mask.shape, dtype=torch.int64)
    fields = {"rollout_logprobs": rollout, "values": VALUES} | ({} if fresh else {"old_logprobs": old})
    fields["teacher_logprobs"] = -2.0 * torch.rand(mask.shape, generator=noise)
    return TokenBatch(tokens, lengths, mask, 1.0, fields), logprobs


def with_advantages(batch: TokenBatch, chosen: PolicyGradient) -> TokenBatch:
    return batch.with_fields(advantages=chosen.advantages(outcomes(), batch))


def computed(chosen: PolicyGradient, batch: TokenBatch, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logprobs.clone().requires_grad_()
    output = chosen.objective(batch)(leaf, torch.zeros_like(leaf), batch)
    output.loss.backward()
    return output.loss.detach(), leaf.grad


def expected_advantages(name: str, batch: TokenBatch) -> list[list[float]]:
    """By the published formulas, with loops: of each token of each answer."""
    if name == "ppo":
        return advantages_over_a_critic()
    if name == "opd":
        teacher, engine = (batch.fields[field].double() for field in ("teacher_logprobs", "rollout_logprobs"))
        return [(teacher - engine)[row, PROMPT : PROMPT + length].tolist() for row, length in enumerate(LENGTHS)]
    rewards, groups, lengths = REWARDS.double().numpy(), GROUPS.numpy(), np.array(LENGTHS)
    if name == "dapo":  # a fifth of 20 tokens
        rewards = rewards + np.minimum(-(lengths - 16) / 4, 0)
    answers = []
    for reward, group in zip(rewards, groups):
        peers = rewards[groups == group]
        others = (peers.sum() - reward) / max(len(peers) - 1, 1)
        std = peers.std(ddof=1) if len(peers) > 1 else 1.0
        baseline = peers.mean()
        answers.append(
            {
                "rloo": reward - others if len(peers) > 1 else 0.0,
                "maxrl": (reward - peers.mean()) / peers.mean() if peers.mean() > 0 else 0.0,
                "reinforce++": reward,
                "reinforce++-baseline": reward - baseline,
                "drgrpo": reward - baseline,
            }.get(name, (reward - baseline) / (std + 1e-6))
        )
    if name.startswith("reinforce++"):
        # The token whose rollout log-probability is not finite is not used.
        used = np.repeat(answers, lengths - (np.arange(len(lengths)) == 1))
        answers = [(value - used.mean()) / math.sqrt(used.var() + 1e-8) for value in answers]
    return [[value] * length for value, length in zip(answers, LENGTHS)]


def advantages_over_a_critic() -> list[list[float]]:
    """What came less what was expected, with gamma and lambda 1, whitened; the fifth token of row 1 is not used."""
    rows = [(REWARDS[row] - VALUES[row, PROMPT : PROMPT + length]).tolist() for row, length in enumerate(LENGTHS)]
    used = np.array([value for row, values in enumerate(rows) for i, value in enumerate(values) if (row, i) != (1, 4)])
    return [[(value - used.mean()) / math.sqrt(used.var() + 1e-8) for value in values] for values in rows]


def expected_loss(chosen: PolicyGradient, batch: TokenBatch, logprobs: torch.Tensor) -> Any:
    """The formula of the papers in float64, differentiable by autograd where they differentiate. Also the rejected
    shares of the tokens and of the sequences, and the mean weight of a token, 0 of a rejected one."""
    name, low, high, by = chosen.name, 1 - chosen.clip_low, 1 + chosen.clip_high, chosen.correction
    sequences, weights = [], []
    for row, advantages in enumerate(expected_advantages(chosen.name, batch)):
        span = range(PROMPT, PROMPT + LENGTHS[row])
        finite = [i for i in span if math.isfinite(batch.fields["rollout_logprobs"][row, i])]
        if not finite:
            continue
        new = [logprobs[row, i] for i in finite]
        source = "rollout_logprobs" if chosen.ratio == "bypass" else "old_logprobs"
        old = [batch.fields[source][row, i].double() for i in finite]
        d = [float(o - batch.fields["rollout_logprobs"][row, i].double()) for o, i in zip(old, finite)]
        token, sequence = [math.exp(x) for x in d], [math.exp(sum(d))] * len(d)
        geometric = [math.exp(sum(d) / len(d))] * len(d)
        judged = {None: [1.0] * len(d), "icepop": token, "mis": sequence, "geometric": geometric}[by.rejection]
        kept = [(by.low or 0) <= x <= (by.high or math.inf) and min(token) >= (by.veto or 0) for x in judged]
        weight = sequence if by.rejection == "mis" or by.level == "sequence" else token
        weight = [min(w, by.tis_cap or math.inf) if by.weighs else 1.0 for w in weight]
        weights.append([w * k for w, k in zip(weight, kept)])
        ratios = [(n - o).exp() for n, o in zip(new, old)]
        if name == "gspo":
            ratios = [torch.stack([n - o for n, o in zip(new, old)]).mean().exp()] * len(finite)
        losses = []
        for n, r, w, i in zip(new, ratios, weights[-1], finite):
            a = advantages[i - PROMPT]
            if name == "opd":  # at the weights of now, not at those that sampled
                a += float(batch.fields["rollout_logprobs"][row, i].double() - n.detach())
            if name == "cispo":
                losses.append(-float(r.detach().clamp(low, high)) * a * n * w)
            else:
                losses.append(-torch.minimum(r * a, r.clamp(low, high) * a) * w)
        sequences.append(losses)
    flat = [w for row in weights for w in row]
    shares = [flat.count(0.0) / len(flat), sum(not any(row) for row in weights) / len(weights), sum(flat) / len(flat)]
    return mean_of(chosen.loss_aggregation, sequences), shares


def mean_of(mode: AggregationMode, sequences: list[list[torch.Tensor]]) -> torch.Tensor:
    """The mean of an aggregation over sequences of tokens' values."""
    totals, tokens = [torch.stack(values).sum() for values in sequences], list(map(len, sequences))
    if mode == "token_mean":
        return torch.stack(totals).sum() / sum(tokens)
    divisors = {"seq_mean_token_mean": tokens, "seq_mean_token_sum": [1] * len(tokens)}.get(mode, [20] * len(tokens))
    return torch.stack([total / divisor for total, divisor in zip(totals, divisors)]).mean()


@pytest.mark.parametrize("name", LEARNS_FROM_REWARDS)
def test_advantages_are_those_of_the_formula(name: str) -> None:
    batch, _ = sampled()
    advantages = with_advantages(batch, algorithm(name)).fields["advantages"]
    for row, expected in enumerate(expected_advantages(name, batch)):
        found = advantages[row, PROMPT : PROMPT + LENGTHS[row]].tolist()
        looks_at_used = name.startswith(("reinforce++", "opd", "ppo"))
        unused = [4] if row == 1 and looks_at_used else []  # 0 there, and never looked at
        for place in range(LENGTHS[row]):
            if place not in unused:
                assert found[place] == pytest.approx(expected[place], abs=1e-6)
    assert (advantages[~batch.loss_mask] == 0).all()


@pytest.mark.parametrize("name", sorted(name for name, kind in ALGORITHMS.items() if kind.compares_in_group))
def test_an_answer_alone_is_compared_with_zero_only_if_groups_are_of_one(name: str) -> None:
    rewards, groups = torch.tensor([0.5, 0.25]), torch.tensor([3, 1])
    sized: list[Any] = [ALGORITHMS[name](name=name).resolved(RolloutSection(group_size=size)) for size in (1, 4)]
    alone, left = (chosen.trajectory_advantages(rewards, groups) for chosen in sized)
    assert torch.allclose(alone, rewards, atol=1e-6) and not left.any()


CASES: list[tuple[str, AggregationMode, dict[str, Any]]] = [
    # GSPO's gradient is the direct derivative of a sequence's ratio if its tokens weigh the same.
    *((name, mode, {"tis_cap": None} if name == "gspo" else {}) for name in LEARNS_FROM_REWARDS for mode in MODES),
    *(
        (name, mode, settings)
        for name in ("grpo", "cispo")
        for mode in MODES[:2]
        for settings in (
            {"tis_level": "sequence"},
            {"rejection": {"name": "icepop"}},
            {"rejection": {"name": "icepop", "low": 0.8, "high": 1.2}, "tis_cap": 2.0},
            {"rejection": {"name": "geometric", "low": 0.9, "high": 1.3}},
            {"rejection": {"name": "geometric", "low": 0.9, "high": 1.3}, "tis_cap": None},
            {"rejection": {"name": "geometric", "low": 0.9, "high": 1.4}, "tis_level": "sequence", "tis_cap": 1.5},
            {"rejection": {"name": "mis"}, "tis_cap": 2.0},
            {"rejection": {"name": "mis", "high": 4.0}},
            {"veto": 0.5},
            {"ratio": "bypass"},
        )
    ),
]


@pytest.mark.parametrize(("name", "mode", "settings"), CASES, ids=str)
def test_loss_and_gradient_are_those_of_the_formula(name: str, mode: AggregationMode, settings: dict[str, Any]) -> None:
    chosen = algorithm(name, loss_aggregation=mode, **settings)
    batch, logprobs = sampled(seed=1)
    batch = with_advantages(batch, chosen)
    loss, grad = computed(chosen, batch, logprobs)
    exact = logprobs.double().requires_grad_()
    expected, shares = expected_loss(chosen, batch, exact)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert torch.allclose(grad.double(), exact.grad, rtol=1e-4, atol=1e-8)
    assert grad.count_nonzero() > 5
    metrics = chosen.objective(batch)(logprobs, torch.zeros_like(logprobs), batch).metrics
    said = ("train/rejected_tokens", "train/rejected_sequences", "train/tis_weight_mean")
    asked = [chosen.correction.rejects, chosen.correction.rejects, chosen.correction.weighs]
    assert [each in metrics for each in said] == asked
    for each, share in zip(said, shares):
        assert each not in metrics or metrics[each].item() == pytest.approx(share, rel=1e-5, abs=1e-7)
    assert not chosen.correction.rejects or 0.0 < shares[0] < 1.0, "some tokens, and not all"


@pytest.mark.parametrize(("name", "mode", "settings"), CASES, ids=str)
def test_micro_batches_add_up_to_the_batch(name: str, mode: AggregationMode, settings: dict[str, Any]) -> None:
    chosen = algorithm(name, loss_aggregation=mode, **settings)
    batch, logprobs = sampled(seed=2)
    batch = with_advantages(batch, chosen)
    objective = chosen.objective(batch)
    loss, grad = computed(chosen, batch, logprobs)
    whole = objective(logprobs, torch.zeros_like(logprobs), batch).metrics
    parts, scores = [], logprobs.clone().requires_grad_()
    for rows in ([5], [0, 3, 7], [2, 1], [6, 4]):
        part = batch.select(rows)
        scored = scores[rows, : part.width]
        parts.append(objective(scored, torch.zeros_like(scored), part))
    total = torch.stack([part.loss for part in parts]).sum()
    total.backward()
    assert total.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    assert scores.grad is not None and torch.allclose(scores.grad, grad, rtol=1e-5, atol=1e-8)
    for metric, value in whole.items():
        assert sum(part.metrics[metric].item() for part in parts) == pytest.approx(value.item(), rel=1e-5, abs=1e-6)


CORRECTIONS: list[dict[str, Any]] = [
    {"tis_cap": 1.0},
    {"tis_cap": 2.0, "tis_level": "sequence"},
    {"rejection": {"name": "icepop"}},
    {"rejection": {"name": "geometric", "low": 0.9999, "high": 1.0001}},
    {"rejection": {"name": "mis"}},
    {"veto": 0.5},
    {"tis_cap": 3.0, "rejection": {"name": "icepop", "low": 0.99, "high": 1.01}, "veto": 0.9},
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda settings: "-".join(map(str, settings)))
@pytest.mark.parametrize("name", LEARNS_FROM_REWARDS)
def test_on_fresh_tokens_every_correction_is_the_identity_bit_for_bit(name: str, correction: dict[str, Any]) -> None:
    batch, logprobs = sampled(fresh=True)
    plain, corrected = algorithm(name, tis_cap=None), algorithm(name, **correction)
    assert corrected.correction.weighs and not plain.correction.weighs
    batch = with_advantages(batch, plain)
    for without, with_it in zip(computed(plain, batch, logprobs), computed(corrected, batch, logprobs)):
        assert torch.equal(without, with_it)
    logprobs[0, PROMPT + 2] = math.nan
    assert computed(corrected, batch, logprobs)[0].isnan(), "no rejection hides it"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LEARNS_FROM_REWARDS)
def test_the_entropy_bonus_is_a_mean_of_the_same_kind_as_the_loss(name: str, mode: AggregationMode) -> None:
    plain, chosen = (algorithm(name, loss_aggregation=mode, entropy=c) for c in (0.0, 0.01))
    batch, logprobs = sampled(seed=1)
    batch = with_advantages(batch, plain)
    entropy = torch.rand(logprobs.shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
    without, with_it = (each.objective(batch)(logprobs, entropy, batch) for each in (plain, chosen))
    sequences = []
    for row, length in enumerate(LENGTHS):
        used = [PROMPT + i for i in range(length) if math.isfinite(batch.fields["rollout_logprobs"][row, PROMPT + i])]
        sequences += [[entropy[row, i].double() for i in used]] if used else []
    expected = mean_of(mode, sequences)
    assert (without.loss - with_it.loss).item() == pytest.approx(0.01 * expected.item(), rel=1e-3)
    (grad,) = torch.autograd.grad(with_it.loss, entropy)
    (grad64,) = torch.autograd.grad(-0.01 * expected, entropy)
    assert torch.allclose(grad, grad64, rtol=1e-5)
    assert not without.loss.requires_grad, "without a coefficient nothing of it reaches the loss"
    assert with_it.metrics["train/entropy"] == without.metrics["train/entropy"]


def one_row(advantage: float, log_ratios: list[float]) -> tuple[TokenBatch, torch.Tensor]:
    """A row of one prompt token and targets of these log-ratios to the old ones."""
    width = 1 + len(log_ratios)
    mask = torch.ones(1, width, dtype=torch.bool)
    mask[0, 0] = False
    old = torch.full((1, width), -1.0)
    fields = {"advantages": mask * advantage, "old_logprobs": old, "rollout_logprobs": old.clone()}
    batch = TokenBatch(torch.ones(1, width, dtype=torch.int64), torch.tensor([width]), mask, 1.0, fields)
    return batch, old + torch.tensor([[0.0, *log_ratios]])


def test_a_clipped_and_weighted_loss_by_hand() -> None:
    # Ratios 1, 2 (cut to 1.28), 0.5 (kept: A > 0 is clipped above only); rho 1, 4 (cut to 2), 0.5; A = 1; of 3 tokens.
    batch, logprobs = one_row(1.0, [0.0, math.log(2.0), -math.log(2.0)])
    batch.fields["rollout_logprobs"][0, 2:] += torch.tensor([-math.log(4.0), math.log(2.0)])
    loss, grad = computed(algorithm("grpo"), batch, logprobs)
    assert loss.item() == pytest.approx(-(1 + 1.28 * 2 + 0.5 * 0.5) / 3, abs=1e-6)
    assert grad[0].tolist() == pytest.approx([0, -1 / 3, 0, -0.25 / 3], abs=1e-6)
    metrics = algorithm("grpo").objective(batch)(logprobs, torch.full_like(logprobs, 0.5), batch).metrics
    expected = {"ratio_mean": 3.5 / 3, "clip_fraction": 1 / 3, "tis_weight_mean": 3.5 / 3, "entropy": 0.5}
    assert {name: metrics[f"train/{name}"].item() for name in expected} == pytest.approx(expected, rel=1e-6)


def test_extreme_differences_stay_finite_and_nothing_outside_the_mask_matters() -> None:
    batch, logprobs = one_row(1.0, [0.0, -899.0, 0.5])
    batch.fields["rollout_logprobs"][0, 1:3] -= 899.0
    batch.fields["old_logprobs"][0, 1] = -900.0
    loss, grad = computed(algorithm("grpo"), batch, logprobs)
    assert loss.isfinite() and grad.isfinite().all()
    batch, logprobs = sampled()
    batch = with_advantages(batch, algorithm("grpo"))
    before = computed(algorithm("grpo"), batch, logprobs)
    for values in (logprobs, *batch.fields.values()):
        values[~batch.loss_mask] = math.nan
    for one, other in zip(before, computed(algorithm("grpo"), batch, logprobs)):
        assert torch.equal(one, other)


def test_on_fresh_tokens_both_sources_of_the_ratio_are_one_bit_for_bit() -> None:
    batch, logprobs = sampled(fresh=True)
    batch = with_advantages(batch.with_fields(rollout_logprobs=logprobs.clone()), algorithm("grpo"))
    sources = ("recompute", "bypass")
    first, *others = (computed(algorithm("grpo", ratio=source), batch, logprobs) for source in sources)
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other)) and first[1].any()


def test_the_ratio_of_older_tokens_is_to_the_engines_by_default() -> None:
    for staleness, settings, expected in ((0, {}, "recompute"), (1, {}, "bypass"), (2, {"veto": 0.1}, "recompute")):
        chosen = ALGORITHMS["grpo"](name="grpo", **settings).resolved(RolloutSection(staleness=staleness))
        assert chosen.ratio == expected and (chosen.correction.tis_cap is None) == (expected == "bypass")


def test_the_dual_clip_bounds_what_a_negative_advantage_can_do_and_nothing_else() -> None:
    runaway = [math.log(50.0)]
    for advantage, expected in ((-1.0, 3.0), (1.0, -1.28)):
        batch, logprobs = one_row(advantage, runaway)
        loss, grad = computed(algorithm("grpo", clip_dual=3.0), batch, logprobs)
        assert loss.item() == pytest.approx(expected) and grad.count_nonzero() == 0
    batch, logprobs = one_row(-1.0, runaway)
    loss, grad = computed(algorithm("grpo"), batch, logprobs)
    assert loss.item() == pytest.approx(50.0, rel=1e-5) and grad[0, 1].item() == pytest.approx(50.0, rel=1e-5)


@pytest.mark.parametrize(("advantage", "low", "high"), [(1.0, 0.0, 0.25), (-1.0, 0.25, 0.0)])
def test_a_clip_says_on_which_side_it_acted(advantage: float, low: float, high: float) -> None:
    batch, logprobs = one_row(advantage, [math.log(0.5), math.log(2.0), 0.0, 0.1])
    metrics = algorithm("grpo").objective(batch)(logprobs, torch.zeros_like(logprobs), batch).metrics
    assert (metrics["train/clip_fraction_low"], metrics["train/clip_fraction_high"]) == (low, high)


def test_the_length_penalty_counts_an_environment_s_tokens_as_the_limit_does() -> None:
    """Rows of 10 and 8 tokens after the prompt, of which an environment wrote none, 6 and 2; and an empty one."""
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[:, :2] = mask[1, 4:10] = mask[2, 3:5] = mask[2, 10:] = mask[3] = False
    batch = TokenBatch(torch.ones(4, 12, dtype=torch.int64), torch.tensor([12, 12, 10, 2]), mask)
    chosen = algorithm("dapo", overlong={"limit": 10, "buffer": 4})
    groups, finished = torch.zeros(4, dtype=torch.int64), torch.tensor([False, False, True, True])
    shaped = chosen.shaped(Outcomes(torch.zeros(4), groups, finished), batch)
    assert shaped.rewards.tolist() == [-1.0, -1.0, -0.5, 0.0]


@pytest.mark.parametrize("left_out", [{"veto": 1e-4}, {"overlong": {"filter": True, "penalty": 0.0}}], ids=str)
@pytest.mark.parametrize("name", LEARNS_FROM_REWARDS)
def test_what_is_not_trained_on_has_no_gradient_from_kl_and_entropy_either(name: str, left_out: dict[str, Any]) -> None:
    """Row 1 alone is cut by the length, and has the token that the trainer would hardly have sampled."""
    batch, logprobs = sampled(fresh=True)
    batch.fields["rollout_logprobs"][1, PROMPT + 2] -= math.log(1e-5)
    batch = batch.with_fields(old_logprobs=logprobs.clone(), reference_logprobs=logprobs - 0.5)
    terms = {"entropy": 0.01, "kl": {"loss": {"coefficient": 0.1}}, "tis_cap": None}
    gradients = []
    for chosen in (algorithm(name, **terms), algorithm(name, **terms, **left_out)):
        given = batch.with_fields(**chosen.training_fields(outcomes(), batch))
        scores, entropy = logprobs.clone().requires_grad_(), torch.ones_like(logprobs).requires_grad_()
        chosen.objective(given)(scores, entropy, given).loss.backward()
        assert scores.grad is not None and entropy.grad is not None
        gradients.append((scores.grad, entropy.grad))
    others = torch.arange(len(LENGTHS)) != 1
    own = batch.loss_mask[others]
    for without, with_it in zip(*gradients, strict=True):
        assert without[1].count_nonzero() == LENGTHS[1] and not with_it[1].any()
        assert bool((with_it[others][own] != 0).all())
    assert torch.equal(gradients[0][1][others], gradients[1][1][others]), "the denominators stay"


def test_maxrl_refuses_rewards_below_zero() -> None:
    batch, _ = sampled(fresh=True)
    with pytest.raises(ValueError, match=r"rewards: found -1.0, expected none below 0, as maxrl divides"):
        algorithm("maxrl").advantages(Outcomes(-REWARDS, GROUPS, outcomes().finished), batch)


@pytest.mark.parametrize("name", sorted({*LEARNS_FROM_REWARDS} - {"opd", "ppo"}))
def test_equal_rewards_give_no_gradient(name: str) -> None:
    batch, logprobs = sampled(fresh=True)
    chosen = algorithm(name, overlong=None)
    equal = Outcomes(torch.ones(len(GROUPS)), torch.zeros_like(GROUPS), outcomes().finished)
    advantages = chosen.advantages(equal, batch)
    _, grad = computed(chosen, batch.with_fields(advantages=advantages), logprobs)
    assert grad.count_nonzero() == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "grpo"}, ["clip to [0.8, 1.28]", "w = the token's ratio trainer / rollout, at most 2", "token_mean"]),
        ({"name": "reinforce++", "kl": {"reward": {"coefficient": 0.1}}}, ["R less 0.1 KL", "A whitened"]),
        ({"name": "dapo", "clip_dual": 3.0}, ["at most 3 |A| where A < 0", "length penalty"]),
        ({"name": "grpo", "rejection": {"name": "icepop"}, "veto": 1e-4}, ["outside [0.5, 5]", "below 0.0001"]),
        ({"name": "grpo", "kl": {"loss": {"coefficient": 0.01}}}, ["0.01 k2"]),
    ],
    ids=str,
)
def test_the_printed_loss_is_that_of_the_settings(settings: dict[str, Any], said: list[str]) -> None:
    line = experiment(algorithm=settings).formula
    assert "\n" not in line and not [each for each in said if each not in line]
    plain = experiment(algorithm={"name": "gspo"}).formula
    assert not [word for word in ("KL", "whiten", "rejects", "|A|", "penalty") if word in plain]

"""Every algorithm that learns from rewards against a computation in float64, token by token."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.algorithms import ALGORITHMS, Algorithm
from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.algorithms.parts.surrogates import AggregationMode
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment import parse_experiment
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.step.batch import TokenBatch

LEARNS_FROM_REWARDS = sorted(name for name, kind in ALGORITHMS.items() if issubclass(kind, PolicyGradient))
MODES: list[AggregationMode] = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
ROLLOUT = RolloutSection(max_new_tokens=20)
GROUPS = torch.tensor([7, 2, 7, 9, 2, 7, 5, 5])
"""Out of order, of unequal sizes, and one of which a single answer is left."""
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 1.0])
LENGTHS = [6, 20, 9, 17, 1, 0, 12, 18]
"""Of the answers: one is empty, one is cut by the length."""
PROMPT = 3
VALUES = torch.rand(len(LENGTHS), PROMPT + max(LENGTHS), generator=torch.Generator().manual_seed(9))
"""A critic's, where there is one."""


def algorithm(name: str, **settings: Any) -> PolicyGradient:
    found: PolicyGradient = TypeAdapter(Algorithm).validate_python({"name": name, **settings})
    return found.resolved(ROLLOUT)


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
    assert leaf.grad is not None
    return output.loss.detach(), leaf.grad


def expected_advantages(name: str, batch: TokenBatch) -> list[list[float]]:
    """By the published formulas, with loops: of each token of each answer."""
    if name == "ppo":
        return advantages_over_a_critic()
    if name == "opd":
        teacher, engine = (batch.fields[field].double() for field in ("teacher_logprobs", "rollout_logprobs"))
        return [
            [float(teacher[row, i] - engine[row, i]) for i in range(PROMPT, PROMPT + length)]
            for row, length in enumerate(LENGTHS)
        ]
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
    rows = [
        [float(reward) - float(VALUES[row, PROMPT + i]) for i in range(length)]
        for row, (reward, length) in enumerate(zip(REWARDS, LENGTHS))
    ]
    used = np.array([value for row, values in enumerate(rows) for i, value in enumerate(values) if (row, i) != (1, 4)])
    return [[(value - used.mean()) / math.sqrt(used.var() + 1e-8) for value in values] for values in rows]


def expected_loss(chosen: PolicyGradient, batch: TokenBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """The formula of the papers in float64, differentiable by autograd where they differentiate."""
    name, low, high = chosen.name, 1 - chosen.clip_low, 1 + chosen.clip_high
    sequences = []
    for row, advantages in enumerate(expected_advantages(chosen.name, batch)):
        span = range(PROMPT, PROMPT + LENGTHS[row])
        finite = [i for i in span if math.isfinite(batch.fields["rollout_logprobs"][row, i])]
        new = [logprobs[row, i] for i in finite]
        old = [batch.fields["old_logprobs"][row, i].double() for i in finite]
        rollout = [batch.fields["rollout_logprobs"][row, i].double() for i in finite]
        weights = [
            (o - engine).exp().clamp(max=2.0) if chosen.correction.tis_cap else 1.0 for o, engine in zip(old, rollout)
        ]
        ratios = [(n - o).exp() for n, o in zip(new, old)]
        if name == "gspo" and finite:
            ratios = [torch.stack([n - o for n, o in zip(new, old)]).mean().exp()] * len(finite)
        losses = []
        for n, r, w, i in zip(new, ratios, weights, finite):
            a = advantages[i - PROMPT]
            if name == "opd":  # at the weights of now, not at those that sampled
                a += float(batch.fields["rollout_logprobs"][row, i].double() - n.detach())
            if name == "cispo":
                losses.append(-float(r.detach().clamp(low, high)) * a * n * w)
            else:
                losses.append(-torch.minimum(r * a, r.clamp(low, high) * a) * w)
        if losses:
            sequences.append(losses)
    totals = [torch.stack(losses).sum() for losses in sequences]
    tokens = [len(losses) for losses in sequences]
    if chosen.loss_aggregation == "token_mean":
        return torch.stack(totals).sum() / sum(tokens)
    divisors = {
        "seq_mean_token_mean": tokens,
        "seq_mean_token_sum": [1] * len(tokens),
        "seq_mean_token_sum_norm": [20] * len(tokens),
    }[chosen.loss_aggregation]
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
    found: PolicyGradient = TypeAdapter(Algorithm).validate_python({"name": name})
    advantages = [
        found.resolved(RolloutSection(group_size=size)).trajectory_advantages(rewards, groups) for size in (1, 4)
    ]
    assert torch.allclose(advantages[0], rewards, atol=1e-6) and not advantages[1].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LEARNS_FROM_REWARDS)
def test_loss_and_gradient_are_those_of_the_formula(name: str, mode: AggregationMode) -> None:
    # GSPO's gradient is the direct derivative of a sequence's ratio if its tokens weigh the same.
    chosen = algorithm(name, loss_aggregation=mode, **({"tis_cap": None} if name == "gspo" else {}))
    batch, logprobs = sampled(seed=1)
    loss, grad = computed(chosen, with_advantages(batch, chosen), logprobs)
    exact = logprobs.double().requires_grad_()
    expected = expected_loss(chosen, batch, exact)
    expected.backward()
    assert exact.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert torch.allclose(grad.double(), exact.grad, rtol=1e-4, atol=1e-8)
    assert grad.count_nonzero() > 20


@pytest.mark.parametrize("name", LEARNS_FROM_REWARDS)
def test_micro_batches_add_up_to_the_batch(name: str) -> None:
    for mode in MODES:
        chosen = algorithm(name, loss_aggregation=mode)
        batch, logprobs = sampled(seed=2)
        batch = with_advantages(batch, chosen)
        objective = chosen.objective(batch)
        whole = objective(logprobs, torch.zeros_like(logprobs), batch)
        parts = []
        for rows in ([5], [0, 3, 7], [2, 1], [6, 4]):
            part = batch.select(rows)
            scored = logprobs[rows, : part.width]
            parts.append(objective(scored, torch.zeros_like(scored), part))
        assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-7)
        for metric, value in whole.metrics.items():
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
def test_on_fresh_tokens_with_equal_logprobs_every_correction_is_the_identity_bit_for_bit(
    name: str, correction: dict[str, Any]
) -> None:
    batch, logprobs = sampled(fresh=True)
    plain, corrected = algorithm(name, tis_cap=None), algorithm(name, **correction)
    assert corrected.correction.weighs and not plain.correction.weighs
    batch = with_advantages(batch, plain)
    for without, with_it in zip(computed(plain, batch, logprobs), computed(corrected, batch, logprobs)):
        assert torch.equal(without, with_it)


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
    sums = [torch.stack(each).sum() for each in sequences]
    expected = {
        "token_mean": torch.stack(sums).sum() / sum(map(len, sequences)),
        "seq_mean_token_mean": torch.stack([total / len(each) for total, each in zip(sums, sequences)]).mean(),
        "seq_mean_token_sum": torch.stack(sums).mean(),
        "seq_mean_token_sum_norm": torch.stack(sums).mean() / 20,
    }[mode]
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


def test_cispo_keeps_the_gradient_outside_its_clip_where_ppo_has_none() -> None:
    batch, logprobs = one_row(1.0, [math.log(8.0), 0.0])
    _, kept = computed(algorithm("cispo"), batch, logprobs)
    _, cut = computed(algorithm("grpo"), batch, logprobs)
    # The weight 8 is cut to 5; two tokens.
    assert kept[0, 1:].tolist() == pytest.approx([-2.5, -0.5])
    assert cut[0, 1:].tolist() == pytest.approx([0.0, -0.5])


def test_gspo_clips_all_tokens_of_a_sequence_at_once() -> None:
    batch, logprobs = one_row(1.0, [0.5, -0.5 + 1e-3])  # a mean of 5e-4, above 4e-4
    _, grad = computed(algorithm("gspo"), batch, logprobs)
    assert grad.count_nonzero() == 0
    inside, logprobs = one_row(1.0, [0.5, -0.5])
    _, grad = computed(algorithm("gspo"), inside, logprobs)
    assert grad[0, 1:].tolist() == pytest.approx([-0.5, -0.5])  # the ratio is 1 for both, whatever their own


def test_the_dual_clip_bounds_what_a_negative_advantage_can_do_and_nothing_else() -> None:
    runaway = [math.log(50.0)]
    for advantage, expected in ((-1.0, 3.0), (1.0, -1.28)):
        batch, logprobs = one_row(advantage, runaway)
        loss, grad = computed(algorithm("grpo", clip_dual=3.0), batch, logprobs)
        assert loss.item() == pytest.approx(expected) and grad.count_nonzero() == 0
    batch, logprobs = one_row(-1.0, runaway)
    loss, grad = computed(algorithm("grpo"), batch, logprobs)
    assert loss.item() == pytest.approx(50.0, rel=1e-5) and grad[0, 1].item() == pytest.approx(50.0, rel=1e-5)


def test_a_clip_says_on_which_side_it_acted() -> None:
    metrics = {}
    for advantage in (1.0, -1.0):
        batch, logprobs = one_row(advantage, [math.log(0.5), math.log(2.0), 0.0, 0.1])
        metrics[advantage] = algorithm("grpo").objective(batch)(logprobs, torch.zeros_like(logprobs), batch).metrics
    low, high = "train/clip_fraction_low", "train/clip_fraction_high"
    assert (metrics[1.0][low].item(), metrics[1.0][high].item()) == (0.0, 0.25)
    assert (metrics[-1.0][low].item(), metrics[-1.0][high].item()) == (0.25, 0.0)


def test_a_veto_leaves_out_the_whole_sequence_of_a_token_that_the_trainer_would_hardly_have_sampled() -> None:
    batch, logprobs = sampled(fresh=True)
    batch = with_advantages(batch, algorithm("grpo"))
    batch.fields["rollout_logprobs"][0, PROMPT + 2] = logprobs[0, PROMPT + 2] - math.log(1e-5)
    _, grad = computed(algorithm("grpo", veto=1e-4, tis_cap=None), batch, logprobs)
    _, without = computed(algorithm("grpo", tis_cap=None), batch, logprobs)
    assert (grad[0] == 0).all() and without[0].count_nonzero() == LENGTHS[0]
    others = torch.arange(len(LENGTHS)) != 0
    assert torch.equal(grad[others], without[others])  # the denominators stay


@pytest.mark.parametrize(
    ("length", "lost"), [(8, 0.0), (16, 0.0), (17, 0.25), (18, 0.5), (20, 1.0)], ids=lambda value: str(value)
)
def test_an_overlong_answer_loses_reward_with_each_token_of_the_buffer(length: int, lost: float) -> None:
    shaped = algorithm("dapo").overlong.shaped(  # type: ignore[union-attr]
        Outcomes(torch.tensor([1.0]), torch.tensor([0]), torch.tensor([length < 20])), torch.tensor([length])
    )
    assert shaped.rewards.tolist() == [1.0 - lost]


def test_the_length_penalty_counts_an_environment_s_tokens_as_the_limit_does() -> None:
    """Rows of 10 and 8 tokens after the prompt, of which an environment wrote none, 6 and 2; and an empty one."""
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[:, :2] = mask[1, 4:10] = mask[2, 3:5] = mask[2, 10:] = mask[3] = False
    batch = TokenBatch(torch.ones(4, 12, dtype=torch.int64), torch.tensor([12, 12, 10, 2]), mask)
    chosen = algorithm("dapo", overlong={"limit": 10, "buffer": 4})
    groups, finished = torch.zeros(4, dtype=torch.int64), torch.tensor([False, False, True, True])
    shaped = chosen.shaped(Outcomes(torch.zeros(4), groups, finished), batch)
    assert shaped.rewards.tolist() == [-1.0, -1.0, -0.5, 0.0]


def test_an_answer_that_the_length_has_cut_teaches_nothing_when_it_is_filtered() -> None:
    batch, _ = sampled(fresh=True)
    filtering = algorithm("grpo", overlong={"filter": True, "penalty": 0.0})
    advantages = with_advantages(batch, filtering).fields["advantages"]
    plain = with_advantages(batch, algorithm("grpo")).fields["advantages"]
    assert (advantages[1] == 0).all() and (plain[1, PROMPT : PROMPT + 20] != 0).all()
    others = torch.arange(len(LENGTHS)) != 1
    assert torch.equal(advantages[others], plain[others])


@pytest.mark.parametrize("left_out", [{"veto": 1e-4}, {"overlong": {"filter": True, "penalty": 0.0}}], ids=str)
@pytest.mark.parametrize("name", LEARNS_FROM_REWARDS)
def test_what_is_not_trained_on_has_no_gradient_from_the_kl_and_the_entropy_either(
    name: str, left_out: dict[str, Any]
) -> None:
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


def test_a_filtered_answer_hides_no_logprob_that_is_not_finite() -> None:
    batch, logprobs = sampled(fresh=True)
    chosen = algorithm("grpo", overlong={"filter": True, "penalty": 0.0})
    batch = batch.with_fields(**chosen.training_fields(outcomes(), batch))
    logprobs[1, PROMPT + 2] = math.nan
    assert computed(chosen, batch, logprobs)[0].isnan()


def test_groups_are_judged_by_the_rewards_before_the_length_penalty() -> None:
    assert algorithm("dapo").keeps_group(torch.tensor([0.0, 1.0]))
    assert not algorithm("dapo").keeps_group(torch.tensor([1.0, 1.0]))


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


def test_every_algorithm_says_its_loss_in_one_line() -> None:
    lines = [kind.formula for kind in ALGORITHMS.values()]
    assert all(line and "\n" not in line for line in lines)
    spec: dict[str, Any] = {"model": {"path": "/m"}, "data": {"train": "/t"}, "rollout": {"group_size": 1}}
    assert parse_experiment(spec).formula.endswith("group of one counts as 0 and its std as 1, so A = R")
    assert "group_size" not in parse_experiment(spec | {"rollout": {"group_size": 2}}).formula


@pytest.mark.parametrize(
    ("settings", "said", "unsaid"),
    [
        (
            {"name": "grpo"},
            ["clip to [0.8, 1.28]", "w = the token's ratio trainer / rollout, at most 2", "token_mean"],
            ["whitened", "KL"],
        ),
        ({"name": "ppo"}, ["A whitened", "clip to [0.8, 1.2]"], []),
        ({"name": "ppo", "whiten_advantages": False}, [], ["whiten"]),
        ({"name": "reinforce++", "whiten_advantages": False}, ["A = R;"], ["whiten", "KL"]),
        ({"name": "reinforce++", "kl": {"reward": {"coefficient": 0.1}}}, ["R less 0.1 KL", "A whitened"], []),
        ({"name": "gspo"}, ["clip to [0.9997, 1.0004]", "seq_mean_token_mean"], []),
        ({"name": "dapo", "clip_dual": 3.0}, ["at most 3 |A| where A < 0", "length penalty"], ["left out"]),
        ({"name": "grpo", "ratio": "bypass", "entropy": 0.01}, ["less 0.01 entropy"], ["w ="]),
        (
            {"name": "grpo", "rejection": {"name": "icepop"}, "kl": {"loss": {"coefficient": 0.01}}, "veto": 1e-4},
            ["w = the token's ratio trainer / rollout;", "icepop rejects outside [0.5, 5]", "0.01 k2", "below 0.0001"],
            ["at most"],
        ),
        ({"name": "sft"}, ["-logprob of the answers of the data"], ["clip"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_printed_loss_is_that_of_the_settings(settings: dict[str, Any], said: list[str], unsaid: list[str]) -> None:
    spec = {"model": {"path": "/m"}, "data": {"train": "/t"}, "algorithm": settings}
    line = parse_experiment(spec).formula
    assert "\n" not in line and not [each for each in said if each not in line]
    assert not [each for each in unsaid if each in line]


@pytest.mark.parametrize(
    "settings", [{"name": "rloo"}, {"name": "maxrl"}, {"name": "grpo", "dynamic_sampling": True}], ids=str
)
def test_a_group_of_one_is_refused_where_it_would_teach_nothing(settings: dict[str, Any]) -> None:
    spec = {"model": {"path": "/m"}, "data": {"train": "/t"}, "rollout": {"group_size": 1}, "algorithm": settings}
    with pytest.raises(UserError, match="rollout.group_size: found '1 with .*expected at least 2"):
        parse_experiment(spec)


def test_maxrl_refuses_a_length_penalty_and_takes_the_filter() -> None:
    with pytest.raises(ValidationError, match=r"found overlong.penalty=1 with maxrl, expected 0"):
        algorithm("maxrl", overlong={})
    assert algorithm("maxrl", overlong={"penalty": 0.0, "filter": True}).overlong is not None


def test_a_wide_clip_of_a_sequence_ratio_is_noted() -> None:
    (note,) = [line for line in algorithm("gspo", clip_high=0.2).notes() if "clip_high" in line]
    assert note.startswith("algorithm.clip_high: found 0.2, expected about 0.0004 with gspo")
    assert not any("expected about" in line for line in algorithm("gspo").notes())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "cispo", "clip_dual": 3.0}, "clip_dual"),
        ({"name": "rloo", "group_norm_std": True}, "group_norm_std"),
        ({"name": "grpo", "loss_length": 8}, "expected seq_mean_token_sum_norm, which alone divides by it"),
        ({"name": "grpo", "veto": 1e-4, "ratio": "bypass"}, "found veto=0.0001 with ratio=bypass, expected none"),
        ({"name": "grpo", "clip_dual": 1.0}, "greater than 1"),
    ],
    ids=["dual-without-a-clipped-loss", "key-of-another", "length-of-another-mean", "nothing-to-veto", "dual-of-one"],
)
def test_settings_that_do_not_belong_together_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        TypeAdapter(Algorithm).validate_python(settings)

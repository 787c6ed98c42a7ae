"""PPO's advantages and its critic's loss: float64 loops, cut-out spans, any split."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fp8rl.rl.algorithms.base import Outcomes
from fp8rl.rl.algorithms.ppo import ValueObjective, generalised_advantages
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.step.batch import TokenBatch
from tests.support.experiments import algorithm, experiment

ppo = partial(algorithm, "ppo")


def random_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, values and used tokens with spans, one row of none, and one that ends in a span."""
    noise = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 6, 30, generator=noise)
    used = torch.rand(6, 30, generator=noise) < 0.6
    used[2], used[3, 20:] = False, False
    return rewards, values, used


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0)])
def test_against_a_loop_over_the_tokens_with_the_spans_cut_out(gamma: float, gae_lambda: float) -> None:
    rewards, values, used = random_rows()
    found = generalised_advantages(rewards, values, used, gamma, gae_lambda)
    for row in range(6):
        kept = [(float(rewards[row, t]), float(values[row, t])) for t in range(30) if used[row, t]]
        expected = []
        for start in range(len(kept)):
            total = 0.0
            for ahead, (reward, value) in enumerate(kept[start:]):
                after = kept[start + ahead + 1][1] if start + ahead + 1 < len(kept) else 0.0
                total += (gamma * gae_lambda) ** ahead * (reward + gamma * after - value)
            expected.append(total)
        assert found[row, used[row]].tolist() == pytest.approx(expected, abs=1e-12)
    assert (found[~used] == 0).all()


def with_spans() -> tuple[TokenBatch, Outcomes, torch.Tensor]:
    """Three answers with tokens of a tool between their own; and where the own tokens are."""
    own = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0, 0]]).bool()
    names = ("values", "old_logprobs", "reference_logprobs", "rollout_logprobs")
    fields = dict(zip(names, torch.rand(4, *own.shape, generator=torch.Generator().manual_seed(2))))
    batch = TokenBatch(torch.ones(own.shape, dtype=torch.int64), torch.tensor([9, 6, 6]), own, 1.0, fields)
    return batch, Outcomes(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 1]), torch.ones(3).bool()), own


def test_returns_are_advantages_before_whitening_and_values() -> None:
    batch, outcomes, own = with_spans()
    fields = ppo().training_fields(outcomes, batch)
    # With gamma and lambda 1 what is still to come is the reward, whatever was expected.
    assert torch.allclose(fields["returns"][own], outcomes.rewards.repeat_interleave(own.sum(1)), atol=1e-6)
    white = fields["advantages"][own].double()
    assert white.mean().item() == pytest.approx(0, abs=1e-6) and white.var(correction=0).item() == pytest.approx(1)
    raw = fields["returns"][own].double() - batch.fields["values"][own].double()
    assert torch.allclose(white, (raw - raw.mean()) / raw.std(correction=0), atol=1e-5)


def test_the_length_penalty_and_the_kl_penalty_compose() -> None:
    batch, outcomes, own = with_spans()
    overlong = {"limit": 7, "buffer": 4, "penalty": 1.0}
    kl = {"reward": {"coefficient": 0.5}}
    fields = ppo(overlong=overlong, kl=kl).training_fields(outcomes, batch)
    x = (batch.fields["old_logprobs"] - batch.fields["reference_logprobs"]).double()
    # 7, 4 and 4 tokens, the tool's too, penalized from the 4th
    for row, reward in enumerate((1.0 - 1.0, 0.0 - 0.25, 0.5 - 0.25)):
        places = own[row].nonzero().flatten().tolist()
        for index, t in enumerate(places):
            expected = reward - 0.5 * sum(float(x[row, s]) for s in places[index:])
            assert fields["returns"][row, t].item() == pytest.approx(expected, abs=1e-6)


def test_the_value_clip_worked_by_hand() -> None:
    # V, V_old, G:  0.3, 0.0, 1.0  ->  max(0.49, (0.2 - 1)² = 0.64), clipped, no gradient.
    #              -0.3, 0.0, 1.0  ->  max(1.69, (-0.2 - 1)² = 1.44), V moved away: the gradient stays.
    #               0.1, 0.0, 1.0  ->  within the bound: 0.81 both.
    mask = torch.tensor([[False, True, True, True]])
    fields = {"values": torch.zeros(1, 4), "returns": torch.tensor([[0.0, 1.0, 1.0, 1.0]])}
    batch = TokenBatch(torch.ones(1, 4, dtype=torch.int64), torch.tensor([4]), mask, 1.0, fields)
    values = torch.tensor([[0.0, 0.3, -0.3, 0.1]]).requires_grad_()
    output = ValueObjective(3, 0.2)(values, torch.zeros_like(values), batch)
    assert output.loss.item() == pytest.approx((0.64 + 1.69 + 0.81) / 6)
    (grad,) = torch.autograd.grad(output.loss, values)
    assert grad[0].tolist() == pytest.approx([0.0, 0.0, -1.3 / 3, -0.9 / 3])
    assert output.metrics["critic/clip_fraction"].item() == pytest.approx(1 / 3)
    plain = ValueObjective(3, None)(values, torch.zeros_like(values), batch)
    assert plain.loss.item() == pytest.approx((0.49 + 1.69 + 0.81) / 6) and plain.metrics["critic/clip_fraction"] == 0


def test_the_critic_s_denominator_is_that_of_the_batch_under_any_split() -> None:
    rewards, old, used = random_rows(3)
    used[:, 0] = False
    fields = {"values": old, "returns": rewards}
    batch = TokenBatch(torch.ones(6, 30, dtype=torch.int64), torch.full((6,), 30), used, 1.0, fields)
    objective = ppo().critic_objective(batch)
    values = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    whole = objective(values, torch.zeros_like(values), batch)
    for split in ([[0, 1, 2, 3, 4, 5]], [[5, 0], [2], [1, 4, 3]], [[row] for row in range(6)]):
        parts = [objective(values[rows], torch.zeros_like(values[rows]), batch.select(rows)) for rows in split]
        assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-5)
        for name, value in whole.metrics.items():
            assert sum(part.metrics[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-5, abs=1e-7)


def test_the_critic_s_optimizer_is_the_policy_s_with_its_own_rate() -> None:
    trainer = TrainerSection(lr=1e-4, warmup_steps=5, adam_beta2=0.99, tp=2)
    critic = ppo(critic={"lr": 3e-4, "decay": "linear"}).critic_config(trainer)
    assert (critic.lr, critic.warmup_steps, critic.decay, critic.adam_beta2, critic.tp) == (3e-4, 0, "linear", 0.99, 2)
    assert ppo().critic_config(trainer).lr == 1e-5


@pytest.mark.parametrize("warmup", [0, 4, 20, 30])
def test_the_policy_s_rate_decays_over_the_updates_that_it_takes(warmup: int) -> None:
    from fp8rl.rl.run.run import trainer_spec

    run = experiment(run={"steps": 20}, algorithm={"name": "ppo", "critic_warmup": warmup, "updates_per_batch": 2})
    spec = trainer_spec(run, run.numerics_config())
    taken = 2 * sum(run.algorithm.learns(step) for step in range(1, 21))
    assert (spec.total_steps, spec.critic_steps) == (taken, 40)

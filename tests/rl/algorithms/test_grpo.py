import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from fp8rl.rl.algorithms.grpo import Grpo
from fp8rl.rollout.config import RolloutSection
from fp8rl.trainer.step.batch import TokenBatch


def algorithm(**changes: Any) -> Grpo:
    return Grpo(**{"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 2.0, **changes})


def rows_batch(lengths: list[int], mask: list[list[int]], **fields: list[list[float]]) -> TokenBatch:
    loss_mask = torch.tensor(mask, dtype=torch.bool)
    tokens = torch.ones_like(loss_mask, dtype=torch.int64)
    values = {name: torch.tensor(value, dtype=torch.float32) for name, value in fields.items()}
    return TokenBatch(tokens, torch.tensor(lengths), loss_mask, 1.0, values)


def run(batch: TokenBatch, logprobs: Any, settings: Grpo) -> tuple[float, dict[str, float], torch.Tensor]:
    """Loss, metrics and the gradient of the logprobs."""
    logprobs = torch.as_tensor(logprobs, dtype=torch.float32).clone().requires_grad_()
    output = settings.objective(batch)(logprobs, torch.full(batch.tokens.shape, 0.5), batch)
    output.loss.backward()
    return output.loss.item(), {name: value.item() for name, value in output.metrics.items()}, logprobs.grad


LN2 = math.log(2.0)


def hand_batch() -> TokenBatch:
    # Three targets in row 0 (advantage 1), one in row 1 (advantage -2). Old logprobs are all -1.
    # rho: 1 (equal), 4 (cut to 2), 0.5; row 1: 1.
    return rows_batch(
        [4, 3],
        [[0, 1, 1, 1], [0, 1, 0, 0]],
        advantages=[[0, 1, 1, 1], [0, -2, 0, 0]],
        old_logprobs=[[0, -1, -1, -1], [0, -1, 0, 0]],
        rollout_logprobs=[[0, -1, -1 - 2 * LN2, -1 + LN2], [0, -1, 0, 0]],
    )


# Ratios: row 0: 1, 2 (clipped to 1.28), 0.5 (kept: A > 0 clips only above); row 1: 0.5 (clipped to 0.8).
HAND_LOGPROBS = [[0, -1, -1 + LN2, -1 - LN2], [0, -1 - LN2, 0, 0]]


def test_clipped_and_weighted_loss_by_hand() -> None:
    # Token losses: -1 * 1; -1.28 * 2 = -2.56; -0.5 * 0.5 = -0.25; row 1: max(2 * 0.5, 2 * 0.8) * 1 = 1.6.
    # Sum -2.21 over 4 tokens.
    loss, metrics, grad = run(hand_batch(), HAND_LOGPROBS, algorithm())

    assert loss == pytest.approx(-0.5525, abs=1e-6)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)  # (1 + 2 + 0.5 + 0.5) / 4
    assert metrics["train/clip_fraction"] == 0.5
    assert metrics["train/tis_weight_mean"] == pytest.approx(1.125, abs=1e-6)  # (1 + 2 + 0.5 + 1) / 4
    assert metrics["train/entropy"] == 0.5
    # d(-A r w)/d logprob = -A r w on unclipped tokens, 0 on clipped ones; over 4 tokens.
    expected = torch.tensor([[0, -0.25, 0, -0.0625], [0, 0, 0, 0]])
    assert torch.allclose(grad, expected, atol=1e-7)


def test_sequence_mean_by_hand() -> None:
    # Row means: (-1 - 2.56 - 0.25) / 3 = -1.27 and 1.6; their mean is 0.165.
    loss, metrics, _ = run(hand_batch(), HAND_LOGPROBS, algorithm(loss_aggregation="seq_mean_token_mean"))
    assert loss == pytest.approx(0.165, abs=1e-6)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-6)  # metrics stay token means


def test_without_tis_the_weight_is_left_out() -> None:
    # -1 - 1.28 - 0.5 + 1.6 = -1.18 over 4.
    loss, metrics, _ = run(hand_batch(), HAND_LOGPROBS, algorithm(tis_cap=None))
    assert loss == pytest.approx(-0.295, abs=1e-6)
    assert "train/tis_weight_mean" not in metrics


def test_on_policy_step_is_the_policy_gradient() -> None:
    # Without old logprobs r = 1: loss is -mean A, and its gradient -A / tokens.
    batch = rows_batch([3, 3], [[0, 1, 1], [0, 1, 0]], advantages=[[0, 1.5, 1.5], [0, -1, 0]])
    loss, metrics, grad = run(batch, [[0, -3, -0.1], [0, -7, 0]], algorithm(tis_cap=None))
    assert loss == pytest.approx(-2 / 3)
    assert metrics["train/ratio_mean"] == 1.0
    assert metrics["train/clip_fraction"] == 0.0
    assert torch.allclose(grad, torch.tensor([[0, -0.5, -0.5], [0, 1 / 3, 0]]))


def test_importance_weight_carries_no_gradient() -> None:
    # rho = e^(-1 + 1.5) = 1.6487; with A = 1, r = 1 the gradient is -rho, and would be -2 rho if rho were not detached.
    batch = rows_batch([2], [[0, 1]], advantages=[[0, 1]], rollout_logprobs=[[0, -1.5]])
    _, _, grad = run(batch, [[0, -1.0]], algorithm())
    assert grad[0, 1].item() == pytest.approx(-math.exp(0.5), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_rollout_logprob_drops_its_token(bad: float) -> None:
    batch = hand_batch()
    batch.fields["rollout_logprobs"][0, 2] = bad
    # Left: -1, -0.25 and 1.6 over 3 tokens.
    loss, _, grad = run(batch, HAND_LOGPROBS, algorithm())
    assert loss == pytest.approx(0.35 / 3, abs=1e-6)
    assert grad[0, 2] == 0
    assert torch.isfinite(grad).all()


def test_a_fully_dropped_row_leaves_the_sequence_mean() -> None:
    batch = hand_batch()
    batch.fields["rollout_logprobs"][1, 1] = math.nan
    loss, _, _ = run(batch, HAND_LOGPROBS, algorithm(loss_aggregation="seq_mean_token_mean"))
    assert loss == pytest.approx(-1.27, abs=1e-6)


def test_extreme_differences_stay_finite() -> None:
    batch = rows_batch(
        [3], [[0, 1, 1]], advantages=[[0, 1, -1]], old_logprobs=[[0, -900, -1]], rollout_logprobs=[[0, -1, -900]]
    )
    loss, metrics, grad = run(batch, [[0, -1, -900.0]], algorithm())
    assert math.isfinite(loss) and all(map(math.isfinite, metrics.values())) and bool(torch.isfinite(grad).all())


def test_nan_outside_the_mask_does_not_reach_loss_or_gradient() -> None:
    batch = hand_batch()
    logprobs = torch.tensor(HAND_LOGPROBS)
    logprobs[~batch.loss_mask] = math.nan
    for values in batch.fields.values():
        values[~batch.loss_mask] = math.nan
    loss, metrics, grad = run(batch, logprobs, algorithm())
    assert loss == pytest.approx(-0.5525, abs=1e-6)
    assert torch.isfinite(grad).all() and all(map(math.isfinite, metrics.values()))


def random_batch(seed: int) -> tuple[TokenBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (9,), generator=generator)
    width = int(lengths.max())
    mask = (torch.arange(width) >= 2) & (torch.arange(width) < lengths[:, None])
    old = -torch.rand(9, width, generator=generator) * 4
    rollout = old + 0.6 * torch.randn(9, width, generator=generator)
    rollout[4, 2] = math.nan
    advantages = torch.randn(9, 1, generator=generator).expand(9, width).contiguous()
    fields = {"advantages": advantages, "old_logprobs": old, "rollout_logprobs": rollout}
    batch = TokenBatch(torch.ones(9, width, dtype=torch.int64), lengths, mask, 1.0, fields)
    return batch, old + 0.3 * torch.randn(9, width, generator=generator)


def oracle(batch: TokenBatch, logprobs: torch.Tensor, aggregation: str) -> float:
    """Token by token in float64, written from the formula."""
    row_losses = []
    for row in range(batch.rows):
        losses = []
        for t in range(batch.width):
            new, old, rollout, advantage = (
                float(x[row, t])
                for x in (logprobs, *(batch.fields[n] for n in ("old_logprobs", "rollout_logprobs", "advantages")))
            )
            if batch.loss_mask[row, t] and np.isfinite(rollout):
                ratio = np.exp(new - old)
                surrogate = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28))
                losses.append(surrogate * min(np.exp(old - rollout), 2.0))
        if losses:
            row_losses.append(losses)
    if aggregation == "seq_mean_token_mean":
        return float(np.mean([np.mean(losses) for losses in row_losses]))
    return float(np.mean(np.concatenate(row_losses)))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_against_a_float64_oracle(seed: int, aggregation: str) -> None:
    batch, logprobs = random_batch(seed)
    loss, _, _ = run(batch, logprobs, algorithm(loss_aggregation=aggregation))
    assert loss == pytest.approx(oracle(batch, logprobs, aggregation), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3, 4, 5, 6, 7, 8]], [[8, 0], [3, 4, 5, 1], [2, 6, 7]], [[r] for r in range(9)]]
)
def test_micro_batches_add_up(split: list[list[int]], aggregation: str) -> None:
    batch, logprobs = random_batch(7)
    settings = algorithm(loss_aggregation=aggregation)
    whole_loss, whole_metrics, whole_grad = run(batch, logprobs, settings)
    objective = settings.objective(batch)

    loss, metrics, grad = 0.0, dict.fromkeys(whole_metrics, 0.0), torch.zeros_like(logprobs)
    for rows in split:
        part = batch.select(rows)
        values = logprobs[rows, : part.width].clone().requires_grad_()
        output = objective(values, torch.full_like(values, 0.5).detach(), part)
        output.loss.backward()
        loss += output.loss.item()
        metrics = {name: total + output.metrics[name].item() for name, total in metrics.items()}
        grad[rows, : part.width] += values.grad

    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert metrics == pytest.approx(whole_metrics, rel=1e-5)
    assert torch.allclose(grad, whole_grad, rtol=1e-5, atol=1e-8)


def test_objective_travels_to_other_processes() -> None:
    objective = algorithm().objective(hand_batch())
    assert pickle.loads(pickle.dumps(objective)) == objective


def test_the_clip_acts_on_the_engines_logprobs_of_older_weights_by_hand() -> None:
    """Both bounds, where tokens are older than the weights that they train: no other logprobs are needed."""
    # Ratios to the engine's logprobs of -1: 2 (A > 0, clipped to 1.28), 0.5 (A > 0, kept), 0.5 (A < 0, clipped to 0.8),
    # 2 (A < 0, kept). Losses -1.28, -0.5, 0.8, 2; no weight.
    batch = rows_batch([5], [[0, 1, 1, 1, 1]], advantages=[[0, 1, 1, -1, -1]], rollout_logprobs=[[0, -1, -1, -1, -1]])
    loss, metrics, grad = run(
        batch, [[0, -1 + LN2, -1 - LN2, -1 - LN2, -1 + LN2]], algorithm(ratio="bypass").resolved(RolloutSection())
    )
    assert loss == pytest.approx((-1.28 - 0.5 + 0.8 + 2) / 4, abs=1e-6)
    assert grad[0].tolist() == pytest.approx([0, 0, -0.5 / 4, 0, 2 / 4], abs=1e-6)
    assert metrics["train/clip_fraction"] == 0.5 and metrics["train/ratio_mean"] == 1.25
    assert "train/tis_weight_mean" not in metrics


def test_on_fresh_tokens_with_equal_logprobs_the_three_sources_of_the_ratio_are_one_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(4, 9, generator=generator) * 5
    mask = (torch.arange(9) > 1).expand(4, 9).int().tolist()
    advantages = torch.randn(4, 9, generator=generator).tolist()
    found = []
    for source in ("recompute", "bypass", "on_policy"):
        batch = rows_batch([9] * 4, mask, advantages=advantages, rollout_logprobs=logprobs.tolist())
        loss, metrics, grad = run(batch, logprobs, algorithm(ratio=source))
        assert (metrics["train/ratio_mean"], metrics["train/clip_fraction"]) == (1.0, 0.0)
        found.append((loss, grad.tolist()))
    assert found[0] == found[1] == found[2] and any(found[0][1][0])


@pytest.mark.parametrize(
    ("staleness", "settings", "expected"),
    [
        (0, {}, "recompute"),
        (1, {}, "bypass"),
        (3, {"ratio": "on_policy"}, "on_policy"),
        (2, {"rejection": {"name": "icepop"}}, "recompute"),
    ],
)
def test_the_ratio_of_older_tokens_is_taken_from_the_engine_unless_asked_otherwise(
    staleness: int, settings: dict[str, Any], expected: str
) -> None:
    resolved = Grpo(**settings).resolved(RolloutSection(staleness=staleness))
    assert resolved.ratio == expected
    assert (resolved.correction.tis_cap is None) == (expected == "bypass" or "rejection" in settings)


def test_a_rejection_that_could_not_reject_is_refused() -> None:
    with pytest.raises(ValueError, match="rejection icepop with ratio=bypass"):
        Grpo(ratio="bypass", rejection={"name": "icepop"})

import math
from typing import Any

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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_rollout_logprob_drops_its_token(bad: float) -> None:
    batch = hand_batch()
    batch.fields["rollout_logprobs"][0, 2] = bad
    # Left: -1, -0.25 and 1.6 over 3 tokens.
    loss, _, grad = run(batch, HAND_LOGPROBS, algorithm())
    assert loss == pytest.approx(0.35 / 3, abs=1e-6)
    assert grad[0, 2] == 0 and torch.isfinite(grad).all()


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


def test_missing_fields_and_unusable_batches_are_refused() -> None:
    plain = rows_batch([2], [[0, 1]], advantages=[[0, 1]])
    with pytest.raises(ValueError, match="rollout_logprobs"):
        algorithm().objective(plain)
    with pytest.raises(ValueError, match="advantages"):
        algorithm(tis_cap=None).objective(rows_batch([2], [[0, 1]]))
    with pytest.raises(ValueError, match="no usable token among 1"):
        algorithm().objective(rows_batch([2], [[0, 1]], advantages=[[0, 1]], rollout_logprobs=[[0, math.nan]]))
    with pytest.raises(ValueError, match="advantages: found non-finite"):
        algorithm(tis_cap=None).objective(rows_batch([2], [[0, 1]], advantages=[[0, math.nan]]))


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
def test_the_ratio_of_older_tokens_is_to_the_engines_by_default(staleness: int, settings: Any, expected: str) -> None:
    resolved = Grpo(**settings).resolved(RolloutSection(staleness=staleness))
    assert resolved.ratio == expected
    assert (resolved.correction.tis_cap is None) == (expected == "bypass" or "rejection" in settings)

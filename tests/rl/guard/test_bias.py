"""What persists of d: planted noise is none, a planted bias is found, and equal sides have none."""

import torch
from torch import Tensor

from fp8rl.rl.guard.bias import WINDOW, BiasWindow
from fp8rl.rl.guard.scored_batch import ScoredBatch
from fp8rl.trainer.step.batch import TokenBatch

VOCABULARY, ROWS, WIDTH = 50, 16, 20


def measured(bias: Tensor, noise: float, steps: int = WINDOW, by_step: float = 0.0) -> dict[str, float]:
    """The metrics after these steps. bias: [V], of each token; by_step: noise that a token's d of a step share."""
    generator, window = torch.Generator().manual_seed(1), BiasWindow()
    found: dict[str, float] = {}
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (ROWS, WIDTH), generator=generator)
        mask = torch.arange(WIDTH).expand(ROWS, WIDTH) > 2
        own = by_step * torch.randn(VOCABULARY, generator=generator)
        d = (bias + own)[tokens] + noise * torch.randn(ROWS, WIDTH, generator=generator)
        rollout = torch.full((ROWS, WIDTH), -1.0)
        batch = TokenBatch(tokens, torch.full((ROWS,), WIDTH), mask, fields={"rollout_logprobs": rollout})
        found = window.add(ScoredBatch(batch, mask * 3, 3, rollout + d))
    return found


def test_noise_alone_is_no_bias_even_if_a_steps_tokens_share_it() -> None:
    for shared in (0.0, 0.1):
        found = measured(torch.zeros(VOCABULARY), 0.1, by_step=shared)
        assert found["mismatch/bias"] <= found["mismatch/bias_noise"] < 0.04
        assert found["mismatch/context_bias"] <= found["mismatch/context_bias_noise"]


def test_a_bias_of_two_hundredths_of_a_nat_is_found_beneath_noise_of_five() -> None:
    signs = torch.randint(2, (VOCABULARY,), generator=torch.Generator().manual_seed(2)) * 2.0 - 1
    found = measured(0.02 * signs, 0.1, steps=WINDOW)
    assert 0.015 <= found["mismatch/bias"] <= 0.025 and found["mismatch/bias"] > found["mismatch/bias_noise"]


def test_where_both_sides_agree_it_is_zero_and_one_step_says_nothing() -> None:
    agreed = measured(torch.zeros(VOCABULARY), 0.0, steps=3)
    assert set(agreed.values()) == {0.0} and len(agreed) == 4
    assert set(measured(torch.ones(VOCABULARY), 0.0, steps=1).values()) == {0.0}
    assert abs(measured(0.3 * torch.ones(VOCABULARY), 0.0, steps=2)["mismatch/bias"] - 0.3) < 1e-6

"""Drift of older tokens, apart from what is fresh, on cases worked by hand; and answers drawn again."""

from __future__ import annotations

import math

import pytest
import torch

from fp8rl.rl.guard.scored_batch import NOT_DRAWN, redraw_metrics
from fp8rl.rl.mismatch.logprobs import drift_metrics, tokens_by_age

LN2 = math.log(2)


def drift(d: list[float], versions: list[int], version: int) -> dict[str, float]:
    """Of a row whose first token is its prompt."""
    train = torch.tensor([d], dtype=torch.float64)
    mask = torch.arange(len(d))[None] > 0
    return drift_metrics(train, torch.zeros_like(train), mask, torch.tensor([versions]), version)


def test_by_hand() -> None:
    # The prompt, fresh tokens (version 7) and one that is not finite are left out. mean(rho - 1 - d) over
    # d = ln 2, -ln 2, 2 ln 2: (2 + 1/2 + 4 - 3 - 2 ln 2) / 3. ESS: (2 + 1/2 + 4)^2 / (3 (4 + 1/4 + 16)).
    found = drift([9.0, 9.0, LN2, -LN2, math.nan, 2 * LN2], [0, 7, 6, 6, 6, 4], 7)
    assert found == {
        "drift/tokens": 3.0,
        "drift/logprob_abs_diff_mean": pytest.approx(4 * LN2 / 3),
        "drift/logprob_abs_diff_max": pytest.approx(2 * LN2),
        "drift/k1_kl": pytest.approx(-2 * LN2 / 3),
        "drift/ess": pytest.approx(6.5**2 / (3 * 20.25)),
        "drift/k3_kl": pytest.approx((3.5 - 2 * LN2) / 3),
        "drift/tokens_age_1": 2.0,
        "drift/abs_diff_mean_age_1": pytest.approx(LN2),
        "drift/tokens_age_3": 1.0,
        "drift/abs_diff_mean_age_3": pytest.approx(2 * LN2),
    }
    assert drift([1.0, 1.0, math.nan], [0, 7, 6], 7) == {}, "without older tokens there is no drift"


def test_tokens_are_counted_by_age() -> None:
    assert tokens_by_age(torch.tensor([5, 5, 3, -40]), 5) == {0: 2, 2: 1, 8: 1}


TOKENS = torch.tensor([[9, 4, 5, 6], [9, 9, 7, 8], [9, 1, 2, 3]])
MASK = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0]]).bool()


def test_the_fraction_is_over_the_sampled_tokens_that_were_drawn_again() -> None:
    draws = torch.tensor([[NOT_DRAWN, 4, 5, 0], [NOT_DRAWN, 3, 7, 8], [NOT_DRAWN] * 4])
    assert redraw_metrics(draws, TOKENS, MASK) == {"mismatch/redraw_frac": 0.8, "mismatch/redraw_tokens": 5.0}
    assert redraw_metrics(torch.full_like(TOKENS, NOT_DRAWN), TOKENS, MASK) == {}

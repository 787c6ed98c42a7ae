from __future__ import annotations

import torch

from fp8rl.rl.guard.scored_batch import NOT_DRAWN, redraw_metrics

TOKENS = torch.tensor([[9, 4, 5, 6], [9, 9, 7, 8], [9, 1, 2, 3]])
MASK = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0]]).bool()


def test_the_fraction_is_over_the_sampled_tokens_that_were_drawn_again() -> None:
    draws = torch.tensor([[NOT_DRAWN, 4, 5, 0], [NOT_DRAWN, 3, 7, 8], [NOT_DRAWN] * 4])
    assert redraw_metrics(draws, TOKENS, MASK) == {"mismatch/redraw_frac": 0.8, "mismatch/redraw_tokens": 5.0}


def test_without_a_draw_there_is_no_metric() -> None:
    assert redraw_metrics(torch.full_like(TOKENS, NOT_DRAWN), TOKENS, MASK) == {}

"""Metrics of whether the trainer, with its own logits and an answer's seed, draws the tokens that the engine drew."""

from __future__ import annotations

from torch import Tensor

NOT_DRAWN = -1
"""Stands for the draw of a token that the trainer has not drawn."""


def redraw_metrics(draws: Tensor, tokens: Tensor, mask: Tensor) -> dict[str, float]:
    """`mismatch/redraw_...` of a batch; nothing where no token was drawn again.

    Args:
        draws: int64 [B, S], the trainer's; `NOT_DRAWN` where it drew none.
        tokens: int64 [B, S].
        mask: bool [B, S], the tokens that were sampled at the weights that the trainer drew with.
    """
    drawn = mask & (draws != NOT_DRAWN)
    count = int(drawn.sum())
    if not count:
        return {}
    same = int((drawn & (draws == tokens)).sum())
    return {"mismatch/redraw_frac": same / count, "mismatch/redraw_tokens": float(count)}

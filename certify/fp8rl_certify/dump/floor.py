"""The floor: how far rounding to BF16 moves the log-probability of each token, and how many floors a side is away.

Noise dz in the logits moves a log-probability by dz_t - sum_v p_v dz_v, which is about (1 - p_t) times the noise of one
logit. So a token that is nearly certain has a small floor. A wrong temperature, or a row of other tokens, stands out
there, though the mean over all tokens hides it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LEAST = 1e-5
"""nats; the rounding of a log-probability that is computed in FP32."""
MOST = 100.0
"""Floors that one token counts at most: an expert that rounding has chosen otherwise does not decide alone."""
USUAL = 0.1
"""Mean of floors that BF16 has at least, where all tokens are certain."""
WITHIN, MEAN_WITHIN = 1.75, 2.0
"""Multiples that a side may have of BF16's mean number of floors, and of its mean abs(d). Two roundings to BF16 that
know nothing of each other are 1.4 times as far apart as one is from the truth."""
OUTLIER, OUTLIERS = 10.0, 0.005
"""A token that is so many floors away is an outlier. So large a part of the tokens, and one more, may be outliers."""
SLOPE, SIGMAS, CLEAR = 0.02, 5.0, 10.0
"""The least error of the logits' scale that counts, its standard errors away from chance, and the floors that the
derivative by the scale has where it is looked at."""
_MAD = 0.6745
"""Median of abs(x) of a normal distribution with standard deviation 1."""


@dataclass(frozen=True)
class Floor:
    """Rounding of N tokens. full: float64 [N], the model's log-probabilities in FP32. halves: the same in BF16, by
    kernels that round differently."""

    full: Tensor
    halves: Sequence[Tensor]

    def of(self, said: Tensor) -> Tensor:
        """Floor in nats [N] of log-probabilities that a side says. The noise of a logit is measured on the half of the
        tokens that are least certain."""
        unsure = -torch.expm1(self.full)
        used = (unsure >= unsure.median()) & (unsure > 0)
        noise = (self.apart / unsure)[:, used].median(1).values.max() / _MAD if used.any() else 0.0
        return torch.maximum(noise * -torch.expm1(said.clamp(max=0.0)) + LEAST + written(said)[0], self.apart.amax(0))

    def times(self, away: Tensor, where: Tensor | slice = slice(None)) -> float:
        """Return the mean number of floors [N] as a multiple of that of BF16, on some of the tokens."""
        return mean(away[where]) / max(USUAL, *(mean(each[where]) for each in self.of_halves))

    def near(self, away: Tensor, where: Tensor | slice = slice(None)) -> bool:
        """Return whether some of the tokens are within the floor by their mean number of floors and their outliers."""
        some = away[where]
        return self.times(away, where) <= WITHIN and int((some > OUTLIER).sum()) <= 1 + OUTLIERS * len(some)

    @cached_property
    def of_halves(self) -> list[Tensor]:
        """How many floors each BF16 is away [N]."""
        return [floors(half, self.full, self.of(half)) for half in self.halves]

    @cached_property
    def apart(self) -> Tensor:
        """abs(d) of each BF16 in nats [halves, N]."""
        return torch.stack([(half - self.full).abs().nan_to_num(0.0, posinf=0.0) for half in self.halves])


class Side:
    """What one side says of N tokens: how many floors `scale` [N] each is `away` from the model, NaN where that is not
    finite, and whether all are `within` the floor by their means and outliers.

    slope: by which part the logits are too large, where d follows what their scale does; 0 where it does not. The
    derivative by the logarithm of the scale is the log-probability plus the entropy [N] in nats.
    """

    def __init__(self, said: Tensor, floor: Floor, entropy: Tensor) -> None:
        self.said, self.floor, self.scale = said, floor, floor.of(said)
        self.away = floors(said, floor.full, self.scale)
        d, by_scale, step = said - floor.full, floor.full + entropy, written(said)[0] * torch.ones_like(said)
        parts = (d / by_scale)[self.away.isfinite() & (by_scale.abs() > CLEAR * self.scale)]
        middle = parts.median().item() if len(parts) else 0.0
        agree = (parts * middle).sign().sum().item()
        self.slope = middle if abs(middle) > SLOPE and agree > SIGMAS * len(parts) ** 0.5 else 0.0
        self.within = (
            floor.near(self.away)
            and bool(d[d.isfinite()].abs().mean() <= MEAN_WITHIN * floor.apart.mean(1).max() + step.nanmean())
            and not self.slope
        )


def floors(said: Tensor, by: Tensor, scale: Tensor) -> Tensor:
    """abs(d) in floors [N]; NaN where it is not finite."""
    d = (said - by).abs()
    return torch.where(d.isfinite(), d / scale, math.nan)


def mean(away: Tensor) -> float:
    """Mean number of floors, in which a token counts at most MOST."""
    return away.clamp(max=MOST).nanmean().nan_to_num(0.0).item()


def written(said: Tensor) -> tuple[Tensor | float, str]:
    """Return half the distance of two numbers that can be written [N], and the format, where a side's log-probabilities
    are rounded to fewer digits than FP32 has."""
    values = said[said.isfinite()]
    if bool((values == values.round()).all()):
        return 0.0, ""
    for dtype, bits in ((torch.bfloat16, 9), (torch.float16, 12)):
        if bool((values.to(dtype) == values.float()).all()):
            return said.abs() * 2.0**-bits, str(dtype)[6:]
    for digits in range(1, 7):  # written by FP32, too
        if bool(((values - values.round(decimals=digits)).abs() <= 1e-7 * values.abs()).all()):
            return 0.5 * 10.0**-digits, f"{digits} decimals"
    return 0.0, ""

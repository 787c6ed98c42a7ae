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
"""Smallest floor in nats: the rounding of a log-probability that is computed in FP32."""
MOST = 100.0
"""Largest number of floors that one token counts: one expert that rounding chose differently must not decide."""
USUAL = 0.1
"""Smallest mean number of floors that is assumed for BF16, for the case that all tokens are certain."""
WITHIN, MEAN_WITHIN = 1.75, 2.0
"""Largest multiples of BF16's mean number of floors, and of BF16's mean abs(d), that a side may have. Two independent
roundings to BF16 are 1.4 times as far from each other as one of them is from the exact value."""
OUTLIER, OUTLIERS = 10.0, 0.005
"""A token more than OUTLIER floors away is an outlier. OUTLIERS of all tokens, plus one, may be outliers."""
SLOPE, SIGMAS, CLEAR = 0.02, 5.0, 10.0
"""An error of the logits' scale counts if it is larger than SLOPE and SIGMAS standard errors from chance. Only tokens
count whose derivative by the scale is larger than CLEAR floors."""
_MAD = 0.6745
"""Median of abs(x) of a normal distribution with standard deviation 1."""


@dataclass(frozen=True)
class Floor:
    """The effect of rounding on N tokens. full: float64 [N], the model's log-probabilities in FP32. halves: its
    log-probabilities in BF16, one tensor for each kernel that rounds differently."""

    full: Tensor
    halves: Sequence[Tensor]

    def of(self, said: Tensor) -> Tensor:
        """Return the floor in nats [N] of a side's log-probabilities. The noise of a logit is measured on the less
        certain half of the tokens."""
        unsure = -torch.expm1(self.full)
        used = (unsure >= unsure.median()) & (unsure > 0)
        noise = (self.apart / unsure)[:, used].median(1).values.max() / _MAD if used.any() else 0.0
        return torch.maximum(noise * -torch.expm1(said.clamp(max=0.0)) + LEAST + written(said)[0], self.apart.amax(0))

    def times(self, away: Tensor, where: Tensor | slice = slice(None)) -> float:
        """Return the mean of `away` [N], in floors, on some tokens, as a multiple of BF16's mean on these tokens."""
        return mean(away[where]) / max(USUAL, *(mean(each[where]) for each in self.of_halves))

    def near(self, away: Tensor, where: Tensor | slice = slice(None)) -> bool:
        """Return whether some tokens are within the floor, by their mean number of floors and number of outliers."""
        some = away[where]
        return self.times(away, where) <= WITHIN and int((some > OUTLIER).sum()) <= 1 + OUTLIERS * len(some)

    @cached_property
    def of_halves(self) -> list[Tensor]:
        """The distance of each BF16 reading from the model in FP32, in floors [N]."""
        return [floors(half, self.full, self.of(half)) for half in self.halves]

    @cached_property
    def apart(self) -> Tensor:
        """abs(d) of each BF16 reading from the model in FP32, in nats [halves, N]."""
        return torch.stack([(half - self.full).abs().nan_to_num(0.0, posinf=0.0) for half in self.halves])


class Side:
    """One side's log-probabilities of N tokens, measured in floors.

    scale: [N], the floor of each token. away: [N], the distance of each token from the model in floors; NaN if not
    finite. within: whether the side is within the floor. slope: the fraction by which the logits are too large, if d
    varies as an error of the logits' scale would make it; else 0. The derivative of a log-probability by the logarithm
    of the scale is the log-probability plus the entropy [N] in nats.
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
    """Return abs(d) in floors [N]; NaN where it is not finite."""
    d = (said - by).abs()
    return torch.where(d.isfinite(), d / scale, math.nan)


def mean(away: Tensor) -> float:
    """Return the mean number of floors. A token counts at most MOST."""
    return away.clamp(max=MOST).nanmean().nan_to_num(0.0).item()


def written(said: Tensor) -> tuple[Tensor | float, str]:
    """Find out whether a side's log-probabilities are rounded more coarsely than FP32. Return half the rounding step
    [N] and the format's name, or 0 and an empty name."""
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

"""Measures bias: the part of d that persists from step to step for the same token or the same context.

Unbiased noise averages out over steps. A bias between sampler and trainer adds up in the weights, and can end a run
(Score Centering, arXiv 2609.20807). Tokens of one step share its weights and often their context. So only products of d
from different steps show what persists: their mean is the square of the bias.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.numerics.sampling import GOLDEN, mix
from fp8rl.rl.guard.scored_batch import ScoredBatch

WINDOW = 32
"""Number of the last steps that an estimate covers."""
CERTAINTY = 2.0
"""Number of standard deviations of noise alone that `..._noise` stands for."""


@dataclass(frozen=True)
class _Step:
    """The sums of d in one step, by key (a token or a context); all [K]."""

    keys: Tensor
    """int64, each once."""
    sums: Tensor
    """float64, the sum of d over the key's tokens."""
    counts: Tensor
    """float64, the number of these tokens."""


class BiasWindow:
    """Estimates the bias of tokens and of contexts over the last steps of a run. After a resume it has no steps."""

    def __init__(self) -> None:
        self._windows: dict[str, deque[_Step]] = {name: deque(maxlen=WINDOW) for name in ("bias", "context_bias")}

    def add(self, scored: ScoredBatch | None) -> dict[str, float]:
        """Add a step's batch; return `mismatch/bias`, `mismatch/context_bias`, and each with `_noise`, over the window.

        As in all `mismatch/` metrics, only tokens count that the trainer's weights have sampled, with a finite d.
        """
        if scored is None:
            return {}
        tokens = scored.batch.tokens
        d = scored.logprobs.double() - scored.batch.fields["rollout_logprobs"].double()
        used = scored.fresh & d.isfinite()
        before = mix(mix(tokens.roll(2, 1)) + GOLDEN * tokens.roll(1, 1))
        keys = {"bias": tokens, "context_bias": mix(before + GOLDEN * tokens)}
        metrics: dict[str, float] = {}
        for name, window in self._windows.items():
            different, at = keys[name][used].unique(return_inverse=True)
            empty = torch.zeros(len(different), dtype=torch.float64)
            sums, counts = (empty.index_add(0, at, each) for each in (d[used], torch.ones_like(d[used])))
            window.append(_Step(different, sums, counts))
            bias, noise = persistent(window)
            metrics |= {f"mismatch/{name}": bias, f"mismatch/{name}_noise": noise}
        return metrics


def persistent(steps: deque[_Step]) -> tuple[float, float]:
    """Return the root mean square of the keys' mean d, and what noise alone would reach, in nats; both 0 if no key
    occurs in two steps.

    For one key, S is the sum of d in a step, and n the number of tokens; Σ goes over steps. The square of its mean d is
    estimated by ((Σ S)² - Σ S²) / ((Σ n)² - Σ n²). Under noise alone this has the variance
    2 ((Σ S²)² - Σ S⁴) / ((Σ n)² - Σ n²)². Keys count by their tokens. If their mean is negative, it counts as 0.
    """
    keys, at = torch.cat([step.keys for step in steps]).unique(return_inverse=True)
    sums, counts = torch.cat([step.sums for step in steps]), torch.cat([step.counts for step in steps])

    def total(values: Tensor) -> Tensor:
        return torch.zeros(len(keys), dtype=torch.float64).index_add(0, at, values)

    pairs = total(counts) ** 2 - total(counts**2)
    several = pairs > 0
    if not bool(several.any()):
        return 0.0, 0.0
    squares = total(sums**2)
    weight = total(counts)[several]
    weight /= weight.sum()
    mean_square = (total(sums) ** 2 - squares)[several] / pairs[several]
    variance = 2 * (squares**2 - total(sums**4))[several].clamp(min=0) / pairs[several] ** 2
    deviation = (weight**2 * variance).sum().sqrt()
    return (weight * mean_square).sum().clamp(min=0).sqrt().item(), (CERTAINTY * deviation).sqrt().item()

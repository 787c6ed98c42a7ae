"""Agreement token by token. Every mean and fraction divides by the tokens with finite d."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8rl.rl.mismatch.statistics import MAX_EXPONENT, bounded, distribution, effective_sample_size, order_statistics

EXTREME_FACTORS = (2, 10)
"""Factors between the two probabilities of a token beyond which it counts as extreme."""
NEARLY = 1e-6
"""nats; about the rounding of a float32 logprob."""


def token_metrics(d: Tensor, train: Tensor, rollout: Tensor, cap: float) -> dict[str, float]:
    """`mismatch/...` over single tokens; d, train, rollout: float64 [N], finite, with d = train - rollout."""
    abs_d, rho = d.abs(), bounded(d).exp()
    abs_order, rho_order = order_statistics(abs_d), bounded(order_statistics(d)).exp()
    above, below = rho > cap, rho < 1.0 / cap
    values = {
        "mismatch/tis_clipfrac": _fraction(above),
        "mismatch/tis_clipfrac_two_sided": _fraction(above | below),
        "mismatch/k1_kl": -d.mean() + 0.0,  # + 0.0 turns -0.0 into 0.0
        "mismatch/k2_kl": (d**2).mean() / 2,
        "mismatch/k3_kl": (bounded(d).expm1() - d).mean(),  # rho - 1 - d without its cancellation
        "mismatch/chi2_token": bounded(2 * d).expm1().mean(),
        "mismatch/ess": effective_sample_size(rho),
        "mismatch/exact_frac": _fraction(d == 0),
        "mismatch/near_exact_frac": _fraction(abs_d <= NEARLY),
        **{f"mismatch/extreme_frac_{factor}": _fraction(abs_d > math.log(factor)) for factor in EXTREME_FACTORS},
    }
    metrics = {name: value.item() for name, value in values.items()}
    metrics |= distribution("mismatch/train_rollout_logprob_abs_diff", abs_d.mean(), abs_order)
    metrics |= distribution("mismatch/token_mult_prob_error", bounded(abs_d).exp().mean(), bounded(abs_order).exp())
    metrics |= distribution("mismatch/rho", rho.mean(), rho_order)
    metrics |= distribution("mismatch/tis_weight", rho.clamp(max=cap).mean(), rho_order.clamp(max=cap))
    correlation = pearson(_probability(train), _probability(rollout))
    return metrics if correlation is None else metrics | {"mismatch/pearson": correlation}


def pearson(x: Tensor, y: Tensor) -> float | None:
    """Pearson's correlation of two float64 [N], 1.0 exactly for equal ones; None where one of them is constant."""
    # Compared, not computed: the deviations of a constant from its rounded mean need not be zero.
    if bool(x.min() == x.max()) or bool(y.min() == y.max()):
        return None
    x, y = x - x.mean(), y - y.mean()
    # One root of the product, since sqrt(a * a) is a in floating point while sqrt(a) * sqrt(a) need not be.
    norms = ((x * x).sum() * (y * y).sum()).sqrt()
    return None if norms == 0 else float(((x * y).sum() / norms).clamp(-1.0, 1.0))


def _probability(logprobs: Tensor) -> Tensor:
    return logprobs.clamp(max=MAX_EXPONENT).exp()


def _fraction(condition: Tensor) -> Tensor:
    return condition.sum(dtype=torch.float64) / condition.numel()

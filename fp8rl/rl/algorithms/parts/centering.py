"""Score centering: what a bias between sampler and trainer adds to the gradient, taken out again.

Where tokens are sampled from q and scored by p, the expected score of a token, E_q[w(p/q) ∇ log p], is not zero as it
is where both are one. With advantages that do not average to zero it drags the policy, step after step. Centering
subtracts it from each token's score ("Score Centering", arXiv 2609.20807, equations 9, 12 and 14).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.rl.algorithms.parts.corrections import Correction

LEAST_TAIL = 1e-6
"""The least probability of all tokens beyond the k likeliest: below it, the difference from 1 is rounding."""


def expected_score(own: Tensor, engines: Tensor, used: Tensor, correction: Correction) -> Tensor:
    """Return a number [B, S] whose gradient is that of the expected score at each token, 0 where it is not used.

    Σ (q w(p/q) - α p) log p over the sampler's k likeliest tokens; only log p has a gradient. In the tail q counts as
    ρ p, ρ = (1 - Σ q) / (1 - Σ p), so that α = ρ w(1/ρ), as Σ p ∇ log p is 0 over the whole vocabulary. Where both
    sides have the same bits the factors are 0, for any k and any weight. In float64.

    Args:
        own: [B, S, k], the trainer's log-probabilities, with gradient; engines: [B, S, k], the sampler's.
        used: bool [B, S].
        correction: of whose tokens each has its own weight.
    """
    log_p = torch.where(used.unsqueeze(-1), own, 0.0).double()
    log_q = torch.where(used.unsqueeze(-1), engines, 0.0).double()
    p, q = log_p.detach().exp(), log_q.exp()
    tails = [(1.0 - mass.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL) for mass in (q, p)]
    log_rho = (tails[0] / tails[1]).log()
    alpha = log_rho.exp() * correction.of_token(-log_rho)
    factors = q * correction.of_token(log_p.detach() - log_q) - alpha * p
    return (factors * log_p).sum(-1).to(own.dtype)

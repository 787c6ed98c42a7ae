"""Score centering: removes from the gradient what a bias between sampler and trainer adds to it.

A token is sampled from q and scored by p. Its expected score E_q[w(p/q) ∇ log p] is 0 if q = p. Otherwise it can differ
from 0. With advantages whose mean is not 0 it then drags the policy at every step. Centering subtracts it from each
token's score ("Score Centering", arXiv 2609.20807, equations 9, 12 and 14).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.rl.algorithms.parts.corrections import Correction

LEAST_TAIL = 1e-6
"""The least probability of the tail, all tokens beyond the k likeliest. A smaller 1 - Σ p would be rounding."""


def expected_score(own: Tensor, engines: Tensor, used: Tensor, correction: Correction) -> Tensor:
    """Return a number [B, S] whose gradient is the expected score of each token; 0 on unused tokens.

    Σ (q w(p/q) - α p) log p over the sampler's k likeliest tokens; only log p has a gradient. In the tail q counts as
    ρ p, with ρ = (1 - Σ q) / (1 - Σ p). Then α = ρ w(1/ρ), because Σ p ∇ log p over the vocabulary is 0. Where both
    sides have the same bits the factors are 0, for any k and any weight. Computed in float64.

    Args:
        own: [B, S, k], the trainer's log-probabilities, with gradient; engines: [B, S, k], the sampler's.
        used: bool [B, S].
        correction: one with weights per token.
    """
    log_p = torch.where(used.unsqueeze(-1), own, 0.0).double()
    log_q = torch.where(used.unsqueeze(-1), engines, 0.0).double()
    p, q = log_p.detach().exp(), log_q.exp()
    tails = [(1.0 - mass.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL) for mass in (q, p)]
    log_rho = (tails[0] / tails[1]).log()
    alpha = log_rho.exp() * correction.of_token(-log_rho)
    factors = q * correction.of_token(log_p.detach() - log_q) - alpha * p
    return (factors * log_p).sum(-1).to(own.dtype)

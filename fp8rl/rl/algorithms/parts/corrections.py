"""Corrections for tokens that trainer and engine give different probabilities: importance weights and rejections.

rho = e^d is a token's ratio of trainer to rollout probability at the weights that sampled it, with d = old - rollout
logprob. A sequence's ratio is the product of its tokens' rho. Its geometric ratio is their geometric mean.

    truncated importance sampling (TIS)   min(ratio, cap), the ratio being the token's (Yao et al. 2025, "Your Efficient
                                          RL Framework Secretly Brings You Off-Policy RL Training") or the sequence's
                                          (Liu, Li et al. 2025, "When Speed Kills Stability")
    icepop      rho of a token within [low, high]; others are rejected (Ring-1T report, "Every Step Evolves", 2025)
    mis         the ratio of a sequence up to high; others are rejected (masked importance sampling, "When Speed Kills
                Stability")
    geometric   the TIS weight in a sequence whose geometric ratio is within [low, high]; others are rejected. verl
                bounds the inverse ratio, rollout to trainer: its [low, high] is [1/high, 1/low] here
    veto        any sequence with a token whose rho is below `veto` is rejected (as in slime's and SkyRL's mismatch
                helpers)

`tis_cap` bounds the weights of icepop and mis as well. A rejected token gives no loss and no gradient. The loss is
divided by the counts of the whole batch, rejected tokens included, so a rejection never makes other tokens count more.
(verl divides by the counts that are left.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fp8rl.numerics.core.section import Section
from fp8rl.rl.mismatch.logprobs import clamp_exponent


class RejectionSection(Section):
    """Tokens or sequences whose ratio is outside [low, high] give no loss; the loss's denominators still count them."""

    name: Literal["icepop", "geometric", "mis"]
    """The rule. `icepop`: rejects a token by its ratio trainer / rollout, and weights it by this ratio. `geometric`:
    rejects a sequence by the geometric mean of its tokens' ratios. `mis`: rejects a sequence by the product of its
    tokens' ratios, and weights it by this product."""
    low: float | None = Field(default=None, ge=0.0)
    """Smallest accepted ratio. Null: 0.5 for icepop, 0.99 for geometric; mis has no lower bound."""
    high: float | None = None
    """Largest accepted ratio. Null: 5.0 for icepop, 1.01 for geometric, 2.0 for mis."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        bounds = BOUNDS.get(str(values.get("name"))) if isinstance(values, dict) else None
        return values if bounds is None else bounds | {key: x for key, x in values.items() if x is not None}

    @model_validator(mode="after")
    def _around_one(self) -> RejectionSection:
        if self.name == "mis" and self.low is not None:
            raise ValueError(f"found low={self.low} with mis, expected none, as mis has no lower bound. Remove low")
        if not (self.low or 0.0) < 1.0 < (self.high or 0.0):
            raise ValueError(
                f"found low={self.low} and high={self.high}, expected low < 1 < high, as 1 is the ratio of equal "
                "probabilities. Correct the bounds"
            )
        return self


BOUNDS = {"icepop": {"low": 0.5, "high": 5.0}, "geometric": {"low": 0.99, "high": 1.01}, "mis": {"high": 2.0}}
"""Default bounds: for icepop from the INTELLECT-3 report, for geometric and mis from published recipes."""

OWN_WEIGHT = ("icepop", "mis")
"""Rejections whose ratio is also the weight of the tokens that they keep. As published, they have no other cap."""


@dataclass(frozen=True)
class Correction:
    """The importance weight and the rejection of a run."""

    tis_cap: float | None = None
    """Largest weight, at least 1. None: no cap; all weights are then 1, unless the rejection is icepop or mis."""
    level: Literal["token", "sequence"] = "token"
    """Whether the TIS weight is a token's or a sequence's."""
    rejection: Literal["icepop", "geometric", "mis"] | None = None
    """The rule by which tokens are rejected; None keeps every token."""
    low: float = 0.0
    """Least accepted ratio."""
    high: float = math.inf
    """Largest accepted ratio."""
    veto: float | None = None
    """If a token's ratio is below this, its sequence is rejected; None: no such rule."""

    @property
    def weighs(self) -> bool:
        """Return whether weights can differ from 1."""
        return self.tis_cap is not None or self.rejection in OWN_WEIGHT

    @property
    def rejects(self) -> bool:
        """Return whether a token can be left out of the loss."""
        return self.rejection is not None or self.veto is not None

    @property
    def summary(self) -> list[str]:
        """Describe the weight, the rejection and the veto, in a few words each."""
        level = {"icepop": "token", "mis": "sequence"}.get(self.rejection or "", self.level)
        cap = "" if self.tis_cap is None else f", at most {self.tis_cap:g}"
        return [
            *[f"w = the {level}'s ratio trainer / rollout{cap}"] * self.weighs,
            *[f"{self.rejection} rejects outside [{self.low:g}, {self.high:g}]"] * (self.rejection is not None),
            *([f"rejects sequences with a ratio below {self.veto:g}"] if self.veto is not None else []),
        ]

    def of_token(self, d: Tensor) -> Tensor:
        """Return the weights of tokens with log-ratios d, 0 where icepop rejects. Only for weights per token."""
        ratio = clamp_exponent(d).exp()
        weight = self._weight(ratio)
        return torch.where(self._outside(ratio), 0.0, weight) if self.rejection == "icepop" else weight

    def __call__(self, old: Tensor, rollout: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [B, S] in old's dtype without gradient, 1 on unused tokens; and the accepted tokens, bool
        [B, S]: used and not rejected.

        A token whose trainer logprob is not finite gets the weight NaN. Neither the token nor its sequence is rejected,
        so that the loss becomes NaN and the fault is noticed.

        Args:
            old: [B, S], the trainer's logprobs at the weights that sampled. Rows are whole sequences.
            rollout: [B, S], the engine's.
            used: bool [B, S], the tokens that the objective uses.
        """
        d = torch.where(used, old.detach().double() - rollout.double(), 0.0)
        d = torch.where(d.isfinite(), d, torch.nan)
        total = d.sum(dim=1, keepdim=True)
        token, sequence = clamp_exponent(d).exp(), clamp_exponent(total).exp().expand_as(d)
        if self.rejection == "icepop":
            weight, judged = token, token
        elif self.rejection == "mis":
            weight, judged = sequence, sequence
        else:
            weight = token if self.level == "token" else sequence
            judged = clamp_exponent(total / used.sum(dim=1, keepdim=True).clamp(min=1)).exp().expand_as(d)
        outside = self._outside(judged)
        if self.veto is not None:
            outside |= (token < self.veto).any(dim=1, keepdim=True)
        return torch.where(used, self._weight(weight), 1.0).to(old.dtype), used & ~outside

    def _weight(self, ratio: Tensor) -> Tensor:
        weight = ratio if self.weighs else torch.ones_like(ratio)
        return weight if self.tis_cap is None else weight.clamp(max=self.tis_cap)

    def _outside(self, ratio: Tensor) -> Tensor:
        return (ratio < self.low) | (ratio > self.high)


# Score centering (arXiv 2609.20807, equations 9, 12 and 14): a token is sampled from q and scored by p. Its expected
# score E_q[w(p/q) ∇ log p] is 0 if q = p. Otherwise it can differ from 0, and with advantages whose mean is not 0 it
# drags the policy at every step. Centering subtracts it from each token's score.

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

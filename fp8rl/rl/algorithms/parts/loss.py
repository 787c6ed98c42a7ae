"""The loss of an update by the policy gradient: for each token a surrogate, to be minimised, a KL term and a weight;
then the mean over tokens, with the denominators of the whole batch.

d = logprob - old is a token's log-ratio of the present policy to the old one (`algorithm.ratio`). r = e^d, A is the
token's advantage, and sg(x) is x without gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fp8rl.rl.algorithms.base import used_tokens
from fp8rl.rl.algorithms.parts.corrections import Correction, expected_score
from fp8rl.rl.algorithms.parts.penalties import ESTIMATORS, KlSection, k3
from fp8rl.rl.mismatch.logprobs import clamp_exponent
from fp8rl.trainer.step.batch import LIKELY_LOGPROBS, OWN_LIKELY, ObjectiveOutput, TokenBatch

LEARNT_FROM = "learnt_from"
"""The batch field that marks the tokens to learn from: 1 on them, 0 on the tokens of filtered answers."""


@dataclass(frozen=True)
class PolicyObjective:
    """The loss of an update: the mean over tokens of (surrogate + KL term) · w - entropy bonus. Rejected and filtered
    tokens count as 0. With centering the token's advantage times its expected score is added.

    old is the rollout logprob under `bypass`, else `fields["old_logprobs"]` where present, else the logprob itself,
    detached. The KL term needs `fields["reference_logprobs"]`. `rl.algorithms.parts.corrections` computes the weight w
    and the rejection from old and rollout logprobs, without gradient. Tokens where `fields["learnt_from"]` is 0 are
    filtered. The denominators of loss and metrics count rejected and filtered tokens. Loss, denominators and metrics
    leave out a token whose rollout logprob is not finite.
    """

    surrogate: Callable[[Tensor, Tensor, Tensor, Tensor, TokenBatch], Surrogate]
    centers: bool
    correction: Correction
    aggregate: Aggregation
    kl: KlSection
    entropy: float
    bypass: bool

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        used, fields = used_tokens(batch), batch.fields
        old = fields["rollout_logprobs"] if self.bypass else fields.get("old_logprobs", logprobs.detach())
        advantages = torch.where(used, fields["advantages"], 0.0)
        term = self.surrogate(logprobs, old, advantages, used, batch)
        corrects = self.correction.weighs or self.correction.rejects
        weight, accepted = self.correction(old, fields["rollout_logprobs"] if corrects else old, used)
        learnt = used
        if LEARNT_FROM in fields:  # what is not finite is never hidden
            learnt = (fields[LEARNT_FROM] > 0) | ~logprobs.detach().isfinite()
        kept = accepted & learnt
        losses, kl = term.losses, self.kl
        reference = fields.get("reference_logprobs")
        x = None if reference is None else torch.where(used, logprobs - reference, 0.0)
        if kl.loss.coefficient and x is not None:
            sampled_by = token_ratio(logprobs, old, used).detach()
            losses = losses + kl.loss.coefficient * sampled_by * ESTIMATORS[kl.loss.estimator](x)
        losses = torch.where(kept, losses * weight, 0.0)
        if self.centers:
            centered = accepted
            if self.correction.rejection == "icepop":  # rejected tokens have weight 0, and belong to the expectation
                centered = Correction(veto=self.correction.veto)(old, fields["rollout_logprobs"], used)[1]
            score = expected_score(fields[OWN_LIKELY], fields[LIKELY_LOGPROBS], used, self.correction)
            losses = losses + torch.where(centered & learnt, advantages * score, 0.0)
        if self.entropy:
            losses = losses - self.entropy * torch.where(kept, entropy, 0.0)
        loss = self.aggregate(losses, used)

        def token_mean(values: Tensor) -> Tensor:
            return torch.where(used, values, 0.0).sum().detach() / self.aggregate.tokens

        metrics = {
            "train/ratio_mean": token_mean(term.ratio),
            "train/clip_fraction": token_mean((term.below | term.above).float()),
            "train/clip_fraction_low": token_mean(term.below.float()),
            "train/clip_fraction_high": token_mean(term.above.float()),
            "train/entropy": token_mean(entropy),
        }
        if x is not None:
            metrics["train/kl"] = token_mean(k3(x))
        if self.correction.weighs:
            metrics["train/tis_weight_mean"] = token_mean(weight * accepted)
        if self.correction.rejects:
            metrics["train/rejected_tokens"] = token_mean((~accepted).float())
            rejected = used.any(dim=1) & ~accepted.any(dim=1)
            metrics["train/rejected_sequences"] = rejected.sum() / self.aggregate.sequences
        return ObjectiveOutput(loss, metrics)


# Surrogates.


@dataclass(frozen=True)
class Surrogate:
    """The loss of each token. Values of unused tokens mean nothing; their gradients are finite."""

    losses: Tensor
    """[B, S] with gradient."""
    ratio: Tensor
    """The ratio that was clipped."""
    below: Tensor
    """bool [B, S], where the lower bound of the clip changed a term."""
    above: Tensor
    """bool [B, S], where the upper bound of the clip changed a term."""


def token_ratio(logprobs: Tensor, old: Tensor, used: Tensor) -> Tensor:
    """Return r; it is 1 on unused tokens, so that neither their values nor their gradients can be NaN."""
    return _log_ratio(logprobs, old, used).exp()


def sequence_ratio(logprobs: Tensor, old: Tensor, used: Tensor) -> Tensor:
    """Return s = e^(mean of d over the sequence) at each of its tokens, with the gradient of the token's own logprob.

    sg(s) · e^(logprob - sg(logprob)): with one advantage per sequence and the mean over its tokens, the gradient is the
    gradient of s itself (GSPO-token; Zheng et al. 2025, "Group Sequence Policy Optimization").
    """
    d = _log_ratio(logprobs, old, used)
    mean = d.sum(dim=1, keepdim=True) / used.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(used, mean.detach() + d - d.detach(), 0.0).exp()


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Surrogate:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO; Schulman et al. 2017). With `dual`, at most -A dual where A < 0,
    so that one very large ratio does not dominate the step (dual clip; Ye et al. 2020)."""
    plain, cut = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    losses, changed = torch.maximum(plain, cut), cut > plain
    above = changed & (advantages > 0)
    if dual is not None:
        bound = -advantages * dual
        ruled = (advantages < 0) & (losses > bound)
        losses, above = torch.where(ruled, bound, losses), above | ruled
    return Surrogate(losses, ratio, changed & (advantages < 0), above)


def clipped_weight(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, used: Tensor, low: float, high: float
) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) · A · logprob: a clipped token keeps its gradient, with a bounded weight (CISPO;
    MiniMax 2025, "MiniMax-M1")."""
    detached = ratio.detach()
    weight = detached.clamp(1.0 - low, 1.0 + high)
    losses = -weight * advantages * torch.where(used, logprobs, 0.0)
    return Surrogate(losses, detached, detached < 1.0 - low, detached > 1.0 + high)


def _log_ratio(logprobs: Tensor, old: Tensor, used: Tensor) -> Tensor:
    return clamp_exponent(torch.where(used, logprobs - old, 0.0))


AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@dataclass(frozen=True)
class Aggregation:
    """The mean of token losses over a batch. Each rank computes the share of its rows, and the shares add up to the
    mean.

    `token_mean`: every token counts the same (DAPO). `seq_mean_token_mean`: every sequence counts the same, by the mean
    of its tokens (GRPO as published, GSPO). `seq_mean_token_sum`: by the sum of its tokens. `seq_mean_token_sum_norm`:
    by the sum of its tokens over a constant length, so that an answer's length does not weigh its tokens (Dr. GRPO).
    """

    mode: AggregationMode
    tokens: int
    """Used tokens of the whole batch."""
    sequences: int
    """Rows of the whole batch with at least one used token."""
    length: int = 1
    """The length that `seq_mean_token_sum_norm` divides by."""

    @classmethod
    def of(cls, used: Tensor, mode: AggregationMode, length: int = 1) -> Aggregation:
        """Take the denominators from the whole batch. used: bool [B, S]."""
        return cls(mode, int(used.sum()), int(used.any(dim=1).sum()), length)

    def __call__(self, losses: Tensor, used: Tensor) -> Tensor:
        """Return these rows' share of the mean. losses: [b, S], 0 on tokens that are not used."""
        if self.mode == "token_mean":
            return losses.sum() / self.tokens
        sums = losses.sum(dim=1)
        if self.mode == "seq_mean_token_mean":
            sums = sums / used.sum(dim=1).clamp(min=1)
        elif self.mode == "seq_mean_token_sum_norm":
            sums = sums / self.length
        return sums.sum() / self.sequences

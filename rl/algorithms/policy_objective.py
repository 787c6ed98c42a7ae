"""The loss of an update by the policy gradient: what a surrogate, a KL term and an entropy bonus add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fp8rl.rl.algorithms.base import used_tokens
from fp8rl.rl.algorithms.parts.aggregation import Aggregation
from fp8rl.rl.algorithms.parts.corrections import Correction
from fp8rl.rl.algorithms.parts.kl import ESTIMATORS, KlConfig, k3
from fp8rl.rl.algorithms.parts.surrogates import Surrogate, token_ratio
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.objective import ObjectiveOutput


class HasSurrogate(Protocol):
    """An algorithm that says what the loss of a token is."""

    def surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor, used: Tensor) -> Surrogate:
        """Shapes as of `rl.algorithms.policy_gradient.PolicyGradient.surrogate`."""
        ...


@dataclass(frozen=True)
class PolicyObjective:
    """The loss of an update: per token (surrogate + KL term) · w, 0 if rejected, less the entropy bonus; their mean.

    old is the rollout logprob under `bypass`, else `fields["old_logprobs"]` where present, else the logprob itself,
    detached. The KL term needs `fields["reference_logprobs"]`. The weight w and the rejection come from old and rollout
    logprobs, see `rl.algorithms.parts.corrections`, without gradient. The denominators, of metrics too, count rejected
    tokens. A token whose rollout logprob is not finite leaves the loss, the denominators and the metrics.
    """

    algorithm: HasSurrogate
    correction: Correction
    aggregate: Aggregation
    kl: KlConfig
    entropy: float
    bypass: bool

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch) -> ObjectiveOutput:
        used, fields = used_tokens(batch), batch.fields
        old = fields["rollout_logprobs"] if self.bypass else fields.get("old_logprobs", logprobs.detach())
        advantages = torch.where(used, fields["advantages"], 0.0)
        term = self.algorithm.surrogate(logprobs, old, advantages, used)
        # Without rollout logprobs nothing is corrected: every ratio is 1.
        weight, kept = self.correction(old, fields.get("rollout_logprobs", old), used)
        losses, kl = term.losses, self.kl
        x = torch.where(used, logprobs - fields["reference_logprobs"], 0.0) if kl.needs_reference else None
        if kl.loss.coefficient and x is not None:
            sampled_by = token_ratio(logprobs, old, used).detach()
            losses = losses + kl.loss.coefficient * sampled_by * ESTIMATORS[kl.loss.estimator](x)
        losses = torch.where(kept, losses * weight, 0.0)
        if self.entropy:
            losses = losses - self.entropy * torch.where(used, entropy, 0.0)
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
            metrics["train/tis_weight_mean"] = token_mean(weight * kept)
        if self.correction.rejects:
            metrics["train/rejected_tokens"] = token_mean((~kept).float())
            rejected = used.any(dim=1) & ~kept.any(dim=1)
            metrics["train/rejected_sequences"] = rejected.sum() / self.aggregate.sequences
        return ObjectiveOutput(loss, metrics)


def usable_tokens(batch: TokenBatch, needed: Sequence[str]) -> Tensor:
    """The tokens that a loss can use, bool [B, S].

    Raises:
        ValueError: a needed field is missing, an advantage of a used token is not finite, or no token is usable.
    """
    missing = [name for name in needed if name not in batch.fields]
    if missing:
        raise ValueError(f"fields: found {sorted(batch.fields)}, expected also {missing}; add them to the batch")
    used = used_tokens(batch)
    if not bool(torch.isfinite(batch.fields["advantages"][used]).all()):
        raise ValueError("advantages: found non-finite values on target tokens, expected finite ones")
    if not bool(used.any()):
        raise ValueError(
            f"found no usable token among {int(batch.loss_mask.sum())} target tokens, expected at least one; "
            "the rollout logprobs are missing or not finite, so check the engine"
        )
    return used

"""Metrics of how far the policy has moved since older weights sampled a token.

d = trainer logprob - rollout logprob of a token that older weights than the trainer's have sampled. In exact mode the
engine's logprob is what a trainer at those weights would say, so that d is the change of the policy and nothing else;
in native mode the disagreement of the two sides is in it too.
"""

from __future__ import annotations

from torch import Tensor

from fp8rl.rl.mismatch.buckets import OLDEST
from fp8rl.rl.mismatch.statistics import clamp_exponent, effective_sample_size


def drift_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, versions: Tensor, version: int
) -> dict[str, float]:
    """`drift/...` over the tokens of older versions whose d is finite; nothing where there are none.

    Args:
        train_logprobs, rollout_logprobs: float [B, S].
        mask: bool [B, S], the sampled tokens.
        versions: int64 [B, S], the weight version that sampled each token.
        version: the trainer's while scoring.
    """
    difference = train_logprobs.detach().double() - rollout_logprobs.double()
    old = mask & (versions < version) & difference.isfinite()
    if not bool(old.any()):
        return {}
    d, ages = difference[old], (version - versions[old]).clamp(max=OLDEST)
    metrics = {
        "drift/tokens": float(d.numel()),
        "drift/logprob_abs_diff_mean": d.abs().mean().item(),
        "drift/logprob_abs_diff_max": d.abs().max().item(),
        "drift/k1_kl": -d.mean().item() + 0.0,
        "drift/k3_kl": (clamp_exponent(d).expm1() - d).mean().item(),
        "drift/ess": effective_sample_size(clamp_exponent(d).exp()).item(),
    }
    for age in ages.unique().tolist():
        here = d[ages == age]
        metrics[f"drift/tokens_age_{age}"] = float(here.numel())
        metrics[f"drift/abs_diff_mean_age_{age}"] = here.abs().mean().item()
    return metrics


def tokens_by_age(versions: Tensor, version: int) -> dict[int, int]:
    """Return how many of the tokens are how many versions older than `version`, `OLDEST` for that and more; int64
    [N]."""
    ages, counts = (version - versions).clamp(max=OLDEST).unique(return_counts=True)
    return dict(zip(ages.tolist(), counts.tolist(), strict=True))

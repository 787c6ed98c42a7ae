"""Metrics of how far the policy has moved since older weights sampled a token.

d = trainer logprob - rollout logprob of a token that older weights than the trainer's have sampled. In exact mode the
engine's logprob is what a trainer at those weights would say, so that d is the change of the policy and nothing else;
in native mode the disagreement of the two sides is in it too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.rl.mismatch.buckets import OLDEST
from fp8rl.rl.mismatch.logprobs import clamp_exponent, effective_sample_size


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


# Whether the trainer, with its own logits and an answer's seed, draws the tokens that the engine drew.

NOT_DRAWN = -1


def redraw_metrics(draws: Tensor, tokens: Tensor, mask: Tensor) -> dict[str, float]:
    """`mismatch/redraw_...` of a batch; nothing where no token was drawn again.

    Args:
        draws: int64 [B, S], the trainer's; `NOT_DRAWN` where it drew none.
        tokens: int64 [B, S].
        mask: bool [B, S], the tokens that were sampled at the weights that the trainer drew with.
    """
    drawn = mask & (draws != NOT_DRAWN)
    count = int(drawn.sum())
    if not count:
        return {}
    same = int((drawn & (draws == tokens)).sum())
    return {"mismatch/redraw_frac": same / count, "mismatch/redraw_tokens": float(count)}


# Agreement of trainer and engine on the experts of each token. These are a set in each layer: their order, which
# near-ties may swap, changes no result.

_CHUNK = 1 << 22
"""Route entries compared at a time, little beside the memory of the routes; a small batch is one chunk."""


def router_agreement(train_routes: Tensor, rollout_routes: Tensor, mask: Tensor) -> dict[str, float]:
    """`mismatch/router_...` of one batch; meanings and denominators stand in `rl.record.metrics`.

    A (token, layer) pair counts where both sides know all of its K experts; the others are counted as unknown. Its
    agreement is |trainer's ∩ engine's| / K. If no pair is known only the counts are returned.

    Args:
        train_routes: int16 [B, S, L, K], the trainer's own choice, K different experts or -1 where unknown.
        rollout_routes: int16 [B, S, L, K], likewise the engine's.
        mask: bool [B, S], the tokens to compare.

    Returns:
        Finite floats by metric name.

    Raises:
        ValueError: the shapes do not fit.
    """
    if train_routes.shape != rollout_routes.shape or train_routes.shape[:2] != mask.shape or train_routes.dim() != 4:
        shapes = [list(t.shape) for t in (train_routes, rollout_routes, mask)]
        raise ValueError(
            f"found shapes {shapes} of trainer routes, rollout routes and mask, expected [B, S, L, K] twice and [B, S]"
        )
    _, width, layers, top_k = train_routes.shape
    rows = max(1, _CHUNK // max(1, width * layers * top_k))
    chunks = zip(train_routes.split(rows), rollout_routes.split(rows), mask.split(rows))
    shared = torch.cat([_shared_experts(train[chosen], rollout[chosen]) for train, rollout, chosen in chunks])

    known, differs = shared >= 0, (shared >= 0) & (shared < top_k)
    pairs, tokens = int(known.sum()), int(known.any(dim=1).sum())
    metrics = {
        "mismatch/router_pairs": float(pairs),
        "mismatch/router_tokens": float(tokens),
        "mismatch/router_unknown_pairs": float(known.numel() - pairs),
    }
    if not pairs:
        return metrics
    totals = list(zip(shared.clamp(min=0).sum(dim=0).tolist(), known.sum(dim=0).tolist()))
    return metrics | {
        "mismatch/router_agreement": sum(total for total, _ in totals) / (pairs * top_k),
        "mismatch/router_differ_frac": int(differs.sum()) / pairs,
        "mismatch/router_token_differ_frac": int(differs.any(dim=1).sum()) / tokens,
        **{
            f"mismatch/router_agreement_layer_{layer}": total / (count * top_k)
            for layer, (total, count) in enumerate(totals)
            if count
        },
    }


def _shared_experts(train: Tensor, rollout: Tensor) -> Tensor:
    """int16 [N, L], how many experts both sides chose, -1 where one does not know; routes: int16 [N, L, K]."""
    known = (train >= 0).all(dim=-1) & (rollout >= 0).all(dim=-1)
    # Most pairs are equal in order too, which costs far less to see than to compare all K x K experts.
    differs = known & (train != rollout).any(dim=-1)
    shared = torch.where(known, train.shape[-1], -1).short()
    matches = train[differs][:, :, None] == rollout[differs][:, None, :]
    shared[differs] = matches.any(dim=-1).sum(dim=-1).short()
    return shared

"""Metrics of how far trainer and engine agree on the experts of each token.

The experts of a token in a layer are a set: their order, which near-ties may swap, changes no result.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22
"""Route entries compared at a time, little beside the memory of the routes; a small batch is one chunk."""


def router_metrics(train_routes: Tensor, rollout_routes: Tensor, mask: Tensor) -> dict[str, float]:
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

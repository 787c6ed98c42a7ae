"""The choice of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8rl.numerics.backend.dispatch import op

SMALLEST_SUM = 1e-20
"""Added to the sum that sigmoids are divided by."""


@op
def top_experts(probs: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the k most probable experts int64 [T, k] of probs [T, E]; among equals the lower ids."""
    return torch.sort(probs, dim=-1, descending=True, stable=True).indices[:, :top_k]


@op
def route(
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    choose: Callable[[torch.Tensor, int], torch.Tensor] = top_experts,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax in FP32 over all experts, then the top k, then (if asked) their probabilities divided by their sum.

    logits [T, E] -> probabilities FP32 [T, k] and experts int64 [T, k], in ascending expert id within a token, which is
    also the order in which their outputs are added (`combine`). Gradients flow through the probabilities alone.

    choose: takes the experts from the detached probabilities, with the signature of `top_experts`; replaying a route
        that was chosen elsewhere changes nothing else.
    """
    probs = logits.float().softmax(-1)
    experts = choose(probs.detach(), top_k).sort(-1).values
    chosen = probs.gather(1, experts)
    return (chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen), experts


@op
def route_sigmoid(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    groups: int,
    kept_groups: int,
    renormalize: bool,
    factor: float,
    choose: Callable[[torch.Tensor, int], torch.Tensor] = top_experts,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid in FP32, the top k of sigmoid + bias within the best groups, and the sigmoids of the chosen, scaled.

    The router of DeepSeek-V3 (arXiv 2412.19437, 2.1.2) and GLM-4.5. logits FP32 [T, E], bias FP32 [E]: experts are
    chosen by sigmoid(logit) + bias. Of `groups` equal runs of experts those `kept_groups` remain whose two best add up
    highest, and the k best experts of them are taken; of equals the lower group and the lower id. Probabilities are
    without bias: divided by their sum + 1e-20 if `renormalize`, then times `factor`.

    Returns probabilities FP32 [T, k] and experts int64 [T, k], in ascending expert id within a token. Gradients flow
    through the probabilities alone. choose: as in `route`, of what experts are chosen by, -inf outside the kept groups.
    """
    scores = sigmoid(logits.float())
    experts = choose(kept_scores(scores.detach() + bias, groups, kept_groups), top_k).sort(-1).values
    chosen = scores.gather(1, experts)
    return (chosen / (chosen.sum(-1, keepdim=True) + SMALLEST_SUM) if renormalize else chosen) * factor, experts


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute 1 / (1 + exp(-x)).

    torch.sigmoid takes another exp for the last few elements of a CPU tensor than for the others, so that a token's
    bits would depend on its place in the batch.
    """
    return 1 / (1 + torch.exp(-x))


def kept_scores(scores: torch.Tensor, groups: int, kept_groups: int) -> torch.Tensor:
    """Return scores [T, E] with -inf outside the `kept_groups` groups whose two best scores add up highest."""
    if groups == kept_groups:
        return scores
    best = scores.unflatten(-1, (groups, -1)).sort(dim=-1, descending=True, stable=True).values
    order = (best[..., 0] + best[..., 1]).sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(best[..., 0], dtype=torch.bool).scatter(1, order[:, :kept_groups], True)
    return scores.masked_fill(~kept.repeat_interleave(scores.shape[1] // groups, 1), -torch.inf)

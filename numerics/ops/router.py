"""The choice of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from numerics.backend.dispatch import op


@op
def top_experts(probs: torch.Tensor, top_k: int) -> torch.Tensor:
    """probs [T, E] -> the k most probable experts int64 [T, k]; of equally probable ones those with the lower id."""
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

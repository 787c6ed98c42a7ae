"""The choice of experts."""

from __future__ import annotations

import torch


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax in FP32 over all experts, then the top k, then (if asked) their probabilities divided by their sum.

    logits [T, E] -> probabilities FP32 [T, k] and experts int64 [T, k], in ascending expert id within a token, which is
    also the order in which their outputs are added (`combine`). Equal probabilities go to the lower expert id.
    """
    probs = logits.float().softmax(-1)
    ranked = torch.sort(probs.detach(), dim=-1, descending=True, stable=True).indices
    experts = ranked[:, :top_k].sort(-1).values
    chosen = probs.gather(1, experts)
    return (chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen), experts

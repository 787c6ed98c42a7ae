"""Log-probabilities of given tokens."""

from __future__ import annotations

import torch


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits / temperature) at `tokens`, and the entropy of that distribution in nats.

    logits [..., V] of any float dtype, tokens int64 [...]. Everything in FP32: one division, then log_softmax over the
    whole vocabulary in one reduction. Returns FP32 [...] twice; the entropy carries no gradient.
    """
    wide = logits.float()
    logps = (wide / torch.tensor(temperature, dtype=torch.float32, device=wide.device)).log_softmax(-1)
    detached = logps.detach()
    entropy = -(detached.exp() * detached).sum(-1)
    return logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy

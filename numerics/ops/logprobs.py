"""Log-probabilities of given tokens."""

from __future__ import annotations

import torch

from numerics.dispatch import op


@op
def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits / temperature) at `tokens`, and the entropy of that distribution in nats.

    logits [..., V] of any float dtype, tokens int64 [...], temperature a number or a tensor [...], one of each row.
    Everything in FP32: one division, then log_softmax over the whole vocabulary in one reduction. A token of logit -inf
    adds 0 to the entropy. Returns FP32 [...] twice; the entropy carries no gradient.
    """
    divisor = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).unsqueeze(-1)
    logps = (logits.float() / divisor).log_softmax(-1)
    detached = logps.detach()
    entropy = -(detached.exp() * detached.masked_fill(detached == -torch.inf, 0.0)).sum(-1)
    return logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy

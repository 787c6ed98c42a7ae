"""Log-probabilities of given tokens."""

from __future__ import annotations

from typing import Any

import torch

from fp8rl.numerics.backend.dispatch import op


@op
def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits / temperature) at `tokens`, and the entropy of that distribution in nats.

    logits [..., V] of any float dtype, tokens int64 [...], temperature a number or a tensor [...], one of each row.
    Everything in FP32: one division, then log_softmax over the whole vocabulary in one reduction. A token of logit -inf
    adds 0 to the entropy and to its gradient. Returns FP32 [...] twice, both with gradient; that of the entropy costs
    nothing, in memory or in bits, where nobody asks for it.
    """
    divisor = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).unsqueeze(-1)
    logps = (logits.float() / divisor).log_softmax(-1)
    return logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), _Entropy.apply(logps)


class _Entropy(torch.autograd.Function):
    """-Σ p log p over the last axis, of log p [..., V]. It keeps log p alone, which the softmax keeps anyway."""

    @staticmethod
    def forward(ctx: Any, logps: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logps)
        return -(logps.exp() * logps.masked_fill(logps == -torch.inf, 0.0)).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (logps,) = ctx.saved_tensors
        return -logps.exp() * (logps.masked_fill(logps == -torch.inf, 0.0) + 1.0) * grads[0].unsqueeze(-1)

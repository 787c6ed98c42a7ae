"""What is made of a model's output: the one place where final hidden states meet the head.

A chunked head, which never has the logits of all tokens at once, is another `Reading`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from numerics import ops
from numerics.sampling import GREEDY
from trainer.step.batch import UNKNOWN, TokenBatch

Head = Callable[[Tensor], Tensor]
"""Hidden states [S, B, H], or this tensor-parallel rank's part of S -> [B, S, N], logits or whatever the head gives."""


@dataclass(frozen=True)
class Read:
    """What a pass takes of a micro-batch; what it says of the padding is arbitrary.

    Attributes:
        values: FP32 [B, S - 1] with gradient, log-probabilities of tokens 1 to S - 1, or a critic's values before them.
        entropy: likewise, of the distributions that these tokens are scored under; zero of a critic.
        draws: int64 [B, S] as in `PassResult.draws`; None for a batch without seeds.
    """

    values: Tensor
    entropy: Tensor
    draws: Tensor | None = None


Reading = Callable[[Tensor, Head, TokenBatch], Read]


def read_logprobs(hidden: Tensor, head: Head, batch: TokenBatch) -> Read:
    """The `Reading` of a policy, of all logits at once. Logits at t speak of the token at t + 1."""
    logits = head(hidden)
    logprobs, entropy = ops.token_logprobs(logits[:, :-1], batch.tokens[:, 1:], batch.temperature)
    return Read(logprobs, entropy, _draws(logits, batch))


def hidden_states(model: nn.Module, tokens: Tensor) -> Tensor:
    """Run Megatron's model, or its wrapper, up to its head.

    tokens [B, S] -> [S, B, H], or this tensor-parallel rank's part of S: the final hidden states on the last pipeline
    stage, on others what the next is sent.
    """
    gpt = gpt_of(model)
    last, gpt.post_process = gpt.post_process, False  # asked where GPTModel would go on with its output layer
    try:
        hidden: Tensor = model(tokens, position_ids=None, attention_mask=None)
    finally:
        gpt.post_process = last
    return hidden


def gpt_of(model: nn.Module) -> GPTModel:
    """Megatron's model without its data-parallel wrapper."""
    return get_attr_wrapped_model(model, "post_process", return_model_obj=True)


def head_of(model: GPTModel) -> Head:
    """The output projection of a model's last pipeline stage, as Megatron calls it."""

    def head(hidden: Tensor) -> Tensor:
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else None
        out, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=None)
        return out.transpose(0, 1).contiguous()

    return head


@torch.no_grad()
def _draws(logits: Tensor, batch: TokenBatch) -> Tensor | None:
    """The tokens that the batch's seeds draw from logits [B, S, V]."""
    if batch.seeds is None:
        return None
    drawn = torch.full_like(batch.tokens, UNKNOWN)
    for row in (batch.seeds != GREEDY).nonzero().flatten().tolist():
        seen = int(batch.lengths[row]) - 1
        positions = torch.arange(seen, device=logits.device)
        temperatures = torch.full((seen,), batch.temperature, device=logits.device)
        drawn[row, 1 : seen + 1] = ops.draw(logits[row, :seen], temperatures, batch.seeds[row].expand(seen), positions)
    return drawn

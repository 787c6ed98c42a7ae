"""The token embedding of both modes."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


class Embedding(VocabParallelEmbedding):
    """The token embedding, with its gradient summed in FP32.

    torch's CPU kernel sums a token's BF16 gradients in BF16, which loses most of a frequent token's gradient.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """[B, S] -> [B, S, H], or [S / tp, B, H] with sequence parallelism"""
        with torch.no_grad():
            looked_up = super().forward(input_)
        return _EmbeddingGradient.apply(looked_up, self.weight, input_, self)


class _EmbeddingGradient(torch.autograd.Function):
    """Passes the embeddings through and gives their gradient to the weight."""

    @staticmethod
    def forward(ctx: Any, looked_up: Tensor, weight: Tensor, tokens: Tensor, layer: Embedding) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.layer = layer
        ctx.weight = weight
        return looked_up.view_as(looked_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        layer, weight = ctx.layer, ctx.weight
        if layer.reduce_scatter_embeddings:
            grad = gather_from_sequence_parallel_region(grad, tensor_parallel_output_grad=False, group=layer.tp_group)
            tokens = tokens.t()
        tokens, grad = tokens.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if layer.tp_group.size() > 1:
            mine = (tokens >= layer.vocab_start_index) & (tokens < layer.vocab_end_index)
            tokens, grad = tokens[mine] - layer.vocab_start_index, grad[mine]
        total = _sum_by_index(grad, tokens, len(weight))
        return None, total.to(weight.dtype), None, None


def _sum_by_index(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """The sum of the rows of each index, in their order, in FP32: [T, H] -> [count, H]. Atomics would have no order."""
    ordered = rows[index.argsort(stable=True)].float()
    counts = index.bincount(minlength=count)
    return torch.segment_reduce(ordered, "sum", lengths=counts, axis=0, initial=0.0, unsafe=True)

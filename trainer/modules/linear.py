"""Column- and row-parallel linear layers on the shared products."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from numerics import ops
from trainer.modules.norm import norm_weight
from trainer.modules.precision import Precision


class ColumnLinear(ColumnParallelLinear):
    """Output features split over the tensor-parallel ranks."""

    def __init__(self, *args: Any, precision: Precision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision = precision
        self.quantized = precision.spec.quantizes(kind)
        tag_split(self.weight, 0)

    def _forward_impl(self, input: Tensor, weight: Tensor, *unused: Any, **context: Any) -> Tensor:
        input = _whole_sequence(input, context)
        if not self.quantized:
            return ops.linear(input, weight)
        p = self.precision
        return ops.fp8_linear(input, weight, p.cache.dequantized(weight, p.spec.weight), p.spec, p.backward)


class NormColumnLinear(ColumnLinear):
    """RMSNorm, then a column-parallel product: TransformerEngine's LayerNormLinear, with its parameter names."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = norm_weight(self.config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, N], no bias)"""
        normed = ops.rms_norm(input_, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


class RowLinear(RowParallelLinear):
    """Input features split over the tensor-parallel ranks.

    The FP32 partials of the ranks are added in rank order and rounded once. One rank does the same with
    `precision.k_splits` slices of its K, so both layouts give the same bits.
    """

    def __init__(self, *args: Any, precision: Precision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision = precision
        self.quantized = precision.spec.quantizes(kind)
        tag_split(self.weight, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[S, B, K] -> ([S, B, N], no bias), the sequence split over the ranks if there are several."""
        p, weight = self.precision, self.weight
        dequantized = p.cache.dequantized(weight, p.spec.weight) if self.quantized else None
        if self.tp_group.size() == 1:
            if dequantized is None:
                return ops.linear(input_, weight, p.k_splits), None
            return ops.fp8_linear(input_, weight, dequantized, p.spec, p.backward, p.k_splits), None
        if dequantized is None:
            partial = ops.linear_partial(input_, weight)
        else:
            partial = ops.fp8_linear_partial(input_, weight, dequantized, p.spec, p.backward)
        return _MergeOverRanks.apply(partial, input_.dtype, self.tp_group), None


class OutputLinear(ColumnParallelLinear):
    """The output projection (lm_head), never quantized. Its logits are gathered from the ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *unused: Any, **context: Any) -> Tensor:
        return ops.linear(_whole_sequence(input, context), weight)


class Embedding(VocabParallelEmbedding):
    """The token embedding, with its gradient summed in FP32.

    torch's CPU kernel sums a token's BF16 gradients in BF16, which loses most of a frequent token's gradient.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """[B, S] -> [B, S, H], or [S / tp, B, H] with sequence parallelism"""
        with torch.no_grad():
            looked_up = super().forward(input_)
        return _EmbeddingGradient.apply(looked_up, self.weight, input_, self)


def tag_split(weight: Tensor, axis: int) -> None:
    """Tag a weight as split over the tensor-parallel ranks along `axis`.

    Megatron does it while it initialises a weight, which the trainer skips; the gradient norm and mbridge go by it.
    """
    set_tensor_model_parallel_attributes(weight, True, axis, 1)


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
        total = torch.zeros(weight.shape, dtype=torch.float32, device=grad.device)
        total.index_add_(0, tokens, grad.float())
        return None, total.to(weight.dtype), None, None


class _MergeOverRanks(torch.autograd.Function):
    """Exchange FP32 partials so that each rank adds up its part of the sequence, in rank order."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = torch.empty_like(partial)
        dist.all_to_all_single(parts, partial.contiguous(), group=group)
        return ops.merge_partials(list(parts.chunk(group.size())), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = gather_from_sequence_parallel_region(grad, tensor_parallel_output_grad=False, group=ctx.group)
        return whole.float(), None, None


def _whole_sequence(input: Tensor, context: dict[str, Any]) -> Tensor:
    if not context.get("sequence_parallel"):
        return input
    return gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=context["tp_group"])

"""Modules that all families of ops use in exact mode: products, norms and SwiGLU as `numerics.ops` defines them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from fp8rl.numerics import ops
from fp8rl.trainer.modules.families import LayerModules, with_precision
from fp8rl.trainer.modules.precision import Adapter, LayerPrecision
from fp8rl.trainer.modules.weights import norm_weight, sharded_adapter, tag_split


def layer_modules(precision: LayerPrecision) -> LayerModules:
    """Return the modules of a layer. The model has no position embeddings, because the attention core rotates."""
    return LayerModules(
        norm=RMSNorm,
        norm_column_linear=with_precision(precision, NormColumnLinear),
        column_linear=with_precision(precision, ColumnLinear),
        row_linear=with_precision(precision, RowLinear),
        activation=SwiGLU,
    )


class RMSNorm(nn.Module):
    """`ops.rms_norm` over the last axis."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return ops.rms_norm(x, ops.one_plus(self.weight) if self.zero_centered else self.weight, self.eps)


class SwiGLU(MegatronModule):
    """`ops.swiglu` as a module, because Megatron's MLP asks its activation for a part of the checkpoint."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """[..., 2F] -> [..., F]"""
        return ops.swiglu(gate_up)


class _WithAdapter:
    """A product of Megatron whose weight may have an adapter."""

    adapter: Adapter | None = None
    tp_group: dist.ProcessGroup

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return Megatron's state with the adapter added, which is split like the weight."""
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        return sharded | sharded_adapter(self.adapter, self.tp_group, prefix, sharded_offsets, metadata)


class ColumnLinear(_WithAdapter, ColumnParallelLinear):
    """A product whose output features are split over the tensor-parallel ranks."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind
        tag_split(self.weight, 0)

    def _forward_impl(self, input: Tensor, weight: Tensor, *unused: Any, **context: Any) -> Tensor:
        input = _whole_sequence(input, context)
        return ops.add_bias(self.precision.product(self.kind, input, weight, self.adapter), self.bias)


class NormColumnLinear(ColumnLinear):
    """RMSNorm, then a column-parallel product: TransformerEngine's LayerNormLinear, with its parameter names."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = norm_weight(self.config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, N] with the bias in it, None)"""
        p, eps = self.precision, self.config.layernorm_epsilon
        if p.quantizes(self.kind) and self.tp_group.size() == 1 and p.used(self.adapter) is None:
            operand = p.operand(self.weight)
            out = ops.norm_fp8_linear(input_, self._norm_weight, eps, self.weight, operand, p.spec, p.backward)
            return ops.add_bias(out, self.bias), None
        return super().forward(self.normalized(input_), *args, **kwargs)

    def normalized(self, x: Tensor) -> Tensor:
        """Return the norm's output, which the product takes: [..., H] -> [..., H]."""
        return ops.rms_norm(x, self._norm_weight, self.config.layernorm_epsilon)

    @property
    def _norm_weight(self) -> Tensor:
        """The factor by which the norm multiplies."""
        weight = self.layer_norm_weight
        return ops.one_plus(weight) if self.config.layernorm_zero_centered_gamma else weight


class RowLinear(_WithAdapter, RowParallelLinear):
    """A product whose input features are split over the tensor-parallel ranks.

    The ranks' FP32 partial sums are added in rank order and rounded once. A single rank does the same with
    `precision.k_splits` slices of K, so both layouts give the same bits.
    """

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind
        tag_split(self.weight, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[S, B, K] -> ([S, B, N], no bias). Several ranks split the sequence of the output."""
        p, weight, group, adapter = self.precision, self.weight, self.tp_group, self.precision.used(self.adapter)
        if group.size() == 1:
            return p.product(self.kind, input_, weight, adapter, p.k_splits), None
        if p.quantizes(self.kind):
            partial = ops.fp8_linear_partial(input_, weight, p.operand(weight), p.spec, p.backward)
        else:
            partial = ops.linear_partial(input_, p.plain(weight))
        if adapter is None:
            return _MergeOverRanks.apply(partial, None, input_.dtype, group), None
        if adapter.merges:
            partial = adapter.with_adapter_gradient(partial, input_)
            return _MergeOverRanks.apply(partial, None, input_.dtype, group), None
        low_rank = adapter.low_rank
        inner = _MergeOverRanks.apply(ops.linear_partial(input_, low_rank.a), None, input_.dtype, group)
        term = ops.low_rank_term(inner, low_rank.b, low_rank.scale, low_rank.parts)
        return _MergeOverRanks.apply(partial, term, input_.dtype, group), None


class PlainColumnLinear(ColumnParallelLinear):
    """The output projection (lm_head), which is never quantized. Its output features are split over the tensor-parallel
    ranks, and its logits are gathered from them."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *unused: Any, **context: Any) -> Tensor:
        return ops.linear(_whole_sequence(input, context), weight)


class _MergeOverRanks(torch.autograd.Function):
    """Exchanges FP32 partial sums. Each rank adds the partial sums for its part of the sequence in rank order, and then
    `plus`, the term of that part."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, plus: Tensor | None, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = torch.empty_like(partial)
        dist.all_to_all_single(parts, partial.contiguous(), group=group)
        return ops.merge_partials(list(parts.chunk(group.size())), dtype, plus)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        whole = gather_from_sequence_parallel_region(grad, tensor_parallel_output_grad=False, group=ctx.group)
        return whole.float(), grad if ctx.needs_input_grad[1] else None, None, None


def _whole_sequence(input: Tensor, context: dict[str, Any]) -> Tensor:
    if not context.get("sequence_parallel"):
        return input
    return gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=context["tp_group"])

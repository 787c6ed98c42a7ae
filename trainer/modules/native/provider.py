"""Modules of a layer when every op but the FP8 products is Megatron's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.ops.experts import kept_scores
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.trainer.modules.latent import LatentAttention
from fp8rl.trainer.modules.layer import LatentModules, LayerModules, asking
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import GroupedWeights, norm_weight, tag_split

# The core of latent attention on a CPU, where Megatron has none for keys and values of different widths.


class LatentCore(nn.Module):
    """torch's attention, causal; rows are right-padded."""

    def __init__(self, *, softmax_scale: float, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **unused: Any) -> Tensor:
        """Query and key [S, B, H, D], value [S, B, H, E] -> [S, B, H * E]"""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


# Megatron's column- and row-parallel linear layers, with the local product in FP8 where the spec wants it.


class ColumnLinear(ColumnParallelLinear):
    """Output features split over the tensor-parallel ranks."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind
        tag_split(self.weight, 0)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **context: Any) -> Tensor:
        if not self.precision.quantizes(self.kind):
            return super()._forward_impl(input, weight, *args, **context)
        if context["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=context["tp_group"]
            )
        product = self.precision.fp8_linear(input, weight)
        return product if self.bias is None else product + self.bias


class NormColumnLinear(ColumnLinear):
    """RMSNorm, then a column-parallel product: TransformerEngine's LayerNormLinear, with its parameter names."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.layer_norm_weight = norm_weight(self.config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, N] with the bias in it, None)"""
        return super().forward(self.normalized(input_), *args, **kwargs)

    def normalized(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], what the product takes."""
        weight = self.layer_norm_weight
        return F.rms_norm(x, weight.shape, weight, self.config.layernorm_epsilon)


class RowLinear(RowParallelLinear):
    """Input features split over the tensor-parallel ranks, whose products Megatron adds in the model's dtype."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind
        tag_split(self.weight, 1)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **context: Any) -> Tensor:
        if self.precision.quantizes(self.kind):
            return self.precision.fp8_linear(input, weight)
        return super()._forward_impl(input, weight, *args, **context)


# RMSNorm as Megatron's layer_norm module.


class RMSNorm(nn.Module):
    """torch's RMSNorm over the last axis. Megatron's wrapper of it refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


# Megatron's router where it would choose or weigh experts otherwise than the model.


class OneExpertRouter(TopKRouter):
    """The router of one expert per token, renormalised: its probability is 1, whatever its logit, as in the engine.

    Megatron insists on a softmax over all experts there (`moe_router_pre_softmax`), and leaves the probability so.
    """

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> probabilities [S * B, E], 1 for the chosen expert, and their bool map."""
        probs, routing_map = super().routing(logits, padding_mask)
        return probs * 0 + routing_map.to(probs.dtype), routing_map  # its weight keeps a gradient, of zeros


def best_of_groups(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """`group_limited_topk`: scores [T, E] -> those of the experts chosen, and the experts, [T, k] each."""
    return kept_scores(scores, num_groups, group_topk).topk(topk, dim=-1)


# Megatron's grouped experts, and the emulated grouped product in them.


class Experts(TEGroupedMLP):
    """Megatron's grouped experts, with the router's probabilities applied to their output.

    Megatron multiplies before fc2, so that they would be part of what is quantized there; engines multiply after it.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H] sorted by expert, probabilities [T] -> ([T, H], no bias), rounded before and after the product"""
        ones = torch.ones_like(permuted_probs)
        output, bias = super().forward(permuted_local_hidden_states, tokens_per_expert, ones)
        return (output * permuted_probs.unsqueeze(-1)).to(output.dtype), bias


class GroupedLinear(GroupedWeights):
    """One product per expert of this rank, in FP8 where the spec wants it: TransformerEngine's GroupedLinear."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        """[T, K] sorted by expert, m_splits rows each -> ([T, N], no bias)"""
        p, weights = self.precision, self.weights()
        if not p.quantizes(self.kind):
            products = [F.linear(rows, weight) for rows, weight in zip(x.split(m_splits), weights, strict=True)]
            return torch.cat(products), None
        counts = torch.tensor(m_splits, device=x.device)
        return grouped_linear(x, counts, weights, p.group_operand(weights), p.spec, p.backward), None


def layer_modules(sizes: ModelSizes, precision: LayerPrecision) -> LayerModules:
    """The modules of a layer; the model is built with Megatron's rotary embedding."""
    grouped = asking(precision, GroupedLinear)
    experts = MLPSubmodules(linear_fc1=grouped("experts.gate_proj"), linear_fc2=grouped("experts.down_proj"))
    return LayerModules(
        norm=RMSNorm,
        norm_column_linear=asking(precision, NormColumnLinear),
        column_linear=asking(precision, ColumnLinear),
        row_linear=asking(precision, RowLinear),
        core_attention=DotProductAttention,
        activation=None,
        router=router(sizes),
        experts=ModuleSpec(module=Experts, submodules=experts),
        moe=MoELayer,
        latent=LatentModules(
            attention=ModuleSpec(module=LatentAttention, params={"precision": precision}),
            narrow=ColumnParallelLinear,
            core=LatentCore,
        ),
    )


def router(sizes: ModelSizes) -> ModuleSpec:
    """Megatron's own, or where it would not give the chosen experts probabilities that sum to one, ours."""
    return ModuleSpec(module=OneExpertRouter if sizes.top_k == 1 and sizes.renormalize else TopKRouter)

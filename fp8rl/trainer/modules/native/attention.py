"""Grouped-query attention in native mode: Megatron's attention, with changes for some models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.modules.exact import Cut
from fp8rl.trainer.modules.native import Fields, Layer, MegatronFamily


class TableAttention(SelfAttention):
    """Megatron's attention with the rows of linear_qkv in the order of the tensor table.

    Megatron has the rows of one key-value head after the other, and the gates of a group after all its queries. The
    table may have the queries of several key-value heads, then their keys, then their values. Then a quantization block
    has only rows of q, only rows of k or only rows of v, as in the engine. The table has each gate next to its query.
    """

    def __init__(self, *args: Any, layer: Layer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        table = layer.definition.tensors
        rows = [row for row in table.in_layer[layer.precision.layer] if row.op == "qkv" and row.product]
        self.cut = Cut.of(rows, table, self.pg_collection.tp.size())

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """[S, B, H] -> q [S, B, heads, D], k and v [S, B, kv heads, D] and, if there are some, the gates of q"""
        parts = self.cut(self.linear_qkv(hidden_states)[0])
        q, k, v = (part.unflatten(-1, (-1, self.hidden_size_per_attention_head)) for part in parts)
        gates: list[Tensor] = []
        if self.config.attention_output_gate:
            q, *gates = q.unflatten(-2, (-1, 2)).unbind(-2)
        q = q if self.q_layernorm is None else self.q_layernorm(q)
        return q, k if self.k_layernorm is None else self.k_layernorm(k), v, *gates

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Apply Megatron's formula of the gate, without torch.compile."""
        return (x * torch.sigmoid(gate.float().reshape(x.shape))).to(x.dtype)


class HeadsNorm(nn.Module):
    """Normalizes queries or keys over all heads together (OLMoE). Megatron would normalize each head.

    Tensor-parallel ranks gather their heads for the norm, so that the bits do not depend on the layout. Each rank has
    the whole weight, and computes the weight's gradient from its own heads. Megatron sums the gradients over ranks.

    norm: the class of a norm over the last axis. heads: number of heads of the model. hidden_size: width of a head.
    """

    def __init__(
        self, *, norm: type[nn.Module], heads: int, config: TransformerConfig, hidden_size: int, eps: float
    ) -> None:
        super().__init__()
        self.norm = build_module(norm, config=config, hidden_size=heads * hidden_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, heads of this rank, D] -> the same"""
        group = get_tensor_model_parallel_group()
        whole = self.norm(all_gather_last_dim_from_tensor_parallel_region(x.flatten(2), group))
        return whole.chunk(group.size(), -1)[group.rank()].unflatten(-1, x.shape[2:])


def _attention(layer: Layer, gated: bool = False) -> Fields:
    """Return the fields of a layer with grouped-query attention. The norm before the attention is in linear_qkv, as in
    TransformerEngine. gated: whether the attention's output has gates."""
    modules, sizes, te = layer.modules, layer.definition.sizes, layer.modules.provider

    def head_norm(heads: int) -> ModuleSpec | type[nn.Module] | None:
        if sizes.head_norms == "together":
            return ModuleSpec(module=HeadsNorm, params={"norm": modules.norm, "heads": heads})
        return modules.norm if sizes.head_norms == "each" else None

    submodules = SelfAttentionSubmodules(
        linear_qkv=modules.norm_column_linear("q_proj"),
        core_attention=DotProductAttention if te is None else te.core_attention(),
        linear_proj=modules.row_linear("o_proj"),
        q_layernorm=head_norm(sizes.heads),
        k_layernorm=head_norm(sizes.kv_heads),
    )
    own = {"layer": layer} if gated or sizes.joined > 1 else {}
    spec = ModuleSpec(
        module=TableAttention if own else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, **own},
        submodules=submodules,
    )
    return {"self_attention": spec}


def _config(sizes: ModelSizes) -> Mapping[str, Any]:
    return {"add_qkv_bias": sizes.qkv_bias, "qk_layernorm": sizes.head_norms is not None}


FAMILIES = {
    "attention": MegatronFamily(layer=_attention, config=_config),
    "gated_attention": MegatronFamily(
        layer=lambda layer: _attention(layer, gated=True),
        config=lambda sizes: {**_config(sizes), "attention_output_gate": True},
    ),
}

"""Grouped-query attention in Megatron: norms of heads, rotation, and attention as its core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from fp8rl.models.families.attention import ATTENTION, HEAD_NORM, HEADS_NORM, QKV, ROPE
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics import ops
from fp8rl.numerics.ops.rope import Scaling
from fp8rl.trainer.modules.families import Call, Fields, Layer, MegatronFamily, MegatronSide, epsilon, output, rows_of
from fp8rl.trainer.modules.precision import KVRounding, LayerPrecision
from fp8rl.trainer.modules.rows import PackedRows, own_positions, shared_attention


class CoreAttention(nn.Module):
    """`ops.rope` on queries and keys, then causal `ops.attention` over keys and values in the format of the cache.

    The model has no position embeddings. Padded rows start at position 0 and are right-padded, so a token's position is
    its index, and padding is never a key of a real query. Packed rows bring their positions. With context parallelism,
    S is this rank's part of the row.
    """

    def __init__(
        self,
        *,
        rope_theta: float,
        precision: LayerPrecision,
        rotary_dim: int | None = None,
        rope_scaling: Scaling | None = None,
        config: TransformerConfig,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.rope_theta, self.rotary_dim, self.rope_scaling = rope_theta, rotary_dim, rope_scaling
        self.kv, self.plain_scale = KVRounding(precision), config.kv_channels**-0.5
        self.shared = config.context_parallel_size > 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> Tensor:
        """Query [S, B, H, D], key and value [S, B, Hkv, D] -> [S, B, H * D].

        Packed rows: [T, H, D] and [T, Hkv, D] -> [T, 1, H * D].
        """
        scale = self.plain_scale * self.kv.format.key_scale
        if (rows := packed_seq_params) is not None:
            query, key = (self._turned(x[None], rows.positions[None])[0] for x in (query, key))
            key, value = self.kv.keys(key), self.kv.values(value)
            if rows.tree is not None:
                out = ops.tree_attention(query, key, value, rows.tree, scale)
            else:
                out = ops.packed_attention(query, key, value, rows.lengths, scale)
            return self.kv.format.result(out).flatten(1).unsqueeze(1)
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        value = self.kv.values(value)
        if self.shared:
            group = parallel_state.get_context_parallel_group()
            own = own_positions(query.shape[1] * group.size(), group.rank(), group.size()).to(query.device)
            positions = own.expand(query.shape[:2])
            query, key = (self._turned(x, positions) for x in (query, key))
            out = shared_attention(query, self.kv.keys(key), value, positions, scale, group)
        else:
            keys = self.kv.keys(self.rotated(key))
            out = ops.attention(self.rotated(query), keys, value, _positions(query), scale)
        return self.kv.format.result(out).transpose(0, 1).flatten(2)

    def rotated(self, x: Tensor) -> Tensor:
        """Return the queries or keys [B, S, heads, D] rotated, as the attention takes them."""
        return self._turned(x, _positions(x))

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return ops.rope(x, positions, self.rope_theta, self.rotary_dim, self.rope_scaling)


def _positions(x: Tensor) -> Tensor:
    """Return each token's index in its row: [B, S, ...] -> [B, S]."""
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)


class JoinedHeads(SelfAttention):
    """Megatron's attention with another order of rows in linear_qkv: queries of `joined` key-value heads, then their
    keys, then their values. Megatron has the rows of one key-value head after the other. With `joined` heads together,
    a quantization block holds only rows of q, only rows of k or only rows of v, as in the engine."""

    def __init__(self, *args: Any, joined: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.linear_qkv.joined = joined

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[S, B, H] -> queries [S, B, heads, D], keys and values [S, B, kv heads, D]"""
        q, k, v = split_heads(self.linear_qkv(hidden_states)[0], self.config, self.linear_qkv.joined)
        q = q if self.q_layernorm is None else self.q_layernorm(q)
        return q, k if self.k_layernorm is None else self.k_layernorm(k), v


def split_heads(fused: Tensor, config: TransformerConfig, joined: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Cut linear_qkv's output, of all ranks or of one, into queries, keys and values [..., heads, D]."""
    size, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
    grouped = fused.unflatten(-1, (-1, joined * (queries + 2) * size))
    parts = grouped.split((joined * queries * size, joined * size, joined * size), -1)
    q, k, v = (part.flatten(-2).unflatten(-1, (-1, size)) for part in parts)
    return q, k, v


class HeadsNorm(nn.Module):
    """Norms queries or keys over the width of all heads (OLMoE), where Megatron would norm each head.

    The tensor-parallel ranks gather their heads for the norm, so that the bits do not depend on the layout. Each rank
    has the whole weight and computes its gradient from its own heads. Megatron sums the gradients over the ranks.

    norm: the class of a norm over the last axis. heads: number in the whole model. hidden_size: width of a head.
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


def attention_spec(
    layer: Layer,
    core_attention: ModuleSpec | type[nn.Module],
    module: type[SelfAttention] | None = None,
    **submodules: Any,
) -> ModuleSpec:
    """Return the spec of an attention with grouped queries.

    Queries and keys are normed as the model's sizes say. The norm before the attention is inside linear_qkv, as in
    TransformerEngine. module, submodules: used in place of the defaults.
    """
    modules, sizes = layer.modules, layer.sizes

    def head_norm(heads: int) -> ModuleSpec | type[nn.Module] | None:
        match sizes.head_norms:
            case None:
                return None
            case "each":
                return modules.norm
            case "together":
                return ModuleSpec(module=HeadsNorm, params={"norm": modules.norm, "heads": heads})

    usual = {
        "linear_qkv": modules.norm_column_linear("q_proj"),
        "core_attention": core_attention,
        "linear_proj": modules.row_linear("o_proj"),
        "q_layernorm": head_norm(sizes.heads),
        "k_layernorm": head_norm(sizes.kv_heads),
    }
    own = {} if sizes.joined == 1 else {"joined": sizes.joined}
    return ModuleSpec(
        module=module or (JoinedHeads if own else SelfAttention),
        params={"attn_mask_type": AttnMaskType.causal, **own},
        submodules=SelfAttentionSubmodules(**usual | submodules),
    )


def exact_core(layer: Layer) -> ModuleSpec:
    """Return the core for exact mode: the shared op, with the model's rotation of queries and keys."""
    sizes = layer.sizes
    own = {
        "rope_theta": sizes.rope_theta,
        "rotary_dim": sizes.rotary_dim,
        "rope_scaling": sizes.rope_scaling,
        "precision": layer.precision,
    }
    return ModuleSpec(module=CoreAttention, params=own)


def _exact(layer: Layer) -> Fields:
    return {"self_attention": attention_spec(layer, exact_core(layer))}


def _transformer_engine(layer: Layer) -> Fields:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # needs TransformerEngine

    return {"self_attention": attention_spec(layer, TESpecProvider().core_attention())}


def _config(sizes: ModelSizes) -> Mapping[str, Any]:
    return {"add_qkv_bias": sizes.qkv_bias, "qk_layernorm": sizes.head_norms is not None}


def _qkv(call: Call) -> tuple[Tensor, ...]:
    """Return q, k and v. Megatron interleaves them by group of heads."""
    (fused,), module = output(call), call[0]
    return split_heads(fused, module.config, getattr(module, "joined", 1))


def _rope(call: Call) -> tuple[Tensor, ...]:
    module, (q, k, *_), _ = call
    if isinstance(module, CoreAttention):  # rotates inside
        q, k = (module.rotated(x.transpose(0, 1)).transpose(0, 1) for x in (q, k))
    return rows_of(q), rows_of(k)


def _rotation(model: GPTModel, module: nn.Module) -> tuple[float, ...]:
    """Return theta, and the factor by which the rotation lengthens the context (1: not lengthened)."""
    if isinstance(module, CoreAttention):  # rotates inside
        theta, scaling = module.rope_theta, module.rope_scaling
    else:
        theta, scaling = model.rotary_base, model.rope_scaling
    return theta, 1.0 if scaling is None else scaling.factor


FAMILY = MegatronFamily(
    sides={
        HEAD_NORM: MegatronSide(output, constants=epsilon),
        HEADS_NORM: MegatronSide(output, constants=epsilon),
        QKV: MegatronSide(_qkv),
        ROPE: MegatronSide(_rope, constants=_rotation),
        ATTENTION: MegatronSide(output),
    },
    layer={
        "exact": _exact,
        "megatron": lambda layer: {"self_attention": attention_spec(layer, DotProductAttention)},
        "transformer_engine": _transformer_engine,
    },
    config=_config,
)

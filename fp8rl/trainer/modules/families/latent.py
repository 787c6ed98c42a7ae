"""Latent attention in Megatron. Exact mode computes the absorbed form (`numerics.ops.latent`), as the engine does over
its cache. Native mode computes the expanded form, by Megatron itself.

Megatron splits the rows of the narrow products over tensor-parallel ranks. The parts would not be whole quantization
blocks, and the products are small. So every rank computes whole products for its part of the sequence, as with
TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor, nn

from fp8rl.models.families.latent import LATENT_ATTENTION, LATENT_DOWN, Latent
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics import ops
from fp8rl.numerics.config import Mode
from fp8rl.numerics.ops.rope import Yarn
from fp8rl.trainer.modules.families import Call, Fields, Layer, MegatronFamily, MegatronSide, output, rows_of
from fp8rl.trainer.modules.precision import Adapter, KVRounding, LayerPrecision
from fp8rl.trainer.modules.rows import PackedRows

NARROW = {"linear_q_down_proj": "q_a_proj", "linear_kv_down_proj": "kv_a_proj"}
"""Megatron's narrow products, and their module kinds."""


class NarrowLinear(nn.Module):
    """A product that every tensor-parallel rank computes whole, for its part of the sequence."""

    def __init__(
        self, config: TransformerConfig, input_size: int, output_size: int, precision: LayerPrecision, kind: str
    ) -> None:
        super().__init__()
        self.precision, self.kind = precision, kind
        empty = torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(empty)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., K] -> ([..., N], no bias)"""
        if self.precision.quantizes(self.kind):
            return self.precision.fp8_linear(x, self.weight), None
        return F.linear(x, self.weight), None


class WholeNarrow(MLASelfAttention):
    """Megatron's attention with `narrow` in place of its narrow products."""

    def __init__(
        self, *args: Any, precision: LayerPrecision, narrow: type[NarrowLinear] = NarrowLinear, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, kind in NARROW.items():
            if (split := getattr(self, name, None)) is not None:
                setattr(self, name, narrow(self.config, split.input_size, split.output_size, precision, kind))


class SharedNarrowLinear(NarrowLinear):
    """A narrow product by the shared ops. Each rank has the whole adapter too."""

    adapter: Adapter | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.precision.product(self.kind, x, self.weight, self.adapter), None


@dataclass(frozen=True)
class OfHeads:
    """Products of each head with its part of kv_b: `ops.head_linear`. weight: [heads * (plain + value), kv rank].

    operand: the weight's operand, if the weight is quantized. adapter: the weight's adapter, merged or separate.
    """

    weight: Tensor
    operand: Any
    adapter: Adapter | None

    def __call__(self, x: Tensor, first: int, count: int, transposed: bool = False) -> Tensor:
        place = first, count, transposed
        if self.adapter is None:
            return ops.head_linear(x, self.weight, self.operand, *place)
        if self.adapter.merges:
            term = ops.head_term(x.detach(), self.adapter.low_rank, *place)
            return ops.with_term_gradient(ops.head_linear(x, self.weight, self.operand, *place), term)
        term = ops.head_term(x, self.adapter.low_rank, *place)
        return ops.head_linear(x, self.weight, self.operand, *place, term)


class LatentAttention(WholeNarrow):
    """Computes queries and latent rows of a sequence, and attention of the queries over the latent rows.

    `linear_kv_up_proj` gives only its norm, which is applied to the latent rows, and its weight, with which each head
    is multiplied (`ops.head_linear`). Its forward is not called.
    """

    def __init__(self, *args: Any, precision: LayerPrecision, **kwargs: Any) -> None:
        super().__init__(*args, precision=precision, narrow=SharedNarrowLinear, **kwargs)
        self.precision = precision

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, H], no bias). S: this tensor-parallel rank's part of the sequence."""
        narrow = None if self.config.q_lora_rank is None else self.linear_q_down_proj(hidden_states)[0]
        queries = self.linear_q_proj(hidden_states)[0] if narrow is None else self.linear_q_up_proj(narrow)[0]
        rows = self._rows(hidden_states)
        p, weight = self.precision, self.linear_kv_up_proj.weight
        adapter, quantized = p.used(self.linear_kv_up_proj.adapter), p.quantizes("kv_b_proj")
        of_heads = OfHeads(weight if quantized else p.plain(weight), p.operand(weight) if quantized else None, adapter)

        def attend(queries: Tensor, rows: Tensor) -> Tensor:
            return self.core_attention(queries, rows, of_heads, packed_seq_params)

        if self.checkpoint_core_attention and self.training:
            out = tensor_parallel.checkpoint(attend, False, queries, rows)
        else:
            out = attend(queries, rows)
        return self.linear_proj(out)

    def _rows(self, x: Tensor) -> Tensor:
        """Return [S, B, kv rank + rope] of the whole sequence: the normed latent, and the key before rotation."""
        latent, key = self.linear_kv_down_proj(x)[0].split(
            (self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), -1
        )
        rows = torch.cat((self.linear_kv_up_proj.normalized(latent.contiguous()), key), -1)
        if not self.config.sequence_parallel:
            return rows
        return gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True, group=self.tp_group)


class LatentCore(nn.Module):
    """Rotation, attention, and the products of heads before and after it.

    Padded rows start at position 0 and are right-padded. Packed rows bring their positions.
    """

    def __init__(self, *, sizes: ModelSizes, precision: LayerPrecision, **unused: Any) -> None:
        super().__init__()
        self.sizes, self.latent, self.kv = sizes, sizes.of(Latent), KVRounding(precision)
        self.rope_theta, self.rope_scaling = sizes.rope_theta, sizes.rope_scaling

    def forward(self, queries: Tensor, rows: Tensor, of_heads: OfHeads, packed: PackedRows | None = None) -> Tensor:
        """queries [S, B, heads * D]; rows [S, B, kv rank + rope] -> [S, B, heads * value]"""
        length, batch = rows.shape[:2]
        scale = self.sizes.attention_scale * self.kv.format.key_scale
        plain, value, rank = self.sizes.plain_dim, self.latent.value_dim, self.latent.kv_rank
        positions = torch.arange(length, device=rows.device) if packed is None else packed.positions
        positions = positions[:, None].expand(length, batch)
        q = queries.unflatten(-1, (-1, self.sizes.head_dim))
        keys = self.rotated(rows[..., None, rank:], positions)[:, :, 0]
        rows = self.kv.keys(torch.cat((rows[..., :rank], keys), -1).transpose(0, 1))
        inside = of_heads(q[..., :plain].flatten(0, 1), 0, plain, True)
        q = torch.cat((inside.unflatten(0, (length, batch)), self.rotated(q[..., plain:], positions)), -1)
        if packed is None:
            out = ops.latent_attention(q.transpose(0, 1), rows, positions.t(), rank, scale).transpose(0, 1)
        elif packed.tree is not None:
            out = ops.tree_latent_attention(q[:, 0], rows[0], packed.tree, rank, scale)[:, None]
        else:
            out = ops.packed_latent_attention(q[:, 0], rows[0], packed.lengths, rank, scale)[:, None]
        out = of_heads(self.kv.format.result_of_keys(out).flatten(0, 1), plain, value)
        return out.flatten(1).unflatten(0, (length, batch))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [S, B, heads, rope]."""
        return ops.rope_pairs(x, positions, self.rope_theta, self.rope_scaling)


class ExpandedCore(nn.Module):
    """torch's causal attention over right-padded rows, for the CPU: there Megatron has no attention for keys and values
    of different widths."""

    def __init__(self, *, softmax_scale: float, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **unused: Any) -> Tensor:
        """Query and key [S, B, H, D], value [S, B, H, E] -> [S, B, H * E]"""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def _fields(layer: Layer, attention: ModuleSpec, narrow: type[nn.Module], core: ModuleSpec | type[nn.Module]) -> Fields:
    """Return the fields of a layer. The norm of each narrow product's output is inside the product that follows.

    narrow: the class of the narrow products, TransformerEngine's or one that `WholeNarrow` replaces.
    """
    modules = layer.modules
    spec = ModuleSpec(
        module=attention.module,
        params={"attn_mask_type": AttnMaskType.causal, **attention.params},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=modules.column_linear("q_b_proj"),
            linear_q_down_proj=narrow,
            linear_q_up_proj=modules.norm_column_linear("q_b_proj"),
            linear_kv_down_proj=narrow,
            linear_kv_up_proj=modules.norm_column_linear("kv_b_proj"),
            core_attention=core,
            linear_proj=modules.row_linear("o_proj"),
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
    return {"input_layernorm": modules.norm, "self_attention": spec}


def _exact(layer: Layer) -> Fields:
    attention = ModuleSpec(module=LatentAttention, params={"precision": layer.precision})
    core = ModuleSpec(module=LatentCore, params={"sizes": layer.sizes, "precision": layer.precision})
    return _fields(layer, attention, ColumnParallelLinear, core)


def _megatron(layer: Layer) -> Fields:
    attention = ModuleSpec(module=WholeNarrow, params={"precision": layer.precision})
    return _fields(layer, attention, ColumnParallelLinear, ExpandedCore)


def _transformer_engine(layer: Layer) -> Fields:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # needs TransformerEngine

    provider = TESpecProvider()
    return _fields(layer, ModuleSpec(module=MLASelfAttention), provider.linear(), provider.core_attention())


def _config(sizes: ModelSizes) -> Mapping[str, Any]:
    latent, yarn = sizes.of(Latent), sizes.rope_scaling
    rope: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if isinstance(yarn, Yarn):
        rope = {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale,
        }
    return rope | {
        "apply_rope_fusion": False,  # of latent attention it is for YaRN alone, and experimental
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": sizes.plain_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": sizes.rope_theta,
    }


def _own_formats(sizes: ModelSizes, mode: Mode) -> Mapping[str, str]:
    """Return native mode's formats: `ExpandedCore` computes in FP32."""
    return dict.fromkeys(("scores.output", "softmax.output"), "fp32") if mode == "native" else {}


def _latent_down(call: Call) -> tuple[Tensor, ...]:
    """Compute the narrow products of an attention again, and return their output."""
    module, (x, *_), _ = call
    return tuple(rows_of(linear(x)[0]) for linear in (module.linear_q_down_proj, module.linear_kv_down_proj))


def _rotation(model: GPTModel, module: nn.Module) -> tuple[float, ...]:
    """Return theta and the factor of YaRN (1 for a model without YaRN)."""
    if isinstance(module, LatentCore):
        return module.rope_theta, module.rope_scaling.factor if module.rope_scaling is not None else 1.0
    return model.config.rotary_base, model.config.rotary_scaling_factor


FAMILY = MegatronFamily(
    sides={LATENT_DOWN: MegatronSide(_latent_down), LATENT_ATTENTION: MegatronSide(output, constants=_rotation)},
    layer={"exact": _exact, "megatron": _megatron, "transformer_engine": _transformer_engine},
    config=_config,
    config_type=MLATransformerConfig,
    own_formats=_own_formats,
)

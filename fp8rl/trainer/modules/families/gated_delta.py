"""Linear attention in Megatron: its own rule in torch, or the shared ops between TransformerEngine's products.

Parameters have the names of Megatron's GatedDeltaNet. The rows of products and convolution are ordered by key head, so
that a tensor-parallel rank has whole consecutive heads. Megatron's own module is not used: it needs
flash-linear-attention, has the gates in one product with queries, keys and values, and takes no packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn

from fp8rl.models.families.gated_delta import GatedDelta
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics import ops
from fp8rl.numerics.config import Mode
from fp8rl.trainer.modules.families import Fields, Layer, MegatronFamily
from fp8rl.trainer.modules.rows import PackedRows
from fp8rl.trainer.modules.weights import norm_parameter, tag_split


class ShortConv(nn.Module):
    """`ops.causal_conv` on this rank's channels."""

    def __init__(self, config: TransformerConfig, sizes: GatedDelta, ranks: int) -> None:
        super().__init__()
        self.sizes, self.weight = sizes, _split(config, sizes.channels // ranks, sizes.taps)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """[T, C] of packed rows -> [T, C]"""
        return ops.causal_conv(x, self.weight, lengths)[0]


class DeltaRule(nn.Module):
    """`ops.delta_gates`, then `ops.gated_delta_rule`. Each row starts from an empty state."""

    def __init__(self, sizes: GatedDelta) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, mixed: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, lengths: Tensor) -> Tensor:
        """mixed [T, C], b and a [T, heads] -> [T, heads * value]"""
        q, k, v = heads_of(mixed, self.sizes)
        g, beta = ops.delta_gates(a, b, a_log, dt_bias)
        return ops.gated_delta_rule(q, k, v, g, beta, lengths)[0].flatten(1)


def channels_and_gates(qkvz: Tensor, sizes: GatedDelta) -> tuple[Tensor, Tensor]:
    """Cut the product's output [..., N] into the convolution's channels and z. All three are ordered by key head."""
    values = sizes.shares * sizes.value_dim
    mixed, z = qkvz.unflatten(-1, (-1, 2 * (sizes.key_dim + values))).split((2 * sizes.key_dim + values, values), -1)
    return mixed.flatten(-2), z.flatten(-2)


def b_and_a(ba: Tensor, sizes: GatedDelta) -> tuple[Tensor, Tensor]:
    """Cut the output of the gates' product into b and a. All three are ordered by key head."""
    b, a = ba.unflatten(-1, (-1, 2, sizes.shares)).unbind(-2)
    return b.flatten(-2), a.flatten(-2)


def heads_of(mixed: Tensor, sizes: GatedDelta) -> tuple[Tensor, ...]:
    """Cut channels [T, C], ordered by key head, into queries and keys [T, key heads, K] and values [T, heads, V]."""
    of_keys = sizes.key_dim, sizes.key_dim, sizes.shares * sizes.value_dim
    q, k, v = mixed.unflatten(1, (-1, sum(of_keys))).split(of_keys, -1)
    return q, k, v.unflatten(-1, (sizes.shares, -1)).flatten(1, 2)


class GatedNorm(nn.Module):
    """`ops.gated_rms_norm` over each head."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.eps, self.weight = config.layernorm_epsilon, norm_parameter(config, size, torch.float32)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[T, heads * value] -> the same shape"""
        heads, gates = (y.unflatten(1, (-1, len(self.weight))) for y in (x, gate))
        return ops.gated_rms_norm(heads, gates, self.weight, self.eps).flatten(1)


class NativeConv(ShortConv):
    """torch's convolution, then SiLU, for rows of equal length."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows, (channels, taps) = x.unflatten(0, (len(lengths), -1)).transpose(1, 2), self.weight.shape
        mixed = F.conv1d(rows, self.weight[:, None], padding=taps - 1, groups=channels)[..., : rows.shape[2]]
        return F.silu(mixed).transpose(1, 2).flatten(0, 1)


class NativeRule(DeltaRule):
    """Megatron's rule in chunks of 64, for rows of equal length. The code around the rule is Megatron's too, except for
    the norm's library."""

    def forward(self, mixed: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, lengths: Tensor) -> Tensor:
        rows = len(lengths)
        q, k, v = (x.unflatten(0, (rows, -1)) for x in heads_of(mixed, self.sizes))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(self.sizes.shares, 2) for x in (q, k))
        g = (-a_log.exp() * F.softplus(a.float() + dt_bias)).unflatten(0, (rows, -1))
        out, _ = torch_chunk_gated_delta_rule(
            q, k, v, g=g, beta=b.sigmoid().unflatten(0, (rows, -1)), use_qk_l2norm_in_kernel=False
        )
        return out.flatten(2).flatten(0, 1)


class NativeNorm(GatedNorm):
    """torch's norm, then Megatron's formula of the gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        heads = x.unflatten(1, (-1, len(self.weight))).float()
        normed = F.rms_norm(heads, self.weight.shape, self.weight, self.eps).to(x.dtype)
        return (normed.flatten(1) * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """The layer over whole rows, right-padded or packed."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        sizes: GatedDelta,
        in_proj: ModuleSpec,
        out_proj: ModuleSpec,
        conv: type[ShortConv],
        rule: type[DeltaRule],
        out_norm: type[GatedNorm],
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        self.sizes, self.tp_group = sizes, pg_collection.tp
        ranks = self.tp_group.size()
        self.in_proj = self._product(in_proj, config.hidden_size, 2 * (sizes.keys + sizes.values), gather_output=False)
        # Never in FP8, as TransformerEngine's would be.
        gates = 2 * sizes.value_heads
        self.gate_proj = self._product(ColumnParallelLinear, config.hidden_size, gates, gather_output=False)
        tag_split(self.gate_proj.get_parameter("weight"), 0)
        self.conv1d = conv(config, sizes, ranks)
        self.A_log = _split(config, sizes.value_heads // ranks, dtype=torch.float32)
        self.dt_bias = _split(config, sizes.value_heads // ranks, dtype=torch.float32)
        self.core_attention = rule(sizes)
        self.out_norm = out_norm(config, sizes.value_dim)
        self.out_proj = self._product(out_proj, sizes.values, config.hidden_size, input_is_parallel=True)
        recomputed = config.recompute_modules or ()
        self.checkpoints_core = config.recompute_granularity == "selective" and "core_attn" in recomputed

    def _product(self, spec: ModuleSpec | type[nn.Module], inputs: int, outputs: int, **more: bool) -> nn.Module:
        return build_module(
            *(spec, inputs, outputs),
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
            **more,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> ([S, B, H], no bias). S: this tensor-parallel rank's part of the sequence."""
        mixed, z = channels_and_gates(self.in_proj(hidden_states)[0], self.sizes)
        b, a = b_and_a(self.gate_proj(hidden_states)[0], self.sizes)
        length, batch = mixed.shape[:2]
        lengths = torch.full((batch,), length, device=mixed.device)
        if packed_seq_params is not None:
            lengths = packed_seq_params.lengths

        def core(mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
            mixed = self.conv1d(mixed, lengths)
            return self.core_attention(mixed, b, a, self.A_log, self.dt_bias, lengths)  # type: ignore[no-any-return]

        rows = [x.transpose(0, 1).flatten(0, 1) for x in (mixed, b, a)]
        recompute = self.checkpoints_core and self.training
        out = tensor_parallel.checkpoint(core, False, *rows) if recompute else core(*rows)
        out = self.out_norm(out, z.transpose(0, 1).flatten(0, 1))
        return self.out_proj(out.unflatten(0, (batch, length)).transpose(0, 1).contiguous())

    def set_for_recompute_input_layernorm(self) -> None:
        """Do nothing, because the norm before the layer is a separate module."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return every tensor with the axis that tensor-parallel ranks split."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {})["dp_cp_group"]}

        def split(tensors: dict[str, Tensor], prefix: str) -> ShardedStateDict:
            axes = dict.fromkeys(tensors, 0)
            return make_sharded_tensors_for_checkpoint(tensors, prefix, axes, sharded_offsets, **groups)

        sharded = split({"A_log": self.A_log, "dt_bias": self.dt_bias}, prefix)
        sharded |= split({"weight": self.conv1d.weight}, f"{prefix}conv1d.")
        for name in ("in_proj", "gate_proj", "out_norm", "out_proj"):
            module, place = getattr(self, name), f"{prefix}{name}."
            sharded |= sharded_state_dict_default(module, place, sharded_offsets, metadata, tp_group=self.tp_group)
        return sharded


def _split(config: TransformerConfig, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a new parameter for this rank's heads."""
    device = torch.cuda.current_device()
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype or config.params_dtype, device=device))
    tag_split(parameter, 0)
    return parameter


def _layer(**classes: type[nn.Module]) -> Callable[[Layer], Fields]:
    def fields(layer: Layer) -> Fields:
        modules, own = layer.modules, layer.sizes.of(GatedDelta)
        products = {"in_proj": modules.column_linear(own.kind), "out_proj": modules.row_linear("out_proj")}
        net = ModuleSpec(module=GatedDeltaNet, params={"sizes": own, **(products | classes)})
        return {"input_layernorm": modules.norm, "self_attention": net}

    return fields


def _config(sizes: ModelSizes) -> Mapping[str, Any]:
    """Return the list of linear layers. With such a list, Megatron's checkpoints have a key for each layer."""
    linear = sizes.of(GatedDelta).layers
    return {"linear_attention_freq": [int(layer in linear) for layer in range(sizes.layers)]}


def _own_formats(sizes: ModelSizes, mode: Mode) -> Mapping[str, str]:
    """Return formats that allow FP32: `A_log`, `dt_bias` and the gated norm are FP32, when computed and when sent."""
    return dict.fromkeys(("gain.weight", "gradient.weight"), "bf16|fp32") | {"wire.weights": "bf16|fp32|{gather}"}


FAMILY = MegatronFamily(
    layer={
        "megatron": _layer(conv=NativeConv, rule=NativeRule, out_norm=NativeNorm),
        "transformer_engine": _layer(conv=ShortConv, rule=DeltaRule, out_norm=GatedNorm),
    },
    config=_config,
    own_formats=_own_formats,
)

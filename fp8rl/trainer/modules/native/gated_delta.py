"""Linear attention in native mode: runs the family's ops, with the products of Megatron or TransformerEngine.

Without TransformerEngine the convolution, the delta rule and the gated norm are Megatron's formulas in torch, for
padded rows. Megatron's own module (GatedDeltaNet) is not used. It needs flash-linear-attention, computes the gates in
one product with queries, keys and values, and takes no packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from fp8rl.models.families.gated_delta import OPS, GatedDelta
from fp8rl.models.program import Host, Op, OpSite
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.trainer.modules.exact import Cut
from fp8rl.trainer.modules.host import LayerHost
from fp8rl.trainer.modules.native import Fields, Layer, MegatronFamily
from fp8rl.trainer.modules.precision import KVRounding
from fp8rl.trainer.modules.program import OpsModule, OpWeights, cut_blocks, hold, place
from fp8rl.trainer.modules.rows import PackedRows
from fp8rl.trainer.modules.weights import tag_split

INSIDE = "self_attention."


def _conv(host: Host, site: OpSite, qkv: Tensor) -> Sequence[Tensor]:
    """Compute the convolution of [S, B, C] along S for each channel with torch, then SiLU."""
    weight, rows = host.tensor(site), qkv.transpose(0, 1).contiguous().transpose(1, 2)
    mixed = F.conv1d(rows, weight[:, None], padding=weight.shape[1] - 1, groups=len(weight))[..., : rows.shape[2]]
    return (F.silu(mixed).permute(2, 0, 1),)


def _rule(host: Host, site: OpSite, qkv: Tensor, b: Tensor, a: Tensor) -> Sequence[Tensor]:
    """Compute the delta rule by Megatron's formulas, in chunks of 64."""
    own, rows, a_log = host.sizes.of(GatedDelta), b.shape[1], host.tensor(site, "A_log")
    qkv, b, a = (host.in_rows(each) for each in (qkv, b, a))
    q, k, v = (each.unflatten(0, (rows, -1)) for each in host.apart(qkv, own.of_head))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(own.shares, 2) for x in (q, k))
    g = (-a_log.exp() * F.softplus(a.float() + host.tensor(site, "dt_bias"))).unflatten(0, (rows, -1))
    v, beta = v.unflatten(-1, (own.shares, -1)).flatten(2, 3), b.sigmoid().unflatten(0, (rows, -1))
    out, _ = torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False)
    return (out.flatten(2).transpose(0, 1),)


def _gated_norm(host: Host, site: OpSite, x: Tensor, z: Tensor) -> Sequence[Tensor]:
    """Compute torch's norm, then Megatron's formula of the gate."""
    weight, gate = host.tensor(site), host.in_rows(z)
    heads = host.in_rows(x).unflatten(-1, (-1, len(weight))).float()
    normed = F.rms_norm(heads, weight.shape, weight, host.sizes.norm_eps).to(x.dtype)
    out = (normed.flatten(-2) * F.silu(gate.float())).to(x.dtype)
    return (out.unflatten(0, (x.shape[1], -1)).transpose(0, 1),)


MEGATRONS: Mapping[str, Callable[..., Sequence[Tensor]]] = {"conv": _conv, "delta": _rule, "gated_norm": _gated_norm}
"""Megatron's formulas, by the name of the op."""


class NativeHost(LayerHost):
    """The host of a layer whose products are modules of Megatron or TransformerEngine."""

    def product(self, site: OpSite, x: Tensor, rows: Any = None) -> Tensor:
        (product,) = self.layer.weights[site.op.name].products
        return product(x.contiguous())[0]  # type: ignore[no-any-return]

    def products(self, site: OpSite, x: Tensor, rows: Any = None) -> Sequence[Tensor]:
        cut: Cut = self.layer.weights[site.op.name].products[0].cut
        return cut(self.product(site, x))


class GatedDeltaNet(OpsModule):
    """The linear attention of a layer, without the norm before it. It runs over whole rows, right-padded or packed."""

    def __init__(
        self, config: TransformerConfig, *, layer: Layer, pg_collection: ProcessGroupCollection, **unused: Any
    ) -> None:
        super().__init__(config, pg_collection, layer.precision)
        number, table = layer.precision.layer, layer.definition.tensors
        self.sizes, self.kv = layer.definition.sizes, KVRounding(layer.precision)
        self.weights = {}
        ops: tuple[Op, ...] = OPS[1:]
        for op in ops:
            rows = [row for row in table.in_layer[number] if row.op == op.name]
            if not rows[0].product:
                self.weights |= hold(self, rows, table, INSIDE)
                continue
            product = self._product(layer, rows)
            product.cut = Cut.of(rows, table, self.tp_group.size() if rows[0].engine.split == 0 else 1)
            self.add_module(place(rows[0], INSIDE).removesuffix(".weight"), product)
            self.weights[op.name] = OpWeights([product])
        if layer.modules.provider is None:
            ops = tuple(
                replace(op, form=replace(op.form, compute=MEGATRONS.get(op.name, op.form.compute))) for op in ops
            )
        recomputes = config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())
        again = {op.name for op in ops if op.form.across_tokens} if recomputes else set()
        self.blocks = cut_blocks(ops, again, number)

    def _product(self, layer: Layer, rows: Sequence[TensorRow]) -> Any:
        """Make a product. For gates it is always Megatron's, because TransformerEngine's would be in FP8."""
        kind, split, modules = rows[0].kind, rows[0].engine.split, layer.modules
        spec: Any = ColumnParallelLinear
        if kind is not None:
            spec = modules.row_linear(kind) if split == 1 else modules.column_linear(kind)
        product = build_module(
            *(spec, rows[0].shape[1], sum(row.shape[0] for row in rows)),
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
            **({"input_is_parallel": True} if split == 1 else {"gather_output": False}),
        )
        if kind is None:
            tag_split(product.weight, 0)
        return product

    def forward(
        self, hidden_states: Tensor, packed_seq_params: PackedRows | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> ([S, B, H], no bias). S is this tensor-parallel rank's part of the sequence."""
        host = NativeHost(self, packed_seq_params)
        return self.run_blocks(host, {"x": hidden_states})["x"], None

    def set_for_recompute_input_layernorm(self) -> None:
        """Do nothing, because the norm before the layer is a separate module."""


def _layer(layer: Layer) -> Fields:
    net = ModuleSpec(module=GatedDeltaNet, params={"layer": layer})
    return {"input_layernorm": layer.modules.norm, "self_attention": net}


def _config(sizes: ModelSizes) -> Mapping[str, Any]:
    """Return the list of linear layers. With such a list, Megatron's checkpoints have a key for each layer."""
    linear = sizes.of(GatedDelta).layers
    return {"linear_attention_freq": [int(layer in linear) for layer in range(sizes.layers)]}


FAMILIES = {"gated_delta": MegatronFamily(layer=_layer, config=_config)}

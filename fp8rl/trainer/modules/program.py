"""A layer of Megatron's that runs the program of `models`: its submodules hold weights, and are the parallel products.

Megatron keeps what it is there for: the split of weights and of the sequence over ranks, pipelines, recomputation of
whole layers, checkpoints, the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.program import OpSite, run
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics import ops
from fp8rl.trainer.modules.exact import NormColumnLinear
from fp8rl.trainer.modules.families.latent import OfHeads
from fp8rl.trainer.modules.precision import KVRounding, LayerPrecision
from fp8rl.trainer.modules.router import on_their_ranks, rows_of_pairs
from fp8rl.trainer.modules.rows import own_positions, shared_attention
from fp8rl.trainer.step.microbatches import PackedRows


class ProgramLayer(TransformerLayer):
    """[S, B, H] -> [S, B, H], of a tensor-parallel rank its part of S."""

    def __init__(self, *args: Any, definition: Model, precision: LayerPrecision, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        number, self.sizes, self.precision = precision.layer, definition.sizes, precision
        self.kv, self.watch = KVRounding(precision), None
        self.sites = tuple(OpSite(number, op) for op in definition.forward.layers[number])
        self.rows: dict[str, list[TensorRow]] = {}
        for row in definition.tensors.rows.values():
            if row.layer == number and row.adapts is None and not row.expert:
                self.rows.setdefault(row.op, []).append(row)
        self.groups, self.shared = definition.tensors._count, self.config.context_parallel_size > 1

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: None = None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        host = LayerHost(self, packed_seq_params)
        values = run(self.sites, host, {"x": hidden_states, "residual": None}, self.watch)
        return values["x"] + values["residual"], None


class LayerHost:
    """The host of a layer's program (`models.program.Host`) in one forward; queries and keys are [S, B, heads, D]."""

    def __init__(self, layer: ProgramLayer, packed: PackedRows | None) -> None:
        self.layer, self.packed, self.sizes, self.kv = layer, packed, layer.sizes, layer.kv.format

    def tensor(self, site: OpSite, name: str = "", of: str = "") -> Tensor:
        rows = [row for row in self.layer.rows[of or site.op.name] if row.name.endswith(name)]
        row = next((row for row in rows if not row.product), rows[0])
        module, _, last = self._place(row).rpartition(".")
        return getattr(self.layer.get_submodule(module), last)  # type: ignore[no-any-return]

    def product(self, site: OpSite, x: Tensor, rows: None = None) -> Tensor:
        return self._product(next(row for row in self.layer.rows[site.op.name] if row.product), x)

    def products(self, site: OpSite, x: Tensor, rows: None = None) -> Sequence[Tensor]:
        held: dict[str, list[TensorRow]] = {}
        for row in self.layer.rows[site.op.name]:
            if row.product:
                held.setdefault(row.megatron.parameter, []).append(row)
        return [part for rows in held.values() for part in self._cut(self._product(rows[0], x), rows)]

    def _product(self, row: TensorRow, x: Tensor) -> Tensor:
        module: Any = self.layer.get_submodule(self._place(row).rpartition(".")[0])
        if hasattr(module, "gating"):
            return module.gating(x)  # type: ignore[no-any-return]
        if isinstance(module, NormColumnLinear):  # its norm is an op of its own
            return super(NormColumnLinear, module).forward(x)[0]  # type: ignore[no-any-return]
        return module(x)[0]  # type: ignore[no-any-return]

    def _cut(self, fused: Tensor, rows: Sequence[TensorRow]) -> Sequence[Tensor]:
        """What a parameter's product puts out, tensor by tensor of the checkpoint."""
        ranks = self.layer.tp_group.size()
        if len(rows) == 1:
            return [fused]
        if rows[0].megatron.layout == "rows":
            return fused.split([row.shape[0] // ranks for row in rows], -1)
        groups = self.layer.groups(rows)
        parts = fused.unflatten(-1, (groups // ranks, -1)).split([row.shape[0] // groups for row in rows], -1)
        return [part.flatten(-2) for part in parts]

    def product_of_heads(self, site: OpSite) -> Callable[..., Tensor]:
        held: Any = self.layer.self_attention.linear_kv_up_proj
        p, quantized = self.layer.precision, self.layer.precision.quantizes("kv_b_proj")
        weight = held.weight if quantized else p.plain(held.weight)
        of_heads = OfHeads(weight, p.operand(weight) if quantized else None, p.used(held.adapter))
        return lambda x, *place: of_heads(x.flatten(0, 1), *place).unflatten(0, x.shape[:2])

    def whole(self, x: Tensor) -> Tensor:
        if not self.layer.config.sequence_parallel:
            return x
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.layer.tp_group)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), -1).flatten(-2)

    def apart(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        return x.unflatten(-1, (-1, sum(widths))).split(list(widths), -1)

    def rotate_pairs(self, x: Tensor) -> Tensor:
        """[S, B, heads, D]"""
        return ops.rope_pairs(x, self._positions(x).t(), self.sizes.rope_theta, self.sizes.rope_scaling)

    def attend_rows(self, site: OpSite, q: Tensor, rows: Tensor, rank: int) -> Tensor:
        kv, scale, packed = self.layer.kv, self.sizes.attention_scale * self.kv.key_scale, self.packed
        rows = kv.keys(rows)
        if packed is None:
            q, rows, positions = q.transpose(0, 1), rows.transpose(0, 1), self._positions(q)
            out = ops.latent_attention(q, rows, positions, rank, scale).transpose(0, 1)
        elif packed.tree is not None:
            out = ops.tree_latent_attention(q[:, 0], rows[:, 0], packed.tree, rank, scale)[:, None]
        else:
            out = ops.packed_latent_attention(q[:, 0], rows[:, 0], packed.lengths, rank, scale)[:, None]
        return self.kv.result_of_keys(out)

    def convolve(self, site: OpSite, x: Tensor, weight: Tensor) -> Tensor:
        return self._in_rows(lambda x: ops.causal_conv(x, weight, self._lengths(x))[0], x)

    def recur(self, site: OpSite, *inputs: Tensor) -> Tensor:
        return self._in_rows(lambda *inputs: ops.gated_delta_rule(*inputs, self._lengths(inputs[0]))[0], *inputs)

    def _lengths(self, x: Tensor) -> Tensor:
        """int64 [B], of rows end to end."""
        if self.packed is None:
            return torch.full((self._batch,), len(x) // self._batch, device=x.device)
        return self.packed.lengths if self.packed.tree is None else self.packed.tree.lengths

    def _in_rows(self, op: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """An op of rows end to end [T, ...], of values [S, B, ...]."""
        self._batch, tree = inputs[0].shape[1], None if self.packed is None else self.packed.tree
        rows = [x.transpose(0, 1).flatten(0, 1) for x in inputs]
        rows = rows if tree is None else [ops.gathered(x, tree.flat) for x in rows]
        out = op(*rows)
        out = out if tree is None else out[tree.first]
        return out.unflatten(0, (self._batch, -1)).transpose(0, 1)

    def rotate(self, q: Tensor, k: Tensor, norms: None = None) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        how = sizes.rope_theta, sizes.rotary_dim, sizes.rope_scaling
        rotated = (ops.rope(x.transpose(0, 1), self._positions(x), *how).transpose(0, 1) for x in (q, k))
        return tuple(rotated)  # type: ignore[return-value]

    def attend(self, site: OpSite, q: Tensor, k: Tensor, v: Tensor, **unused: None) -> Tensor:
        attention = self.layer.self_attention
        if attention.checkpoint_core_attention and self.layer.training:
            return tensor_parallel.checkpoint(self._attend, False, q, k, v)  # type: ignore[no-any-return]
        return self._attend(q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv, scale = self.layer.kv, self.sizes.head_dim**-0.5 * self.kv.key_scale
        k, v = kv.keys(k), kv.values(v)
        if (rows := self.packed) is not None:
            q, k, v = (x[:, 0] for x in (q, k, v))
            if rows.tree is not None:
                out = ops.tree_attention(q, k, v, rows.tree, scale)
            else:
                out = ops.packed_attention(q, k, v, rows.lengths, scale)
            return self.kv.result(out).flatten(1).unsqueeze(1)
        positions = self._positions(q)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if self.layer.shared:
            group = parallel_state.get_context_parallel_group()
            out = shared_attention(q, k, v, positions, scale, group)
        else:
            out = ops.attention(q, k, v, positions, scale)
        return self.kv.result(out).transpose(0, 1).flatten(2)

    def _positions(self, x: Tensor) -> Tensor:
        """[B, S] of [S, B, ...]"""
        if self.packed is not None:
            return self.packed.positions[None]
        if self.layer.shared:
            group = parallel_state.get_context_parallel_group()
            own = own_positions(x.shape[0] * group.size(), group.rank(), group.size()).to(x.device)
        else:
            own = torch.arange(x.shape[0], device=x.device)
        return own.expand(x.shape[1], -1)

    def choose(self, site: OpSite, route: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return route(choose=self.layer.mlp.router._choose)

    def experts(self, site: OpSite, x: Tensor, probs: Tensor, chosen: Tensor, rows: None = None) -> Tensor:
        moe = self.layer.mlp
        order, counts = ops.group_by_expert(chosen, self.sizes.experts)
        pairs = rows_of_pairs(x.flatten(0, -2), order, self.sizes.top_k)
        if moe.ep_group.size() == 1:
            outputs = moe.experts(pairs, counts)[0]
        else:
            outputs = on_their_ranks(lambda *here: moe.experts(*here)[0], pairs, counts, moe.ep_group)
        return ops.combine(outputs, probs, order, x.dtype).view_as(x)

    def _place(self, row: TensorRow) -> str:
        return row.megatron.parameter.removeprefix(f"decoder.layers.{row.layer}.")

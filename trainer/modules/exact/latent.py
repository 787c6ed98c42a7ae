"""Latent attention, absorbed: `numerics.ops.latent`, as the engine computes it over its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics import ops
from fp8rl.trainer.modules import latent
from fp8rl.trainer.modules.precision import Adapter, LayerPrecision
from fp8rl.trainer.step.microbatches import PackedRows


class NarrowLinear(latent.NarrowLinear):
    """A narrow product by the shared definition, with its adapter, which each rank has whole as well."""

    adapter: Adapter | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.precision.product(self.kind, x, self.weight, self.adapter), None


@dataclass(frozen=True)
class OfHeads:
    """The products of heads with their parts of kv_b, weight [heads * (plain + value), kv rank]: `ops.head_linear`.

    operand: of the weight, if it is quantized. adapter: what stands beside it, or is in what is served of it.
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
            return ops.reaching_term(ops.head_linear(x, self.weight, self.operand, *place), term)
        term = ops.head_term(x, self.adapter.low_rank, *place)
        return ops.head_linear(x, self.weight, self.operand, *place, term)


class LatentAttention(latent.LatentAttention):
    """Queries and latent rows of a sequence, and attention of the first over the second.

    The norm of the rows is `linear_kv_up_proj`'s, whose weight is multiplied head by head (`ops.head_linear`); of the
    module itself nothing runs.
    """

    def __init__(self, *args: Any, precision: LayerPrecision, **kwargs: Any) -> None:
        super().__init__(*args, precision=precision, narrow=NarrowLinear, **kwargs)
        self.precision = precision

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H], of a tensor-parallel rank its part of S -> ([S, B, H] likewise, no bias)"""
        queries = self._queries(hidden_states)
        rows = self._rows(hidden_states)
        of_heads = self._of_heads()

        def attend(queries: Tensor, rows: Tensor) -> Tensor:
            return self.core_attention(queries, rows, of_heads, packed_seq_params)

        if self.checkpoint_core_attention and self.training:
            out = tensor_parallel.checkpoint(attend, False, queries, rows)
        else:
            out = attend(queries, rows)
        return self.linear_proj(out)

    def _of_heads(self) -> OfHeads:
        p, weight = self.precision, self.linear_kv_up_proj.weight
        adapter = p.used(self.linear_kv_up_proj.adapter)
        if not p.quantizes("kv_b_proj"):
            return OfHeads(p.plain(weight), None, adapter)
        return OfHeads(weight, p.operand(weight), adapter)

    def _queries(self, x: Tensor) -> Tensor:
        """[S, B, heads * D] of the whole sequence and this rank's heads"""
        if self.config.q_lora_rank is None:
            return self.linear_q_proj(x)[0]
        return self.linear_q_up_proj(self.linear_q_down_proj(x)[0])[0]

    def _rows(self, x: Tensor) -> Tensor:
        """[S, B, kv rank + rope] of the whole sequence: the normed latent, and the key that is not rotated yet."""
        latent, key = self.linear_kv_down_proj(x)[0].split(
            (self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), -1
        )
        rows = torch.cat((self.linear_kv_up_proj.normalized(latent.contiguous()), key), -1)
        if not self.config.sequence_parallel:
            return rows
        return gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True, group=self.tp_group)


class LatentCore(nn.Module):
    """Rotation, the products of heads, and the attention between them.

    Rows start at position 0 and are right-padded, or lie end to end and bring their positions.
    """

    def __init__(self, *, sizes: ModelSizes, **unused: Any) -> None:
        super().__init__()
        assert sizes.latent is not None
        self.sizes, self.latent = sizes, sizes.latent
        self.rope_theta, self.yarn, self.scale = sizes.rope_theta, sizes.yarn, sizes.attention_scale

    def forward(self, queries: Tensor, rows: Tensor, of_heads: OfHeads, packed: PackedRows | None = None) -> Tensor:
        """queries [S, B, heads * D]; rows [S, B, kv rank + rope] -> [S, B, heads * value]"""
        length, batch = rows.shape[:2]
        plain, value, rank = self.sizes.plain_dim, self.latent.value_dim, self.latent.kv_rank
        positions = torch.arange(length, device=rows.device) if packed is None else packed.positions
        positions = positions[:, None].expand(length, batch)
        q = queries.unflatten(-1, (-1, self.sizes.head_dim))
        keys = self.rotated(rows[..., None, rank:], positions)[:, :, 0]
        rows = torch.cat((rows[..., :rank], keys), -1)
        inside = of_heads(q[..., :plain].flatten(0, 1), 0, plain, True)
        q = torch.cat((inside.unflatten(0, (length, batch)), self.rotated(q[..., plain:], positions)), -1)
        if packed is None:
            q, rows = q.transpose(0, 1), rows.transpose(0, 1)
            out = ops.latent_attention(q, rows, positions.t(), rank, self.scale).transpose(0, 1)
        else:
            out = ops.packed_latent_attention(q[:, 0], rows[:, 0], packed.lengths, rank, self.scale)[:, None]
        out = of_heads(out.flatten(0, 1), plain, value)
        return out.flatten(1).unflatten(0, (length, batch))

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [S, B, heads, rope]"""
        return ops.rope_pairs(x, positions, self.rope_theta, self.yarn)

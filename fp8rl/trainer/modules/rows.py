"""Lays out a micro-batch's rows for attention: packed end to end, or split over context-parallel ranks.

With context parallelism, a row is cut into 2 * ranks chunks. Rank r has the chunk at index r from the front and the one
at index r from the back, so that all ranks attend to equally many keys (Llama 3, arXiv 2407.21783). Each rank gathers
the keys and values of all ranks in the order of positions, and runs the attention op on its own queries. So no result
depends on the number of ranks. In the backward pass, a rank gathers all queries for the gradients of its own keys and
values. So one rank computes each sum over queries or keys, in the order in which a single rank would compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops import TokenTree
from fp8rl.trainer import device
from fp8rl.trainer.config import CHUNKS


@dataclass(kw_only=True)
class PackedRows(PackedSeqParams):
    """The layout of packed rows for attention. The base class has the fields that Megatron reads."""

    lengths: Tensor
    """int64 [B], the length of each row."""
    positions: Tensor
    """int64 [T], the position of each token in its row."""
    tree: TokenTree | None = None
    """The prefix tree of the rows. None if the rows do not share prefixes."""

    @classmethod
    def of(cls, lengths: Tensor) -> PackedRows:
        """Build the layout. lengths: int64 [B] on the CPU, each 1 or more."""
        stops = lengths.cumsum(0)
        positions = torch.arange(int(stops[-1])) - (stops - lengths).repeat_interleave(lengths)
        cumulated = torch.cat([stops.new_zeros(1), stops]).int().to(device.current())
        longest = int(lengths.max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cumulated,
            cu_seqlens_kv=cumulated,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths.to(device.current()),
            positions=positions.to(device.current()),
        )


def own_positions(width: int, rank: int, ranks: int) -> Tensor:
    """Return int64 [width / ranks], the positions of a rank's tokens in a row. width: a multiple of 2 * ranks."""
    chunks = torch.arange(width).view(CHUNKS * ranks, -1)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks in the order of their positions, [B, S / ranks, ...] -> [B, S, ...].

    In the backward pass each rank takes its part of the gradient. The gradient must be the same on all ranks.
    """
    found: Tensor = _Gathered.apply(part, group)
    return found


def shared_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, group: dist.ProcessGroup
) -> Tensor:
    """Compute `ops.attention` of this rank's queries over the keys of all ranks.

    q [B, S / ranks, heads, D]; k, v [B, S / ranks, kv heads, D]; positions int64 [B, S / ranks], from `own_positions`.
    The result has q's shape. The backward pass computes the gradients of this rank's q, k and v.
    """
    out: Tensor = _SharedAttention.apply(q, k, v, positions, scale, group)
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _in_order(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        mine = own_positions(grad.shape[1], ctx.group.rank(), ctx.group.size())
        return grad[:, mine.to(grad.device)], None


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, group: dist.ProcessGroup
    ) -> Tensor:
        keys, values = (_in_order(x, group) for x in (k, v))
        out, result, logsumexp = ops.attention_forward(ops.AttentionInputs(q, keys, values, positions, scale))
        ctx.save_for_backward(q, k, v, positions, result, logsumexp)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, positions, result, logsumexp = ctx.saved_tensors
        keys, values = (_in_order(x, ctx.group) for x in (k, v))
        inputs = ops.AttentionInputs(q, keys, values, positions, ctx.scale)
        dq, delta = ops.attention_dq(grads[0], inputs, result, logsumexp)
        dout, queries, logsumexp, delta, everyone = (
            _in_order(x, ctx.group) for x in (grads[0], q, logsumexp, delta, positions)
        )
        parts = []
        for own_keys, own_values, at in zip(*(x.chunk(CHUNKS, 1) for x in (k, v, positions)), strict=True):
            behind = everyone - at[:, :1]  # positions, counted from the first of these keys
            inputs = ops.AttentionInputs(queries, own_keys, own_values, behind, ctx.scale)
            parts.append(ops.attention_dkv(dout, inputs, logsumexp, delta))
        dk, dv = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return dq, dk, dv, None, None, None


def _in_order(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' parts in the order of positions: [B, S / ranks, ...] -> [B, S, ...]."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    fronts, backs = zip(*(part_of.chunk(CHUNKS, 1) for part_of in parts), strict=True)
    return torch.cat((*fronts, *reversed(backs)), 1)

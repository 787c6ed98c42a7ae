"""The trainer's side of a layer's program: gives the ops their weights, products and attention in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from torch import Tensor

from fp8rl.models.program import OpSite
from fp8rl.numerics import ops
from fp8rl.numerics.ops import HeadNorms
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.modules.exact import Normed, whole_sequence
from fp8rl.trainer.modules.rows import PackedRows, own_positions, shared_attention


class LayerHost:
    """The trainer's `models.program.Host` for one layer.

    layer: a `ProgramLayer`. packed: the layout of packed rows. None: rows are padded on the right, so that a token's
    position is its index, and padding is never a key of a real query.
    """

    def __init__(self, layer: Any, packed: PackedRows | None) -> None:
        self.layer, self.packed, self.sizes, self.kv = layer, packed, layer.sizes, layer.kv.format
        self.spec: QuantSpec = layer.precision.spec
        self._batch = 1
        self._known: Tensor | None = None

    # Weights and products

    def tensor(self, site: OpSite, name: str = "", of: str = "") -> Tensor:
        return self.layer.weights[of or site.op.name].tensors[name]  # type: ignore[no-any-return]

    def product(self, site: OpSite, x: Any, rows: Any = None) -> Tensor:
        (product,) = self.layer.weights[site.op.name].products
        return product(x)  # type: ignore[no-any-return]

    def products(self, site: OpSite, x: Any, rows: Any = None) -> Sequence[Tensor]:
        return [part for each in self.layer.weights[site.op.name].products for part in each.cut(each(x))]

    def product_of_heads(self, site: OpSite) -> Callable[..., Tensor]:
        (product,) = self.layer.weights[site.op.name].products
        return product.of_heads  # type: ignore[no-any-return]

    # Ranks

    def whole(self, x: Tensor) -> Tensor:
        return whole_sequence(x, self.layer.config.sequence_parallel, self.layer.tp_group)

    def over_heads(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply the function to the heads of all ranks, so that the bits do not depend on the layout. On each rank, the
        gradient of a weight comes only from the rank's own heads."""
        group = self.layer.tp_group
        whole = function(all_gather_last_dim_from_tensor_parallel_region(x, group))
        return whole.chunk(group.size(), -1)[group.rank()]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the parts of each head next to each other, so that a rank has complete heads."""
        return torch.cat(list(parts), -1).flatten(-2)

    def apart(self, x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
        return x.unflatten(-1, (-1, sum(widths))).split(list(widths), -1)

    def embed(self, site: OpSite, tokens: Tensor) -> Tensor:
        raise NotImplementedError("Megatron's GPTModel has both ends of the model")

    logprobs = embed

    # Attention

    def rotate(self, q: Any, k: Any, norms: HeadNorms | None = None) -> tuple[Tensor, Tensor]:
        if isinstance(q, Normed):
            q, k, norms = q.x, k.x, HeadNorms(q.weight, k.weight, q.eps)
        sizes, positions, rows = self.sizes, self._positions(q).t().flatten(), q.shape[:2]
        how = sizes.rope_theta, sizes.rotary_dim, sizes.rope_scaling, norms
        q, k = ops.rope_heads(q.flatten(0, 1), k.flatten(0, 1), positions, *how)
        return q.unflatten(0, rows), k.unflatten(0, rows)

    def rotate_pairs(self, x: Tensor) -> Tensor:
        return ops.rope_pairs(x, self._positions(x).t(), self.sizes.rope_theta, self.sizes.rope_scaling)

    def attend(
        self, site: OpSite, q: Tensor, k: Tensor, v: Tensor, rotates: bool = False, norms: HeadNorms | None = None
    ) -> Tensor:
        kv, scale = self.layer.kv, self.sizes.head_dim**-0.5 * self.kv.key_scale
        if (rows := self.packed) is not None:
            q, k, v = q[:, 0], kv.keys(k[:, 0]), kv.values(v[:, 0])
            if rows.tree is not None:
                out = ops.tree_attention(q, k, v, rows.tree, scale)
            else:
                out = ops.packed_attention(q, k, v, rows.lengths, scale)
            return self.kv.result(out).flatten(1).unsqueeze(1)
        positions = self._positions(q)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = kv.keys(k), kv.values(v)
        if self._shares_rows:
            out = shared_attention(q, k, v, positions, scale, parallel_state.get_context_parallel_group())
        else:
            out = ops.attention(q, k, v, positions, scale)
        return self.kv.result(out).transpose(0, 1).flatten(2)

    def attend_rows(self, site: OpSite, q: Tensor, rows: Tensor, rank: int) -> Tensor:
        kv, scale, packed = self.layer.kv, self.sizes.attention_scale * self.kv.key_scale, self.packed
        if packed is None:
            positions, rows = self._positions(q), kv.keys(rows.transpose(0, 1))
            out = ops.latent_attention(q.transpose(0, 1), rows, positions, rank, scale).transpose(0, 1)
        elif packed.tree is not None:
            out = ops.tree_latent_attention(q[:, 0], kv.keys(rows[:, 0]), packed.tree, rank, scale)[:, None]
        else:
            out = ops.packed_latent_attention(q[:, 0], kv.keys(rows[:, 0]), packed.lengths, rank, scale)[:, None]
        return self.kv.result_of_keys(out)

    @property
    def _shares_rows(self) -> bool:
        """Whether context-parallel ranks split the rows."""
        return self.layer.config.context_parallel_size > 1

    def _positions(self, x: Tensor) -> Tensor:
        """Return the positions [B, S] of the tokens in x [S, B, ...]."""
        if self.packed is not None:
            return self.packed.positions[None]
        if self._known is None:
            positions = torch.arange(x.shape[0], device=x.device)
            if self._shares_rows:
                group = parallel_state.get_context_parallel_group()
                positions = own_positions(x.shape[0] * group.size(), group.rank(), group.size()).to(x.device)
            self._known = positions.expand(x.shape[1], -1)
        return self._known

    # Linear attention goes from token to token of whole rows: between `in_rows` and `recur`, values are [T, ...].

    def in_rows(self, x: Tensor) -> Tensor:
        self._batch = x.shape[1]
        rows, tree = x.transpose(0, 1).flatten(0, 1), self.packed and self.packed.tree
        return rows if tree is None else ops.gathered(rows, tree.flat)

    def by_rows(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        return function(*(x.transpose(0, 1).contiguous() for x in values)).transpose(0, 1)  # keeps no whole product

    def convolve(self, site: OpSite, x: Tensor, weight: Tensor) -> Tensor:
        return ops.causal_conv(x, weight, self._lengths(x))

    def recur(self, site: OpSite, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out, tree = ops.gated_delta_rule(q, k, v, g, beta, self._lengths(q)), self.packed and self.packed.tree
        out = out if tree is None else out[tree.first]
        return out.unflatten(0, (self._batch, -1)).transpose(0, 1)

    def _lengths(self, x: Tensor) -> Tensor:
        """Return int64 [B], the lengths of the rows."""
        if self.packed is None:
            return torch.full((self._batch,), len(x) // self._batch, device=x.device)
        return self.packed.lengths if self.packed.tree is None else self.packed.tree.lengths

    # Experts

    def choose(self, site: OpSite, route: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Choose the experts to replay or, without replay, the experts with the highest probabilities."""
        probs, own = route()
        given = own if (replay := self.layer.router_replay).router_replay_action is None else replay.experts(own)
        return (probs, own) if given is own else route(given=given)

    def experts(self, site: OpSite, x: Tensor, probs: Tensor, chosen: Tensor, rows: Any = None) -> Tensor:
        """Compute the experts of each token. Experts return unweighted outputs in the model's dtype. The rank with the
        token multiplies them by its probabilities, sums in FP32 in ascending expert order, and rounds once."""
        experts, group, tokens = self.layer.weights[site.op.name].experts, self.layer.groups.ep, x.flatten(0, -2)
        if group.size() == 1 and not experts.merges:
            return ops.routed_experts(tokens, probs, chosen, *experts.operands()).view_as(x)
        order, counts = ops.group_by_expert(chosen, self.sizes.experts)
        pairs = ops.rows_of_pairs(tokens, order, self.sizes.top_k)
        outputs = experts(pairs, counts) if group.size() == 1 else on_their_ranks(experts, pairs, counts, group)
        return ops.combine(outputs, probs, order, x.dtype).view_as(x)


# Tokens on their way to their experts and back.
#
# A rank that has all experts sorts (token, choice) pairs by expert, as an engine does, and never waits for the device.
# Expert-parallel ranks tell each other how many rows they send. These numbers are the sizes of what arrives, so a rank
# waits for them, once in a forward. Megatron's dispatcher waits four times a layer, on one rank too.


def on_their_ranks(
    experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Send rows [T * k, H] to their experts on all ranks, and return the experts' outputs in the order of the rows.

    rows: sorted by expert. counts: int64 [experts], the number of rows of each expert. experts: computes this rank's
    experts on the rows [R, H] that arrived (sorted by expert, then by sender), given each expert's number of rows.
    """
    ranks = group.size()
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(ranks, -1)  # by the rank that sends, and the expert here
    leave, arrive = on_host(torch.stack((counts.view(ranks, -1).sum(1), arriving.sum(1))), len(rows))
    here: Tensor = all_to_all(group, rows, arrive, leave)
    each = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
    order = each.repeat_interleave(arriving.flatten(), output_size=sum(arrive)).argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    made = experts(_Reordered.apply(here, order, place), arriving.sum(0))
    back: Tensor = all_to_all(group, _Reordered.apply(made, place, order), leave, arrive)
    return back


def on_host(sizes: Tensor, rows: int) -> list[list[int]]:
    """Wait for `sizes`, int64 [2, ranks]: how many rows this rank sends to each rank, and receives from each rank.

    rows: the number of all rows that it sends. The CPU knows this number without waiting.
    """
    return sizes.tolist()  # type: ignore[no-any-return]


class _Reordered(torch.autograd.Function):
    """Permutes rows. inverse: the inverse of the permutation `order`, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None

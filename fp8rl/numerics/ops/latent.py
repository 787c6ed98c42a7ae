"""Defines multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1), absorbed: over the narrow rows of a cache.

A token's row is [latent | rotated key], R + P numbers that all heads share. A head's keys and values are products of
the latent with its part of `kv_b`, W_k [N, R] and W_v [V, R]. Keys and values are not computed. Instead the query is
multiplied with W_k, and the result of the attention with W_v:

1. a head's query [N + P] becomes [q_nope W_k | q_rope], rounded once;
2. all heads attend to the rows: a row is the key, and its first R numbers are the value (`ops.attention`);
3. W_v times the result, rounded once.

Latents are not quantized for these products. If `kv_b` is in FP8, it is dequantized and multiplied with unquantized
numbers, as in SGLang. A head does not depend on the others.

An adapter of `kv_b` (`numerics.ops.low_rank`) adds to both products before they are rounded. All heads share A [r, R];
each head has its part of B, B_k [N, r] and B_v [V, r]. Step 1 adds round(scale * (h A)) with h = round(q_nope B_k).
Step 3 adds, with o the attention's result, round(g B_v^T) with g = round(scale * round(o A^T)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import AttentionProbe, Probes, composed, op
from fp8rl.numerics.ops.attention import TokenTree, attention, packed_attention, paged_attention
from fp8rl.numerics.ops.linear import dense, linear, product, weight_operand, wide_mm
from fp8rl.numerics.ops.low_rank import LowRank, low_rank_term
from fp8rl.numerics.ops.trees import tree_attention
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec


@op
def latent_attention(q: Tensor, rows: Tensor, positions: Tensor, rank: int, scale: float) -> Tensor:
    """Compute `attention` of q [B, Q, heads, D] over rows [B, T, D], whose first `rank` numbers are the values.

    positions int64 [B, Q]. Returns [B, Q, heads, rank]. A row's gradient is the sum of its key's and its value's.
    """
    keys = rows.unsqueeze(2)
    return attention(q, keys, keys[..., :rank], positions, scale)


@op
def packed_latent_attention(q: Tensor, rows: Tensor, lengths: Tensor, rank: int, scale: float) -> Tensor:
    """Compute `latent_attention` of sequences that are end to end, each over its own rows, bit for bit.

    q [T, heads, D]; rows [T, D]; lengths int64 [B], 1 or more each, with the sum T. Returns [T, heads, rank].
    """
    keys = rows.unsqueeze(1)
    return packed_attention(q, keys, keys[..., :rank], lengths, scale)


@op
def paged_latent_attention(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    requests: Tensor,
    new: Tensor | None,
    lengths: Tensor,
    rank: int,
    scale: float,
) -> Tensor:
    """Compute `latent_attention` of the newest tokens over rows in the slots of a cache [slots, D], bit for bit.

    q [tokens, heads, D]; other arguments as in `paged_attention`. Returns [tokens, heads, rank].
    """
    keys = cache.unsqueeze(1)
    return paged_attention(q, keys, keys[..., :rank], table, requests, new, lengths, scale)


@op
def tree_latent_attention(q: Tensor, rows: Tensor, tree: TokenTree, rank: int, scale: float) -> Tensor:
    """Compute `latent_attention` of each token of a prefix tree over the rows on its path, bit for bit.

    q [T, heads, D]; rows [T, D]. Returns [T, heads, rank].
    """
    keys = rows.float().unsqueeze(1)  # the gradients of key and value meet before they are rounded
    return tree_attention(q, keys, keys[..., :rank], tree, scale)


@composed
def head_linear(
    x: Tensor,
    weight: Tensor,
    operand: Any,
    first: int,
    count: int,
    transposed: bool = False,
    plus: Tensor | None = None,
) -> Tensor:
    """Multiply each head's rows with its W [count, R], a part of weight [heads * M, R].

    A head has M rows of the weight; its W is `count` of these rows, from `first` on. x [T, heads, R] -> [T, heads,
    count], x W^T of each head; transposed: x [T, heads, count] -> [T, heads, R], x W. plus, of the result's shape and
    dtype, is added to the FP32 sum, which is rounded once to x's dtype. weight receives the gradient. operand: the
    weight's `weight_operand` or `Frozen` if it is quantized; it is dequantized, and x is not quantized. None: the
    weight itself.
    """
    return _HeadProduct.apply(x, weight, operand, first, count, transposed, plus)


def head_term(x: Tensor, low_rank: LowRank, first: int, count: int, transposed: bool = False) -> Tensor:
    """Return the term that a weight's adapter adds to the `head_linear` of these arguments (see the module)."""
    if transposed:
        h = head_linear(x, low_rank.b, None, first, count, True)
        return low_rank.on_rows(low_rank_term(h, low_rank.a.t().contiguous(), low_rank.scale))
    h = linear(x, low_rank.a) * low_rank.scale
    return low_rank.on_rows(head_linear(h, low_rank.b, None, first, count))


@op
def head_product(
    x: Tensor,
    weight: Tensor,
    operand: Any,
    first: int,
    count: int,
    transposed: bool = False,
    plus: Tensor | None = None,
) -> Tensor:
    """Compute `head_linear` without a gradient."""
    right = _matrices(weight, operand, x.shape[1], first, count, transposed)
    more = [None] * len(right) if plus is None else plus.unbind(1)
    heads = zip(x.unbind(1), right, more, strict=True)
    return torch.stack([product(part.contiguous(), w.contiguous(), x.dtype, d) for part, w, d in heads], 1)


def _matrices(weight: Tensor, operand: Any, heads: int, first: int, count: int, transposed: bool) -> Tensor:
    """Return the W of each head [heads, count, R]; transposed: [heads, R, count]."""
    found = dense(weight if operand is None else operand).unflatten(0, (heads, -1))[:, first : first + count]
    return found.transpose(1, 2) if transposed else found


class _HeadProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, operand: Any, first: int, count: int, transposed: bool, plus: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.operand, ctx.first, ctx.count, ctx.transposed = operand, first, count, transposed
        return head_product(x, weight, operand, first, count, transposed, plus)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The gradient of the weight is zero in the rows of a head that the product did not take."""
        (x, weight), dy, (first, count) = ctx.saved_tensors, grads[0], (ctx.first, ctx.count)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            right = _matrices(weight, ctx.operand, x.shape[1], first, count, ctx.transposed)
            right = right.to(x.dtype) if x.is_cuda else right  # FP32 scales would make it a product of FP32
            dx = torch.stack([wide_mm(d, w) for d, w in zip(dy.unbind(1), right, strict=True)], 1).to(x.dtype)
        if ctx.needs_input_grad[1]:
            left, right = (x, dy) if ctx.transposed else (dy, x)
            dw = torch.zeros_like(weight)
            into = dw.unflatten(0, (x.shape[1], -1))[:, first : first + count]
            for head in range(x.shape[1]):
                into[head] = wide_mm(left[:, head].t(), right[:, head])
        return dx, dw, None, None, None, None, dy if ctx.needs_input_grad[6] else None


def _rows(random: Callable[..., Tensor], count: int) -> dict[str, Callable[[int], Tensor]]:
    kv_b, low_rank = random(384, 128) / 16, LowRank(random(8, 128) / 16, random(384, 8), 0.5)
    operand = weight_operand(quantize(kv_b, QuantSpec.preset("fp8_block_pow2").weight))
    x, half = random(count, 4, 128), random(count, 4, 64)

    def adapted(rows: Tensor, first: int, wide: int, transposed: bool = False) -> Tensor:
        plus = head_term(rows, low_rank, first, wide, transposed)
        return head_linear(rows, kv_b, operand, first, wide, transposed, plus)

    return {
        "head_linear": lambda n: head_linear(x[:n], kv_b, operand, 0, 64),
        "head_linear, transposed": lambda n: head_linear(half[:n], kv_b, operand, 32, 64, True),
        "adapted head_linear": lambda n: adapted(x[:n], 0, 64),
        "adapted head_linear, transposed": lambda n: adapted(half[:n], 32, 64, True),
    }


PROBES = Probes(
    rows=_rows,
    attention=AttentionProbe(
        "latent attention",
        queries=(4, 96),
        keys=(96,),
        whole=latent_attention,
        packed=packed_latent_attention,
        paged=paged_latent_attention,
        tree=tree_latent_attention,
        values=64,
    ),
)

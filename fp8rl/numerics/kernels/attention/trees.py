"""Attention over prefix trees on the tensor core: `numerics.ops.trees`, by the kernels of rows that share nothing.

For queries a tree's tokens are the slots of a paged cache, and the path of a row is its table: the forward and the
gradient of queries read keys from slots, in the splits and chunks of the path. For keys the queries are an interval:
those of a tile of keys lie between the first of them and the largest end, where query q sees key k if k <= q < end[k].
The gradient of a token is added up over the rows that share it in the order of this interval, by one program, in FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import dense_rows
from fp8rl.numerics.kernels.attention.forward import Attention, check
from fp8rl.numerics.ops.attention import TokenTree


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: TokenTree, scale: float) -> Tensor:
    """`numerics.ops.tree_attention`, without a wait for the device (`forward.packed_attention`). Raises UserError: as
    of `forward.attention`."""
    check(q, k, v)
    rows = (dense_rows(x)[None] for x in (q, k, v))
    return Attention.apply(*rows, places(q), scale, None, tree)[0]


def places(q: Tensor) -> Tensor:
    """Return int64 [1, T], those of the tokens q [T, ...] in the layout."""
    return torch.arange(len(q), device=q.device)[None]

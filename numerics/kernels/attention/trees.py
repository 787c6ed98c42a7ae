"""Attention over prefix trees on the tensor core: `numerics.ops.trees`, by the kernels of rows that share nothing.

For queries a tree's tokens are the slots of a paged cache, and the path of a row is its table: the forward and the
gradient of queries read keys from slots, in the splits and chunks of the path. For keys the queries are an interval:
those of a tile of keys lie between the first of them and the largest end, where query q sees key k if k <= q < end[k].
The gradient of a token is added up over the rows that share it in the order of this interval, by one program, in FP32.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fp8rl.numerics.kernels.arithmetic import dense_rows
from fp8rl.numerics.kernels.attention.forward import Attention, check
from fp8rl.numerics.kernels.attention.latent import Latent, check_latent
from fp8rl.numerics.ops.trees import TokenTree


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: TokenTree, scale: float) -> Tensor:
    """`numerics.ops.tree_attention`, without a wait for the device (`forward.packed_attention`).

    Raises:
        UserError: as of `forward.attention`.
    """
    check(q, k, v)
    rows = (dense_rows(x)[None] for x in (q, k, v))
    return Attention.apply(*rows, _places(q), scale, None, _with_slots(tree))[0]


def tree_latent_attention(q: Tensor, rows: Tensor, tree: TokenTree, rank: int, scale: float) -> Tensor:
    """`numerics.ops.tree_latent_attention`, as `tree_attention`.

    Raises:
        UserError: as of `latent.latent_attention`.
    """
    check_latent(q, rows, rank)
    q, rows = dense_rows(q)[None], dense_rows(rows)[None]
    return Latent.apply(q, rows, _places(q[0]), rank, scale, None, _with_slots(tree))[0]


def _places(q: Tensor) -> Tensor:
    """int64 [1, T], of the tokens q [T, ...] in the layout."""
    return torch.arange(len(q), device=q.device)[None]


def _with_slots(tree: TokenTree) -> TokenTree:
    """The tree with a table of int32, of which a step's slots stay in registers; those of int64 do not."""
    return dataclasses.replace(tree, table=tree.table.int())

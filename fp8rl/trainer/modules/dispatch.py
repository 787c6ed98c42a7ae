"""Tokens on their way to their experts and back, in exact mode.

A rank that has all experts sorts (token, choice) pairs by expert, as an engine does, and never waits for the device.
Expert-parallel ranks tell each other how many rows they send. These numbers are the sizes of what arrives, so a rank
waits for them, once in a forward. Megatron's dispatcher waits four times a layer, on one rank too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from fp8rl.numerics import ops


def rows_of_pairs(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Copy a token for each of its experts: x [T, H] -> rows [T * k, H].

    order: int64 [T * k], the (token, choice) pairs in the order of the rows, choices in ascending expert id. The
    gradient of a token is the sum of its rows' in that order, in FP32, rounded once.
    """
    return _Rows.apply(x, order, top_k)  # type: ignore[no-any-return]


def on_their_ranks(
    experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Return what the experts of all ranks make of this rank's rows [T * k, H], in the order of the rows.

    rows are sorted by expert, and counts, int64 [experts], says how many each has. experts: computes the rows [R, H] of
    this rank's experts, sorted by expert and then by the rank that they come from, of the number of each.
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
    """Wait for the numbers of rows that go to each rank, and come from it: int64 [2, ranks].

    rows: the sum of the first ones, which the host knows.
    """
    return sizes.tolist()  # type: ignore[no-any-return]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = len(x), top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        ones = torch.ones(ctx.shape, dtype=torch.float32, device=order.device)
        return ops.combine(grads[0], ones, order, grads[0].dtype), None, None


class _Reordered(torch.autograd.Function):
    """Rows in another order, a permutation whose inverse is given too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None

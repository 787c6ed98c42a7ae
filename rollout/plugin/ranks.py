"""An engine of several tensor-parallel ranks in exact mode: what one rank alone would compute, to the bit.

SGLang has each rank round its part of a sum to BF16 and then adds the parts up. Here the ranks exchange what is not
rounded yet, each makes the whole result in the trainer's order, and rank 0 alone hands it to SGLang's sum. The others
add -0, which changes nothing, not even the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics import ops
from fp8rl.numerics.ops import LowRank
from fp8rl.rollout.plugin.state import state


def splits(layer: Any) -> bool:
    """Return whether the ranks share the K of this layer's product."""
    from sglang.srt.layers.linear import RowParallelLinear

    return isinstance(layer, RowParallelLinear) and layer.tp_size > 1


def merged(partial: Tensor, x: Tensor, low_rank: LowRank | None = None) -> Tensor:
    """The sum of all ranks' FP32 partials [T, N] of x [T, K], in rank order, and the term of the product's adapter,
    rounded once: on rank 0."""
    from sglang.srt.distributed import get_tp_group

    width = partial.shape[-1]
    if low_rank is not None:
        partial = torch.cat((partial, ops.linear_partial(x, low_rank.a)), -1)
    parts, plus = get_tp_group().all_gather(partial.contiguous()[None], dim=0), None
    if low_rank is not None:
        h = ops.merge_partials(list(parts[..., width:]), x.dtype)
        plus = low_rank.on_rows(ops.low_rank_term(h, low_rank.b, low_rank.scale, low_rank.parts))
    return _on_rank_0(ops.merge_partials(list(parts[..., :width]), x.dtype, plus))


def experts(
    outputs_of: Callable[[Tensor, Tensor], Tensor], chosen: Tensor, probs: Tensor, layer: Any, dtype: torch.dtype
) -> Tensor:
    """The weighted sum [T, H] over each token's experts, of which this rank has some: on rank 0.

    chosen: int64 [T, k], an expert's index on this rank, or -1 if another has it. outputs_of: what the experts make of
    (token, choice) pairs [n], sorted by expert, with the number of pairs of each.
    """
    from sglang.srt.distributed import get_tp_group

    held = layer.w13_weight.shape[0]
    order, counts = ops.group_by_expert(chosen + 1, held + 1)
    here = order[int(counts[0]) :]  # behind the pairs of other ranks
    outputs = outputs_of(here, counts[1:])
    choices = outputs.new_full((chosen.numel(), outputs.shape[-1]), -0.0)
    choices[here] = outputs
    choices = get_tp_group().all_reduce(choices)  # of each only one rank has more than -0
    whole = torch.arange(chosen.numel(), device=chosen.device)
    return _on_rank_0(ops.combine(choices, probs, whole, dtype))


def agreed(number: float) -> float:
    """Rank 0's number, on every rank."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return number
    shared = torch.tensor([number], dtype=torch.float64)
    torch.distributed.broadcast(shared, group.ranks[0], group.cpu_group)
    return shared.item()


def _on_rank_0(result: Tensor) -> Tensor:
    return result if state().weights.rank.rank == 0 else torch.full_like(result, -0.0)

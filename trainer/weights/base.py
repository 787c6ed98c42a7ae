"""A frozen parameter of the trainer, read from a base in the engine's layout.

What products take in FP8 is multiplied from the base's codes (`numerics.frozen`); Megatron's order of rows and a rank's
part are taken in each call. What is not quantized becomes a view of the base where it stands there as here, and stays
the trainer's own where it does not: a fused q|k|v in BF16, a part of a row-parallel weight, another dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp8rl.models.base import Base
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.frozen import Frozen, freeze
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.weights.table_bridge import TableBridge


def adopt(parameter: nn.Parameter, names: Sequence[str], base: Base, scales: TableBridge, layout: Layout) -> bool:
    """Have a frozen parameter read from the base; whether it can be.

    names: in the whole model; of stacked experts, of each. scales: the bridge of the scales of weights.
    """
    in_table = all(name in base.model.tensors.in_megatron for name in names)
    rows = [scales.rows(name) for name in names] if in_table else []
    if not rows or rows[0][0].name not in base.tensors:
        return False
    stacked = parameter.dim() == 3
    held = base.fused(rows[0], len(rows) if stacked else 0)
    split = getattr(parameter, "tensor_model_parallel", False) and not stacked and rows[0][0].expert is None
    axis = getattr(parameter, "partition_dim", 0) if split else None
    ranks, rank = (layout.tp_size, layout.tp_rank) if split else (1, 0)
    if isinstance(held, QuantizedTensor):
        freeze(parameter, _frozen(held, names[0], rows[0], parameter, scales, ranks, rank, axis))
        return True
    view = held if axis is None else held.chunk(ranks, axis)[rank]
    if rows[0][0].megatron.layout == "heads" or len(rows[0]) > 1 < ranks or not _alike(view, parameter):
        return False
    parameter.data = view
    return True


def _frozen(
    held: QuantizedTensor,
    name: str,
    rows: Sequence[TensorRow],
    parameter: Tensor,
    scales: TableBridge,
    ranks: int,
    rank: int,
    axis: int | None,
) -> Frozen:
    if axis == 1:
        return Frozen(held).columns(rank, ranks)
    block = held.spec.group
    if ranks == 1 and rows[0].megatron.layout == "rows":
        return Frozen(held)
    blocks = torch.arange(held.data.shape[-2] // block, device=held.data.device)
    pieces = list(blocks.split([row.shape[0] // block for row in rows]))
    order = scales._weight_to_mcore_format(name, pieces)
    order = scales._weight_split_across_tp(name, order, parameter, ranks)[rank]
    return Frozen(held, order.contiguous(), block)


def _alike(view: Tensor, parameter: Tensor) -> bool:
    return (view.shape, view.dtype) == (parameter.shape, parameter.dtype) and view.is_contiguous()

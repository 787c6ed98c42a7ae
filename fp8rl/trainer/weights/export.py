"""Exports a model's weights as tensors of its Hugging Face checkpoint. Exactly one rank exports each tensor.

No rank needs all tensors. An expert is exported by a rank that has it. If tensor-parallel ranks split a weight, one of
them gathers the parts. If several ranks have a weight, the one with the fewest bytes to export so far exports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rl.models.shared_base import SharedBase
from fp8rl.models.tensors import TensorRow, TensorTable
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.numerics.weight_cache import Frozen, freeze
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime


class Dealer:
    """Chooses the rank that exports a parameter, so that all ranks export about equally many bytes."""

    def __init__(self, ranks: int) -> None:
        self._dealt = [0] * ranks

    def next(self, size: int) -> int:
        """Return the index of the rank that exports a parameter of `size` bytes."""
        turn = self._dealt.index(min(self._dealt))
        self._dealt[turn] += size
        return turn


class Exporter:
    """Exports this rank's shard of a model.

    quantized_as: the spec of weights that the model stores in FP8. scales: `MegatronWeights` for their scales.
    """

    def __init__(
        self, weights: MegatronWeights, scales: MegatronWeights, quantized_as: TensorSpec, layout: Layout
    ) -> None:
        self._weights, self._scales, self._spec, self._layout = weights, scales, quantized_as, layout

    @torch.no_grad()
    def share(
        self, weights: Iterable[tuple[str, Tensor, Tensor]], base: SharedBase | None = None
    ) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield the (HF name, tensor) pairs of this rank's shard. All ranks must iterate to the end, to gather parts.

        weights: (name in the whole model, this rank's part with Megatron's tags, tensor that engines get in place of
        the part). The order is the same on all ranks of a pipeline stage. base: tensors that are in the base, where
        they are whole, are exported from the base.
        """
        at = self._layout
        dense, experts = Dealer(at.dp_size * at.tp_size), Dealer(at.expert_dp_size)
        for name, local, served in weights:
            row = self._weights.rows(name)[0]
            if name in row.copies:
                continue  # the stage with the original exports it
            if row.expert is not None:
                if experts.next(local.nbytes) == at.expert_dp_rank:
                    if base is not None and row.name in base.tensors:
                        yield from self._of_base(name, base)
                    else:
                        yield from self._tensors(name, local, [self._pieces(local, served)])
                continue
            its_replica, its_rank = divmod(dense.next(local.nbytes), at.tp_size)
            if its_replica != at.dp_rank:
                continue
            if base is not None and row.name in base.tensors:
                if its_rank == at.tp_rank:
                    yield from self._of_base(name, base)
                continue
            if at.tp_size > 1 and self._weights.axis(name, local) is not None:
                parts = _gathered(self._pieces(local, served), its_rank, at.tp_group)
            else:
                parts = [self._pieces(local, served)]
            if its_rank == at.tp_rank:
                yield from self._tensors(name, local, parts)

    def _of_base(self, name: str, base: SharedBase) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        return ((row.name, base.tensor(row.name)) for row in self._weights.rows(name))

    def _pieces(self, held: Tensor, served: Tensor) -> list[Tensor]:
        """Return the weight or, if TransformerEngine stores it in FP8, its codes and scales."""
        if not te_runtime.is_quantized(held):
            return [served]
        weight = te_runtime.quantized(held)
        assert weight.spec == self._spec, f"found a weight quantized as {weight.spec}, expected {self._spec}"
        return [weight.data.view(torch.uint8), weight.scale_inv.contiguous()]

    def _tensors(
        self, name: str, held: Tensor, parts: list[list[Tensor]]
    ) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yield the checkpoint's tensors in a parameter. parts: the `_pieces` of each rank that has a part of it."""
        names, axis = [row.name for row in self._weights.rows(name)], self._weights.axis(name, held)
        cut = [
            side.cut(name, side.merge(name, piece, axis))
            for side, piece in zip((self._weights, self._scales), zip(*parts, strict=True))
        ]
        for tensor_name, (values, *scales) in zip(names, zip(*cut, strict=True), strict=True):
            quantized = QuantizedTensor(values.view(self._spec.dtype), scales[0], self._spec) if scales else values
            yield tensor_name, quantized


def _gathered(pieces: list[Tensor], owner: int, group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Gather the pieces of all ranks of `group` on rank `owner`. Other ranks get nothing. All ranks take part."""
    here = group.rank() == owner
    parts: list[list[Tensor]] = []
    for piece in pieces:
        received = [torch.empty_like(piece) for _ in range(group.size())] if here else []
        dist.gather(piece.contiguous(), received or None, group=group, group_dst=owner)
        parts.append(received)
    return [list(of_rank) for of_rank in zip(*parts, strict=True)]


# A frozen parameter of the trainer, read from a base in the engine's layout.
#
# FP8 products read the base's codes (`weight_cache.Frozen`); each call takes the rank's part of them, in Megatron's
# order of rows. A weight that is not quantized becomes a view of the base if the base has the same numbers in the same
# order. Otherwise it keeps memory of its own: a fused q|k|v in BF16, a part of a row-parallel weight, another dtype.


def adopt(
    parameter: nn.Parameter, names: Sequence[str], base: SharedBase, scales: MegatronWeights, layout: Layout
) -> bool:
    """Let a frozen parameter read its values from a base, which engines read too. Return False if it cannot.

    names: the parameter's name in the whole model or, for stacked experts, each expert's name.
    """
    in_table = all(name in base.model.tensors.in_megatron for name in names)
    rows = [scales.rows(name) for name in names] if in_table else []
    if not rows or rows[0][0].name not in base.tensors:
        return False
    stacked = parameter.dim() == 3
    stored = base.fused(rows[0], len(rows) if stacked else 0)
    axis = scales.axis(names[0], parameter)
    ranks, rank = (1, 0) if axis is None else (layout.tp_size, layout.tp_rank)
    if isinstance(stored, QuantizedTensor):
        freeze(parameter, _frozen(stored, names[0], rows[0], scales, ranks, rank, axis))
        return True
    view = stored if axis is None else stored.chunk(ranks, axis)[rank]
    alike = (view.shape, view.dtype) == (parameter.shape, parameter.dtype) and view.is_contiguous()
    if rows[0][0].megatron.layout == "heads" or len(rows[0]) > 1 < ranks or not alike:
        return False
    parameter.data = view
    return True


def _frozen(
    held: QuantizedTensor,
    name: str,
    rows: Sequence[TensorRow],
    scales: MegatronWeights,
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
    order = scales.share(name, scales.fuse(name, pieces), axis, ranks)[rank]
    return Frozen(held, order.contiguous(), block)


# The checkpoint's tensors in a parameter of Megatron's.


class MegatronWeights:
    """Maps Megatron's parameters, whole or split over tensor-parallel ranks, to checkpoint tensors and back.

    Parameters have their names in the whole model. block: 1 to map weights. To map scales, the size of the weight's
    blocks, each of which has one scale.
    """

    def __init__(self, table: TensorTable, block: int = 1) -> None:
        self._table, self._block = table, block

    def rows(self, parameter: str) -> Sequence[TensorRow]:
        """Return the tensors in a parameter."""
        return self._table.in_megatron[parameter]

    def axis(self, parameter: str, held: Tensor) -> int | None:
        """Return the axis on which ranks split a parameter. None: each rank has the whole parameter.

        Experts are never split. They have Megatron's tag only for the gradient norm.
        """
        split = getattr(held, "tensor_model_parallel", False) and self.rows(parameter)[0].expert is None
        return held.partition_dim if split else None  # type: ignore[attr-defined]

    def cut(self, parameter: str, whole: Tensor) -> list[Tensor]:
        """Cut a parameter into its tensors."""
        return self._table.split(whole, self.rows(parameter), self._block)

    def fuse(self, parameter: str, tensors: Sequence[Tensor]) -> Tensor:
        """Undo `cut`."""
        return self._table.fuse(tensors, self.rows(parameter), self._block)

    def share(self, parameter: str, whole: Tensor, axis: int | None, ranks: int) -> Sequence[Tensor]:
        """Split a whole parameter on `axis` into the part of each of `ranks`."""
        rows = self.rows(parameter)
        if axis is None or ranks == 1:
            return [whole] * ranks
        if axis == 1 or rows[0].megatron.layout == "heads":
            return whole.chunk(ranks, axis)
        shares = zip(*(row.split(tensor, ranks) for row, tensor in zip(rows, self.cut(parameter, whole), strict=True)))
        return [self._table.fuse(share, rows, self._block, ranks) for share in shares]

    def merge(self, parameter: str, parts: Sequence[Tensor], axis: int | None) -> Tensor:
        """Undo `share`. Join the parts of the ranks to the whole parameter."""
        rows, ranks = self.rows(parameter), len(parts)
        if axis is None or ranks == 1:
            return parts[0]
        if axis == 1 or rows[0].megatron.layout == "heads":
            return torch.cat(list(parts), axis)
        cut = [self._table.split(part, rows, self._block, ranks) for part in parts]
        shares = zip(rows, zip(*cut, strict=True), strict=True)
        return self.fuse(parameter, [row.join(share) for row, share in shares])

"""The table of a model's tensors: what each is called, where either side holds it, and what may be done to it.

A row is one tensor of the Hugging Face checkpoint. Sides fuse several of them into one parameter; the table says which,
and the functions below cut such a parameter, or its scales, into its tensors and put them together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PADDED_TO = 64
"""What SGLang makes the rows of a vocabulary a multiple of (`DEFAULT_VOCAB_PADDING_SIZE`)."""
SCALE_SUFFIX = "_scale_inv"
"""What the name of a quantized weight is followed by in the name of its scales, in checkpoints and in the engine."""
FP8_BLOCK = 128
"""Rows and columns of a weight that share a scale, in checkpoints that are published in FP8."""
SERVED_SCALES = torch.float32
"""What an engine holds scales in, which holds every E8M0 scale, too."""


@dataclass(frozen=True)
class Location:
    """The place of a tensor on one side."""

    parameter: str
    """Its name in the side's model."""
    index: int | None = None
    """The place on the first axis of a parameter that stacks several tensors, such as an engine's experts."""
    layout: Literal["rows", "heads"] = "rows"
    """The tensors of one parameter (and index) lie one after the other along the rows in the order of the table, or
    they, and the parts of each, are interleaved by groups of heads."""
    groups: int | None = None
    """By how many; None: by the key-value heads (or `ModelSizes.joined` of them), each with its queries."""
    fused: bool = False
    """A quantization config names the parameter itself, too: the side looks for it by no other name."""
    buffer: bool = False
    """The parameter is a buffer of the side's model."""
    padded: bool = False
    """The parameter may have more rows than the tensor."""
    split: int | None = None
    """Axis on which an engine's tensor-parallel ranks share the tensor; None: each rank has it, or, of experts, one has
    it whole."""


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    op: str
    """The op that it is a weight of."""
    layer: int | None = None
    """From 0; None outside the layers."""
    expert: int | None = None
    kind: str | None = None
    """Module kind (`Architecture.kinds`) by which a quantization spec decides about it; None: no spec quantizes it."""
    product: bool = False
    """It is the weight of a matrix product, quantized or not."""
    small: bool = False
    """Of a product that no spec quantizes: an adapter may stand beside it all the same."""
    engine: Location
    megatron: Location
    copies: tuple[str, ...] = ()
    """Parameters of Megatron's that hold the same, such as the output projection at the last pipeline stage where it is
    tied to the embedding."""
    served: torch.dtype = torch.bfloat16
    """The dtype in which the engine holds it where it is not quantized."""
    trained: torch.dtype = torch.bfloat16
    """The dtype in which the trainer holds it, and a model is written."""
    adapts: str | None = None
    """Of an adapter's tensor: the weight that it stands beside, or the first of those that share it."""
    parts: tuple[int, ...] = ()
    """Rows of the matrices that it has end to end, each of which ranks share by itself; (): it is one matrix."""

    @property
    def adaptable(self) -> bool:
        """Return whether an adapter may stand beside it."""
        return self.product and (self.kind is not None or self.small)

    def split(self, tensor: Tensor, ranks: int) -> Sequence[Tensor]:
        """Cut the tensor, or its scales, into what each of `ranks` holds that share its rows."""
        if not self.parts:
            return tensor.chunk(ranks)
        return [torch.cat(each) for each in zip(*(part.chunk(ranks) for part in self.cut(tensor)), strict=True)]

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """Undo `split`."""
        return torch.cat([part for own in zip(*map(self.cut, shares), strict=True) for part in own])

    def cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut the tensor, or a rank's share of it, or the scales of either, into its parts."""
        if not self.parts:
            return [tensor]
        return tensor.split([part * tensor.shape[0] // self.shape[0] for part in self.parts])


class TensorTable:
    """The rows of a model, found by name and by parameter.

    groups: of heads, by which parameters that interleave them are cut.
    """

    def __init__(self, rows: Iterable[TensorRow], groups: int) -> None:
        self.rows: dict[str, TensorRow] = {row.name: row for row in rows}
        self._groups = groups

    def __getitem__(self, name: str) -> TensorRow:
        """The row of a tensor, or of the weight that `name` is the scales of."""
        return self.rows[name.removesuffix(SCALE_SUFFIX)]

    def get(self, name: str) -> TensorRow | None:
        """Return the row of a tensor, or of the weight of these scales; None for a name that the table has not."""
        return self.rows.get(name.removesuffix(SCALE_SUFFIX))

    @functools.cached_property
    def in_engine(self) -> Mapping[str, Mapping[int | None, Sequence[TensorRow]]]:
        """The tensors in each parameter of the engine, by index on its first axis."""
        found: dict[str, dict[int | None, list[TensorRow]]] = {}
        for row in self.rows.values():
            found.setdefault(row.engine.parameter, {}).setdefault(row.engine.index, []).append(row)
        return found

    @functools.cached_property
    def in_megatron(self) -> Mapping[str, Sequence[TensorRow]]:
        """The tensors in each parameter of the whole Megatron model, layers and experts counted over all ranks."""
        found: dict[str, list[TensorRow]] = {}
        for row in self.rows.values():
            for parameter in (row.megatron.parameter, *row.copies):
                found.setdefault(parameter, []).append(row)
        return found

    def engine_parts(self, fused: Tensor, rows: Sequence[TensorRow], block: int, rank: EngineRank) -> list[Tensor]:
        """A parameter of one rank of an engine, or its scales, cut into what it holds of each tensor: views.

        block: rows of the weight for each row of `fused`, the last of a tensor counting for fewer.
        """
        sizes = [rank.rows(row, block) for row in rows]
        return _cut(fused, rows, sizes, padded=rows[0].engine.padded)

    def split(self, fused: Tensor, rows: Sequence[TensorRow], block: int = 1, ranks: int = 1) -> list[Tensor]:
        """A parameter of Megatron's, or its scales, cut into its tensors: views where the layout allows. Megatron holds
        matrices where the checkpoint has tensors of more axes.

        fused: [N, ...]. block: as above. ranks: that share the rows of each tensor, of which `fused` has one's part.
        """
        if rows[0].megatron.layout == "heads":
            grouped = fused.unflatten(0, (self._count(rows) // ranks, -1))
            of_group = self._rows_of_group(rows, block)
            parts = iter(grouped.split([size for sizes in of_group for size in sizes], 1))
            tensors = [[next(parts).flatten(0, 1) for _ in sizes] for sizes in of_group]
            found = [one[0] if len(one) == 1 else torch.cat(one) for one in tensors]
        else:
            found = _cut(fused, rows, [-(-row.shape[0] // ranks // block) for row in rows])
        return [one.unflatten(1, row.shape[1:]) if len(row.shape) > 2 else one for one, row in zip(found, rows)]

    def fuse(self, tensors: Sequence[Tensor], rows: Sequence[TensorRow], block: int = 1, ranks: int = 1) -> Tensor:
        """The inverse of `split`."""
        matrices = [tensor.flatten(1) if tensor.dim() > 2 else tensor for tensor in tensors]
        if rows[0].megatron.layout == "heads":
            groups, of_group = self._count(rows) // ranks, self._rows_of_group(rows, block)
            pieces = [
                part.unflatten(0, (groups, size))
                for matrix, row, sizes in zip(matrices, rows, of_group, strict=True)
                for part, size in zip(row.cut(matrix), sizes, strict=True)
            ]
            return torch.cat(pieces, 1).flatten(0, 1)
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def _count(self, rows: Sequence[TensorRow]) -> int:
        return rows[0].megatron.groups or self._groups

    def _rows_of_group(self, rows: Sequence[TensorRow], block: int) -> list[list[int]]:
        """Rows of each part of each tensor that belong to one group of heads."""
        parts = (row.parts or (row.shape[0],) for row in rows)
        return [[-(-part // self._count(rows) // block) for part in own] for own in parts]


@dataclass(frozen=True)
class EngineRank:
    """One of the tensor-parallel ranks of an engine: they share tensors by `Location.split`, and experts in order."""

    rank: int = 0
    ranks: int = 1

    def label(self, name: str, row: TensorRow) -> str:
        """The name of what this rank holds of a tensor: that of the tensor, if it is all of it."""
        return name if self.ranks == 1 or row.engine.split is None else f"{name}#{self.rank}/{self.ranks}"

    def part(self, row: TensorRow, tensor: Tensor) -> Tensor:
        """Return what this rank holds of a whole tensor of `row`, or of its scales."""
        if row.engine.split is None:
            return tensor
        if row.parts and row.engine.split == 0 and self.ranks > 1:
            return row.split(tensor, self.ranks)[self.rank]
        return tensor.narrow(row.engine.split, *self._range(row, tensor.shape[row.engine.split]))

    def rows(self, row: TensorRow, block: int = 1) -> int:
        """The rows in this rank's part of a tensor, or of its scales."""
        whole = -(-row.shape[0] // block)
        return self._range(row, whole)[1] if row.engine.split == 0 else whole

    def place(self, index: int | None, count: int) -> int | None:
        """Return the place of the tensor of `index` among the `count` of a stack that this rank holds; None:
        elsewhere."""
        return None if index is None or not 0 <= index - self.rank * count < count else index - self.rank * count

    def _range(self, row: TensorRow, size: int) -> tuple[int, int]:
        """First and length of this rank's part of an axis."""
        each = -(-size // PADDED_TO) * PADDED_TO // self.ranks if row.engine.padded else size // self.ranks
        first = min(self.rank * each, size)
        return first, min(each, size - first)


WHOLE = EngineRank()
"""An engine of one rank."""


def base_name(label: str) -> tuple[str, str]:
    """The tensor's name in a label of `EngineRank.label`, and the rest."""
    name, mark, rest = label.partition("#")
    return name, mark + rest


def _cut(fused: Tensor, rows: Sequence[TensorRow], sizes: list[int], padded: bool = False) -> list[Tensor]:
    total = sum(sizes)
    if fused.shape[0] != total and not (padded and fused.shape[0] > total):
        names = ", ".join(row.name for row in rows)
        raise ValueError(f"{names}: found a parameter of {fused.shape[0]} rows, expected {total}")
    return list(fused[:total].split(sizes))

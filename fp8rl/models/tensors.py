"""The table of a model's tensors: each tensor's name, its place on either side, and whether it may be quantized.

A row is one tensor of the Hugging Face checkpoint. Each side fuses some tensors into one parameter; the table says
which. The functions below cut such a parameter, or its scales, into its tensors, and put them together.

A stack [n, ...] has the same tensor of n experts, in their order, and the name of the first. A sync handles stacks,
because experts are many and small, and each call of torch or of a kernel has its price.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

PADDED_TO = 64
"""SGLang pads the rows of a vocabulary to a multiple of this number (`DEFAULT_VOCAB_PADDING_SIZE`)."""
SCALE_SUFFIX = "_scale_inv"
"""The suffix that turns a quantized weight's name into its scales' name, in checkpoints and in the engine."""
FP8_BLOCK = 128
"""Number of rows, and of columns, of a weight that share a scale in checkpoints that are published in FP8."""
SERVED_SCALES = torch.float32
"""The dtype of scales in an engine. It holds every E8M0 scale, too."""


@dataclass(frozen=True)
class Location:
    """The place of a tensor in the engine, or in Megatron."""

    parameter: str
    """The name of the parameter in the side's model."""
    index: int | None = None
    """The place on the first axis of a parameter that stacks several tensors, such as an engine's experts."""
    layout: Literal["rows", "heads"] = "rows"
    """`rows`: the tensors of one parameter (and index) follow each other along the rows, in the order of the table.
    `heads`: the tensors, and the parts of each, are interleaved by groups of heads."""
    groups: int | None = None
    """The number of groups; None: a group is a key-value head (or `ModelSizes.joined` of them) with its queries."""
    fused: bool = False
    """True if a quantization config must also name the parameter itself, since the engine looks only for this name."""
    buffer: bool = False
    """True if the parameter is a buffer of the side's model."""
    padded: bool = False
    """True if the parameter may have more rows than the tensor."""
    split: int | None = None
    """The axis on which an engine's tensor-parallel ranks split the tensor. None: each rank has the whole tensor; an
    expert's tensor is on one rank."""
    kv_heads: int | None = None
    """The number of key-value heads whose rows the tensor has. If an engine has more ranks, each rank has one head, and
    neighbours have the same head. None: the rows are of no key-value heads."""


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    op: str
    """The op that it is a weight of."""
    layer: int | None = None
    """The layer, from 0; None outside the layers."""
    expert: int | None = None
    kind: str | None = None
    """The module kind that a spec names to quantize the tensor (`Architecture.kinds`); None: it is never quantized."""
    product: bool = False
    """True for the weight of a matrix product, quantized or not."""
    small: bool = False
    """True if an adapter is allowed although the tensor is the weight of a product that no spec quantizes."""
    engine: Location
    megatron: Location
    copies: tuple[str, ...] = ()
    """Other parameters of Megatron's with the same tensor, such as the output projection at the last pipeline stage if
    it is tied to the embedding."""
    served: torch.dtype = torch.bfloat16
    """The dtype in which the engine holds the tensor if it is not quantized."""
    trained: torch.dtype = torch.bfloat16
    """The dtype in which the trainer holds the tensor, and in which it is written."""
    adapts: str | None = None
    """For an adapter's tensor: the weight that it adapts, or the first of the weights that share the adapter."""
    parts: tuple[int, ...] = ()
    """The number of rows of each matrix, if the tensor consists of matrices that ranks split one by one; else ()."""

    @property
    def adaptable(self) -> bool:
        """Return whether the tensor may have an adapter."""
        return self.product and (self.kind is not None or self.small)

    def split(self, tensor: Tensor, ranks: int) -> Sequence[Tensor]:
        """Split the rows of the tensor, or of its scales, over `ranks` ranks."""
        if not self.parts:
            return tensor.chunk(ranks)
        return [torch.cat(share) for share in zip(*(part.chunk(ranks) for part in self.cut(tensor)), strict=True)]

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """Undo `split`."""
        return torch.cat([piece for pieces in zip(*map(self.cut, shares), strict=True) for piece in pieces])

    def cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut the tensor, or a rank's share of it, or the scales of either, into its parts."""
        if not self.parts:
            return [tensor]
        return tensor.split([part * tensor.shape[0] // self.shape[0] for part in self.parts])


class TensorTable:
    """The rows of a model, found by name and by parameter.

    groups: the number of groups of heads by which parameters with interleaved heads are cut.
    """

    def __init__(self, rows: Iterable[TensorRow], groups: int) -> None:
        self.rows: dict[str, TensorRow] = {row.name: row for row in rows}
        self._groups = groups

    def __getitem__(self, name: str) -> TensorRow:
        """Return the row of a tensor. A name of scales gives the row of their weight."""
        return self.rows[name.removesuffix(SCALE_SUFFIX)]

    def get(self, name: str) -> TensorRow | None:
        """Return the same row as `[name]`; None for an unknown name."""
        return self.rows.get(name.removesuffix(SCALE_SUFFIX))

    @functools.cached_property
    def in_engine(self) -> Mapping[str, Mapping[int | None, Sequence[TensorRow]]]:
        """The tensors in each parameter of the engine, by index on its first axis."""
        found: dict[str, dict[int | None, list[TensorRow]]] = {}
        for row in self.rows.values():
            found.setdefault(row.engine.parameter, {}).setdefault(row.engine.index, []).append(row)
        return found

    @functools.cached_property
    def in_layer(self) -> Mapping[int | None, Sequence[TensorRow]]:
        """The tensors of each layer, without adapters."""
        found: dict[int | None, list[TensorRow]] = {}
        for row in self.rows.values():
            if row.adapts is None:
                found.setdefault(row.layer, []).append(row)
        return found

    @functools.cached_property
    def in_megatron(self) -> Mapping[str, Sequence[TensorRow]]:
        """The tensors in each parameter of the whole Megatron model, layers and experts counted over all ranks."""
        found: dict[str, list[TensorRow]] = {}
        for row in self.rows.values():
            for parameter in (row.megatron.parameter, *row.copies):
                found.setdefault(parameter, []).append(row)
        return found

    def stack(self, name: str, tensor: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """Return the names of the tensors in a stack, and the stack. A single tensor becomes a stack of one."""
        row = self.get(name)
        if row is None or row.engine.index is None or tensor.dim() == len(row.shape):
            return (name,), tensor[None]
        by_index, first = self.in_engine[row.engine.parameter], row.engine.index
        place, suffix = by_index[first].index(row), name.removeprefix(row.name)
        return tuple(by_index[i][place].name + suffix for i in range(first, first + len(tensor))), tensor

    def stacks(
        self, held: Mapping[str, Tensor], block: int, rank: EngineRank
    ) -> Iterator[tuple[tuple[str, ...], Tensor, Tensor]]:
        """Yield the tensors and scales of the checkpoint that a rank of an engine holds, in stacks of equal tensors.

        Each is (`EngineRank.label` of each tensor, the parameter that holds them, the stack [labels, ...] as a view of
        the parameter). held: all or some parameters, by name. block: number of rows of a tensor that share a row of
        scales; the last row of scales may serve fewer.
        """
        for name, by_index in self.in_engine.items():
            for suffix, of_row in (("", 1), (SCALE_SUFFIX, block)):
                if (parameter := held.get(name + suffix)) is None:  # such as adapters before they are attached
                    continue
                fused, every = parameter.detach()[None], list(by_index.values())
                if None not in by_index:  # other ranks have the other experts
                    first, count = rank.rank * len(parameter), len(parameter)
                    fused, every = fused[0], every[first : first + count]
                rows = every[0]
                parts = _cut(fused, rows, [rank.rows(row, of_row) for row in rows], rows[0].engine.padded, axis=1)
                for of_part, part in zip(zip(*every, strict=True), parts, strict=True):
                    yield tuple(rank.label(row.name + suffix, row) for row in of_part), parameter, part

    def views(self, held: Mapping[str, Tensor], block: int, rank: EngineRank) -> dict[str, Tensor]:
        """Return the single tensors in `stacks`, by label."""
        stacks = self.stacks(held, block, rank)
        return {label: view for labels, _, stack in stacks for label, view in zip(labels, stack, strict=True)}

    def split(self, fused: Tensor, rows: Sequence[TensorRow], block: int = 1, ranks: int = 1) -> list[Tensor]:
        """Cut a parameter of Megatron's, or its scales, into its tensors, as views if the layout allows. If a tensor
        has more than two axes, Megatron holds it as a matrix.

        fused: [N, ...], or experts [n, N, K], which give a stack of each tensor. block: as in `stacks`. ranks: the
        number of ranks that share the rows of each tensor; `fused` is the part of one rank.
        """
        if rows[0].megatron.layout == "heads":
            grouped = fused.unflatten(0, (self.groups_of(rows) // ranks, -1))
            of_group = self._rows_of_group(rows, block)
            parts = iter(grouped.split([size for sizes in of_group for size in sizes], 1))
            tensors = [[next(parts).flatten(0, 1) for _ in sizes] for sizes in of_group]
            found = [one[0] if len(one) == 1 else torch.cat(one) for one in tensors]
        else:
            found = _cut(fused, rows, [-(-row.shape[0] // ranks // block) for row in rows], axis=int(fused.dim() > 2))
        return [one.unflatten(1, row.shape[1:]) if len(row.shape) > 2 else one for one, row in zip(found, rows)]

    def fuse(self, tensors: Sequence[Tensor], rows: Sequence[TensorRow], block: int = 1, ranks: int = 1) -> Tensor:
        """Undo `split`."""
        matrices = [tensor.flatten(1) if tensor.dim() > 2 else tensor for tensor in tensors]
        if rows[0].megatron.layout == "heads":
            groups, of_group = self.groups_of(rows) // ranks, self._rows_of_group(rows, block)
            pieces = [
                part.unflatten(0, (groups, size))
                for matrix, row, sizes in zip(matrices, rows, of_group, strict=True)
                for part, size in zip(row.cut(matrix), sizes, strict=True)
            ]
            return torch.cat(pieces, 1).flatten(0, 1)
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def groups_of(self, rows: Sequence[TensorRow]) -> int:
        return rows[0].megatron.groups or self._groups

    def _rows_of_group(self, rows: Sequence[TensorRow], block: int) -> list[list[int]]:
        """Return how many rows of each part of each tensor belong to one group of heads."""
        tensors = (row.parts or (row.shape[0],) for row in rows)
        return [[-(-part // self.groups_of(rows) // block) for part in parts] for parts in tensors]


@dataclass(frozen=True)
class EngineRank:
    """One tensor-parallel rank of an engine. Ranks split tensors by `Location.split`, and divide experts in order."""

    rank: int = 0
    ranks: int = 1

    def label(self, name: str, row: TensorRow) -> str:
        """Return a name for this rank's part of a tensor: the tensor's name if the rank holds all of it."""
        return name if self.ranks == 1 or row.engine.split is None else f"{name}#{self.rank}/{self.ranks}"

    def part(self, row: TensorRow, tensor: Tensor) -> Tensor:
        """Return this rank's part of the whole tensor of `row`, or of its scales."""
        if row.engine.split is None:
            return tensor
        if row.parts and row.engine.split == 0 and self.ranks > 1:
            return row.split(tensor, self.ranks)[self.rank]
        return tensor.narrow(row.engine.split, *self._range(row, tensor.shape[row.engine.split]))

    def rows(self, row: TensorRow, block: int = 1) -> int:
        """Return the number of rows of this rank's part of a tensor, or of its scales."""
        whole = -(-row.shape[0] // block)
        return self._range(row, whole)[1] if row.engine.split == 0 else whole

    def _range(self, row: TensorRow, size: int) -> tuple[int, int]:
        """Return the first index and the length of this rank's part of an axis."""
        parts = min(self.ranks, row.engine.kv_heads or self.ranks)
        share = -(-size // PADDED_TO) * PADDED_TO // parts if row.engine.padded else size // parts
        first = min(self.rank * parts // self.ranks * share, size)
        return first, min(share, size - first)


WHOLE = EngineRank()
"""An engine of one rank."""


def base_name(label: str) -> tuple[str, str]:
    """Return the tensor's name in a label of `EngineRank.label`, and the rest of the label."""
    name, mark, rest = label.partition("#")
    return name, mark + rest


def _cut(
    fused: Tensor, rows: Sequence[TensorRow], sizes: list[int], padded: bool = False, axis: int = 0
) -> list[Tensor]:
    total, found = sum(sizes), fused.shape[axis]
    if found != total and not (padded and found > total):
        names = ", ".join(row.name for row in rows)
        raise ValueError(f"{names}: found a parameter of {found} rows, expected {total}")
    return list(fused.narrow(axis, 0, total).split(sizes, axis))

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

SCALE_SUFFIX = "_scale_inv"
"""What the name of a quantized weight is followed by in the name of its scales, in checkpoints and in the engine."""


@dataclass(frozen=True)
class Place:
    """Where a side holds a tensor.

    Attributes:
        parameter: its name in the side's model.
        index: on the first axis of a parameter that stacks several, such as an engine's experts; None otherwise.
        layout: how the tensors of one parameter (and index) lie in it: one after the other along the rows in the order
            of the table, or q, k and v interleaved by key-value head.
        together: the side takes the tensors of the parameter, and their scales, only if they come in one message.
        buffer: the parameter is a buffer of the side's model.
        padded: the parameter may have more rows than the tensor.
    """

    parameter: str
    index: int | None = None
    layout: Literal["rows", "heads"] = "rows"
    together: bool = False
    buffer: bool = False
    padded: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor of the checkpoint.

    Attributes:
        name, shape: in the checkpoint.
        op: name of the op that it is a weight of. layer: from 0, None outside the layers. expert: None if of none.
        kind: module kind (`numerics.spec.MODULE_KINDS`) by which a quantization spec decides about it; None: no spec
            quantizes it.
        product: whether it is the weight of a matrix product, quantized or not.
        engine: where the engine holds it.
        megatron: where the trainer holds it. copies: parameters of Megatron's that hold the same, such as the output
            projection at the last pipeline stage where it is tied to the embedding.
        served: dtype in which the engine holds it where it is not quantized.
    """

    name: str
    shape: tuple[int, ...]
    op: str
    layer: int | None = None
    expert: int | None = None
    kind: str | None = None
    product: bool = False
    engine: Place
    megatron: Place
    copies: tuple[str, ...] = ()
    served: torch.dtype = torch.bfloat16


Side = Literal["engine", "megatron"]


class TensorTable:
    """The rows of a model, found by name and by parameter.

    kv_heads: by which parameters that interleave heads are cut.
    """

    def __init__(self, rows: Iterable[TensorRow], kv_heads: int) -> None:
        self.rows: dict[str, TensorRow] = {row.name: row for row in rows}
        self._kv_heads = kv_heads

    def __getitem__(self, name: str) -> TensorRow:
        """The row of a tensor, or of the weight that `name` is the scales of."""
        return self.rows[name.removesuffix(SCALE_SUFFIX)]

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

    def split(
        self, side: Side, fused: Tensor, rows: Sequence[TensorRow], block: int = 1, ranks: int = 1
    ) -> list[Tensor]:
        """A parameter of one side, or its scales, cut into the tensors of `rows`: views where the layout allows.

        fused: [N, ...]. block: rows of the weight for each row of `fused`, the last of a tensor counting for fewer.
        ranks: that share the rows of each tensor, of which `fused` has one's part.
        """
        if _place(side, rows).layout == "heads":
            grouped = fused.unflatten(0, (self._kv_heads // ranks, -1))
            return [part.flatten(0, 1) for part in grouped.split(self._rows_in_group(rows, block), 1)]
        sizes = [-(-row.shape[0] // ranks // block) for row in rows]
        total = sum(sizes)
        if fused.shape[0] != total and not (_place(side, rows).padded and fused.shape[0] > total):
            names = ", ".join(row.name for row in rows)
            raise ValueError(f"{names}: found a parameter of {fused.shape[0]} rows, expected {total}")
        return list(fused[:total].split(sizes))

    def fuse(
        self, side: Side, tensors: Sequence[Tensor], rows: Sequence[TensorRow], block: int = 1, ranks: int = 1
    ) -> Tensor:
        """The inverse of `split`."""
        if _place(side, rows).layout == "heads":
            pieces = [
                tensor.unflatten(0, (self._kv_heads // ranks, size))
                for tensor, size in zip(tensors, self._rows_in_group(rows, block), strict=True)
            ]
            return torch.cat(pieces, 1).flatten(0, 1)
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

    def _rows_in_group(self, rows: Sequence[TensorRow], block: int) -> list[int]:
        """Rows that q, k and v have in the group of one key-value head."""
        return [-(-row.shape[0] // self._kv_heads // block) for row in rows]


def _place(side: Side, rows: Sequence[TensorRow]) -> Place:
    """All rows of a parameter lie in it in one way."""
    return rows[0].engine if side == "engine" else rows[0].megatron

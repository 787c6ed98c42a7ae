"""Describes LoRA adapters (arXiv 2106.09685): their section of a spec, and their rows in a model's table of tensors.

The adapter of a matrix X.weight [N, K] is a pair A [rank, K] and B [N, rank], which adds (alpha / rank) · B A to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from fp8rl.models.tensors import Location, TensorRow
from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.section import Section, SpecPath

WEIGHT = "weight"


class AdapterSection(Section):
    """Train low-rank adapters. The weights stay as they are. Null: all weights are trained."""

    rank: int = Field(default=16, ge=1)
    """Rows of each A, and columns of each B."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The scale of an adapter: B A is multiplied by `alpha` / `rank`."""
    # Strictness would refuse the list that YAML gives.
    targets: Literal["all"] | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = "all"
    """Matrices that get an adapter, by the last part of their names in the checkpoint (`q_proj`, ...); `all`: every
    product of attention (also the gates of linear attention), MLPs and experts. Routers, embedding and output
    projection get none."""
    experts: Literal["per_expert", "shared", "none"] = "per_expert"
    """Adapters of the experts' matrices: one for each expert, one for all experts of a layer, or none."""
    mode: Literal["separate", "merged"] = "separate"
    """`separate`: both sides add the adapter's product to the quantized weight's product, and a sync sends adapters
    alone. `merged`: the adapter is added to the weight before the weight is quantized, and a sync sends weights."""

    start: SpecPath | None = None
    """Training begins with the adapter in this directory, in PEFT's format. Its model, rank, alpha and matrices must be
    the same. Null: A is random and B zero."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    def adapts(self, row: TensorRow) -> bool:
        """Return whether the matrix of a row gets an adapter of its own, or shares an adapter."""
        if not row.adaptable or (row.expert is not None and self.experts == "none"):
            return False
        return self.targets == "all" or matrix(row) in self.targets

    def pair_of(self, row: TensorRow) -> tuple[str, str]:
        """Return the names of a weight's A and B. If a layer's experts share them, they have no expert's number."""
        name = row.name.removesuffix(f".{WEIGHT}")
        if row.expert is not None and self.experts == "shared":
            before, _, after = name.rpartition(f".{row.expert}.")
            name = f"{before}.{after}"
        return f"{name}.lora_A.{WEIGHT}", f"{name}.lora_B.{WEIGHT}"


def matrix(row: TensorRow) -> str:
    """Return the name by which `targets` selects the matrix of a row."""
    return row.name.split(".")[-2]


def adapter_rows(rows: Iterable[TensorRow], config: AdapterSection) -> Iterator[TensorRow]:
    """Yield the rows of adapters for the rows of weights: `X.lora_A.weight` and `X.lora_B.weight` for `X.weight`.

    For a parameter that fuses several matrices, `lora_a` has the A of each matrix, one after the other, and `lora_b`
    has the rows of each B in the parameter's layout. If ranks split the rows of a weight, they split the rows of B, and
    each rank has all of A. If they split the weight's columns, they split the columns of A, and each rank has all of B.
    """
    for row in filter(config.adapts, rows):
        expert, megatron, engine = row.expert, row.megatron, row.engine
        if expert is not None and config.experts == "shared":
            if expert:
                continue
            expert = None
            megatron = replace(megatron, parameter=megatron.parameter.removesuffix("0"))
            engine = replace(engine, index=None)
        rank, (n, k) = config.rank, row.shape
        for letter, name, shape in zip("AB", config.pair_of(row), ((rank, k), (n, rank)), strict=True):
            yield TensorRow(
                name=name,
                shape=shape,
                op=row.op,
                layer=row.layer,
                expert=expert,
                engine=_beside(engine, letter),
                megatron=_beside(megatron, letter),
                adapts=row.name,
                parts=row.parts if letter == "B" else (),
            )


def _beside(weight: Location, letter: str) -> Location:
    """Return the location of the A or B (`letter`) of a weight's adapter."""
    before, _, after = weight.parameter.rpartition(WEIGHT)
    axis = 1 if letter == "A" else 0
    return replace(
        weight,
        parameter=f"{before}lora_{letter.lower()}{after}",
        layout="rows" if letter == "A" else weight.layout,
        fused=False,
        split=axis if weight.split == axis else None,
    )


def check_adapter(rows: Iterable[TensorRow], config: AdapterSection) -> None:
    """Check an adapter against the rows of the model's weights. Raises UserError if the model lacks a target, if no
    matrix gets an adapter, or if the rank is above the smaller side of a matrix."""
    adaptable = [row for row in rows if row.adaptable]
    names = list(dict.fromkeys(matrix(row) for row in adaptable))
    adapted = [row for row in adaptable if config.adapts(row)]
    if config.targets != "all" and (unknown := [name for name in config.targets if name not in names]):
        expected = f"names of the model's matrices: {', '.join(names)}"
        raise user_error("adapter.targets", ", ".join(unknown), expected, "Correct adapter.targets, or set it to all.")
    if not adapted:
        found = f"{config.targets} with adapter.experts={config.experts}, by which no matrix has an adapter"
        remedy = "Set adapter.experts=per_expert, or name other targets."
        raise user_error("adapter.targets", found, "at least one matrix with an adapter", remedy)
    # A small product has a row for each head, which may be fewer rows than the rank.
    narrowest = min((row for row in adapted if not row.small), key=lambda row: min(row.shape), default=None)
    if narrowest is not None and config.rank > min(narrowest.shape):
        expected = f"at most {min(narrowest.shape)}, the smaller side of {narrowest.name} {list(narrowest.shape)}"
        remedy = "Lower adapter.rank, or leave that matrix out of adapter.targets."
        raise user_error("adapter.rank", config.rank, expected, remedy)

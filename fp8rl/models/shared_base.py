"""The shared base: a quantized model's tensors in one piece of memory, in the layout of the engine's parameters.

A trainer that does not change these tensors and the engines of the same machine read the same bytes. Each side's
parameters are views of the base. If the trainer needs rows in another order, it gets the order too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.models.architecture import Model
from fp8rl.models.tensors import PADDED_TO, SCALE_SUFFIX, SERVED_SCALES, WHOLE, EngineRank, TensorRow
from fp8rl.numerics.quantize import QuantizedTensor, scale_shape
from fp8rl.numerics.spec import QuantSpec

ALIGNMENT = 256
"""Parameters begin at a multiple of this many bytes, as kernels that load whole tiles need."""


@dataclass(frozen=True)
class ParameterSpan:
    """The bytes of one parameter of the engine within the memory of a base."""

    start: int
    """The first byte."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def parameter_spans(model: Model, spec: QuantSpec) -> dict[str, ParameterSpan]:
    """Return the span of each parameter of the engine, by its name in the engine. Scales follow their weight. Adapters
    are left out."""
    found: dict[str, ParameterSpan] = {}
    end = 0
    for name, (shape, dtype) in engine_parameters(model, spec, scales=spec.weight.scale_dtype).items():
        found[name] = ParameterSpan(-(-end // ALIGNMENT) * ALIGNMENT, shape, dtype)
        end = found[name].stop
    return found


def engine_parameters(
    model: Model, spec: QuantSpec, rank: EngineRank = WHOLE, scales: torch.dtype = SERVED_SCALES
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each parameter of a rank of the engine, by name, without adapters. Scales follow their
    weight. scales: the dtype of scales."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, by_index in model.tensors.in_engine.items():
        rows = next(iter(by_index.values()))
        first, count, rest = rows[0], sum(map(rank.rows, rows)), list(rows[0].shape[1:])
        if first.adapts is not None:
            continue
        if first.engine.padded:
            count = -(-first.shape[0] // PADDED_TO) * PADDED_TO // rank.ranks
        if first.engine.split == 1:
            rest[0] //= rank.ranks
        stacked = () if None in by_index else (len(by_index) // rank.ranks,)
        shape, quantized = (*stacked, count, *rest), model.quantizes(first, spec)
        found[name] = shape, spec.weight.dtype if quantized else first.served
        if quantized:
            found[name + SCALE_SUFFIX] = scale_shape(shape, spec.weight), scales
    return found


def base_bytes(model: Model, spec: QuantSpec) -> int:
    """Return the size of a base in bytes."""
    return max(span.stop for span in parameter_spans(model, spec).values())


class SharedBase:
    """The tensors of a model, quantized by a spec, as views of one piece of memory: uint8 [base_bytes]."""

    def __init__(self, flat: Tensor, model: Model, spec: QuantSpec) -> None:
        """Cut `flat` into parameters. Raises ValueError if a base of this model and spec has another size."""
        found = parameter_spans(model, spec)
        if flat.numel() != (size := max(span.stop for span in found.values())):
            raise ValueError(f"found a base of {flat.numel()} bytes, expected {size} for this model and spec")
        self.flat, self.model, self.spec = flat, model, spec
        self.parameters: Mapping[str, Tensor] = {
            name: flat[span.start : span.stop].view(span.dtype).view(span.shape) for name, span in found.items()
        }
        """The parameters by their names in the engine."""

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by their names in the checkpoint, and the scales of quantized tensors."""
        return self.model.tensors.views(self.parameters, self.spec.weight.group, WHOLE)

    def fused(self, rows: Sequence[TensorRow], stacked: int = 0) -> Tensor | QuantizedTensor:
        """Return consecutive tensors of one parameter of the engine as one tensor [N, ...], which is a view.

        stacked: return [stacked, N, K], the tensors of this many experts; `rows` are the first expert's. 0: no experts.

        Raises ValueError if the tensors are not consecutive.
        """
        location, table = rows[0].engine, self.model.tensors.in_engine
        together = list(table[location.parameter][location.index])
        first = together.index(rows[0])
        if together[first : first + len(rows)] != list(rows):
            names = ", ".join(row.name for row in rows)
            raise ValueError(f"{names}: found them apart in the engine's parameters, expected one after the other")
        before, count = (sum(row.shape[0] for row in part) for part in (together[:first], rows))

        def cut(suffix: str, block: int) -> Tensor:
            fused = self.parameters[location.parameter + suffix]
            if location.index is not None:
                fused = fused[location.index : location.index + stacked] if stacked else fused[location.index]
            return fused.narrow(1 if stacked else 0, before // block, -(-count // block))

        if location.parameter + SCALE_SUFFIX not in self.parameters:
            return cut("", 1)
        return QuantizedTensor(cut("", 1), cut(SCALE_SUFFIX, self.spec.weight.group), self.spec.weight)

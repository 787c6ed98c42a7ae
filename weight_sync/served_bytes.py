"""How many bytes a sync sends, and an engine holds of weights: calculated, before there is a trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from models.shape import BF16_BYTES, Shape, Weight
from numerics.quantize import scale_shape
from numerics.spec import QuantSpec

_SCALE_BYTES = 4


def served_bytes(shape: Shape, spec: QuantSpec, engine_ranks: int = 1) -> int:
    """Bytes of what one rank of an engine holds of the weights under `spec`; with one rank, what a sync sends.

    A quantized weight has one byte an element and an FP32 scale per block, any other two bytes. Ranks share dense
    products and experts; the rest each of them has.
    """
    return sum(
        _bytes_of(shape, weight, spec) // (1 if weight.share == "replicated" else engine_ranks)
        for weight in shape.weights
        if not weight.tied
    )


def _bytes_of(shape: Shape, weight: Weight, spec: QuantSpec) -> int:
    """Of all weights that are alike."""
    if weight.place != "layers":
        return weight.size * BF16_BYTES
    return sum(
        weight.copies * _bytes_of_one(weight, spec.of_layer(layer, shape.sizes.layers)) for layer in weight.layers
    )


def _bytes_of_one(weight: Weight, spec: QuantSpec) -> int:
    if weight.kind is None or not spec.quantizes(weight.kind):
        return weight.size * BF16_BYTES
    scales = sum(math.prod(shape) for shape in _scale_shapes(weight, spec))
    return weight.size * spec.weight.dtype.itemsize + scales * _SCALE_BYTES


def _scale_shapes(weight: Weight, spec: QuantSpec) -> Iterator[tuple[int, ...]]:
    """Of each tensor that the checkpoint has of it."""
    for rows in weight.pieces or (weight.rows,):
        yield scale_shape((rows, weight.columns), spec.weight)

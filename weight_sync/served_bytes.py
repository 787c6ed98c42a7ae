"""How many bytes a sync sends, and an engine holds of weights: calculated, before there is a trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fp8rl.models.shape import BF16_BYTES, Shape, WeightGroup
from fp8rl.models.tensors import SERVED_SCALES
from fp8rl.numerics.quantize import scale_shape
from fp8rl.numerics.spec import QuantSpec


def served_bytes(shape: Shape, spec: QuantSpec, engine_ranks: int = 1) -> int:
    """Bytes of what one rank of an engine holds of the weights under `spec`; with one rank, what a sync sends.

    A quantized weight has one byte an element and a scale per block, any other two bytes. Ranks share dense
    products and experts; the rest each of them has.
    """
    return sum(
        weight_bytes(shape, weight, spec) // (1 if weight.share == "replicated" else engine_ranks)
        for weight in shape.weights
        if not weight.tied
    )


def weight_bytes(shape: Shape, weight: WeightGroup, spec: QuantSpec) -> int:
    """Bytes of all weights of the model that are alike, as an engine holds them under `spec`."""
    quantized = weight.copies * len(shape.quantized_layers(weight, spec))
    plain = (weight.count - quantized) * weight.size * BF16_BYTES
    if not quantized:
        return plain
    scales = sum(math.prod(scales) for scales in _scale_shapes(weight, spec))
    return plain + quantized * (weight.size * spec.weight.dtype.itemsize + scales * SERVED_SCALES.itemsize)


def _scale_shapes(weight: WeightGroup, spec: QuantSpec) -> Iterator[tuple[int, ...]]:
    """Shapes of the scales of each tensor that the checkpoint has of it."""
    for rows in weight.pieces or (weight.rows,):
        yield scale_shape((rows, weight.columns), spec.weight)

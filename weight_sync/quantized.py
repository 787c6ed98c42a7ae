"""Makes the tensors that an engine serves from the trainer's weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.shape import BF16_BYTES, Shape, WeightGroup
from fp8rl.models.tensors import SCALE_SUFFIX, SERVED_SCALES
from fp8rl.numerics.errors import UserError
from fp8rl.numerics.holdings import shards
from fp8rl.numerics.quantize import QuantizedTensor, check_quantizable, quantize_many, scale_shape
from fp8rl.numerics.ranks import exhaust
from fp8rl.numerics.spec import QuantSpec, TensorSpec
from fp8rl.weight_sync.buckets import Allocate
from fp8rl.weight_sync.manifest import Recorder, Sent

_BATCH_BYTES = 32 << 20  # quantized at a time: experts are many and small, and each launch has its price


def served_tensors(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]],
    spec: QuantSpec,
    model: Model,
    allocate: Allocate | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of what is served under `spec`: FP8 codes and their scales, or the tensor as it is.

    weights: (HF name, tensor), or what the trainer quantized itself, whose codes and scales are served as they are
    (dequantized, where the engine runs them unquantized). model: whose tensors they are. A quantized `x.weight` [N, K]
    becomes `x.weight` (FP8) and `x.weight_scale_inv` (FP32, one per block).
    The tensors may share memory with the parameters. allocate: where to quantize to. A weight that cannot be quantized
    does not keep other ranks waiting: the rest of `weights` is taken.
    """
    try:
        for batch in shards(weights, _BATCH_BYTES):
            rows = {name: model.tensors[name] for name, _ in batch}
            to_quantize = {name: weight for name, weight in batch if model.quantizes(rows[name], spec)}
            quantized = _quantized(to_quantize, spec, allocate)
            for name, weight in batch:
                if name in quantized:
                    yield name, quantized[name].data
                    yield name + SCALE_SUFFIX, quantized[name].scale_inv.to(SERVED_SCALES)
                elif isinstance(weight, QuantizedTensor):
                    yield name, weight.dequantize(rows[name].served)
                else:
                    yield name, weight.to(rows[name].served)
    finally:
        exhaust(weights)


def would_send(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]], spec: QuantSpec, model: Model, engine_ranks: int = 1
) -> Sent:
    """What one rank would send of these weights (as in `served_tensors`) to an engine that serves `spec`."""
    recorder = Recorder(model.tensors, engine_ranks)
    exhaust(recorder.watch(served_tensors(weights, spec, model)))
    return recorder.sent()


def _quantized(
    weights: dict[str, Tensor | QuantizedTensor], spec: QuantSpec, allocate: Allocate | None
) -> dict[str, QuantizedTensor]:
    """Those that are not quantized yet in one go, in their order."""
    done = {name: weight for name, weight in weights.items() if isinstance(weight, QuantizedTensor)}
    for name, weight in done.items():
        if weight.spec != spec.weight:
            raise UserError(f"{name}: found it quantized as {weight.spec}, expected {spec.weight}; one spec for both")
    plain = {name: weight for name, weight in weights.items() if not isinstance(weight, QuantizedTensor)}
    for name, tensor in plain.items():
        try:
            check_quantizable(tensor, spec.weight)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    outs = [_destination(tensor, spec.weight, allocate) for tensor in plain.values()] if allocate else None
    return done | dict(zip(plain, quantize_many(list(plain.values()), spec.weight, outs), strict=True))


def _destination(weight: Tensor, spec: TensorSpec, allocate: Allocate) -> QuantizedTensor:
    data = allocate(weight.shape, spec.dtype, weight.device)
    return QuantizedTensor(data, allocate(scale_shape(weight.shape, spec), SERVED_SCALES, weight.device), spec)


# How many bytes a sync sends, and an engine holds of weights: calculated, before there is a trainer.


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

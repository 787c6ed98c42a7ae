"""The tensors that an engine serves, made from the trainer's weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor

from fp8rl.models import Model
from fp8rl.models.shape import BF16_BYTES, Shape, WeightGroup
from fp8rl.models.tensors import SCALE_SUFFIX, SERVED_SCALES
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.memory import shards
from fp8rl.numerics.core.process import exhaust
from fp8rl.numerics.quantize import QuantizedTensor, check_quantizable, quantize_many, scale_shape
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.buckets import Allocate
from fp8rl.weight_sync.manifest import Recorder, Sent

_BATCH_BYTES = 32 << 20  # quantized at a time: experts are many and small, and each launch has its price


def served_tensors(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]],
    spec: QuantSpec,
    model: Model,
    allocate: Allocate | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the (HF name, tensor) pairs that are served under `spec`: FP8 codes and their scales, or the tensor as it
    is.

    weights: (HF name, tensor), or tensors that the trainer quantized itself, whose codes and scales are served as they
    are (dequantized, if the engine runs them unquantized). model: whose tensors they are. A quantized `x.weight` [N, K]
    becomes `x.weight` (FP8) and `x.weight_scale_inv` (FP32, one per block). The tensors may share memory with the
    parameters. allocate: gives the memory to quantize to. A weight that cannot be quantized does not keep other ranks
    waiting: the rest of `weights` is taken.
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
    """Return what one rank would send of these weights (as in `served_tensors`) to an engine that serves `spec`."""
    recorder = Recorder(model.tensors, engine_ranks)
    exhaust(recorder.watch(served_tensors(weights, spec, model)))
    return recorder.sent()


def _quantized(
    weights: dict[str, Tensor | QuantizedTensor], spec: QuantSpec, allocate: Allocate | None
) -> dict[str, QuantizedTensor]:
    """Quantize the weights that are not quantized yet, in one call and in their order."""
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
    outs: list[QuantizedTensor] | None = None
    if allocate is not None:
        outs = []
        for tensor in plain.values():
            data = allocate(tensor.shape, spec.weight.dtype, tensor.device)
            scales = allocate(scale_shape(tensor.shape, spec.weight), SERVED_SCALES, tensor.device)
            outs.append(QuantizedTensor(data, scales, spec.weight))
    return done | dict(zip(plain, quantize_many(list(plain.values()), spec.weight, outs), strict=True))


# How many bytes a sync sends, and an engine holds of weights: calculated, before there is a trainer.


def served_bytes(shape: Shape, spec: QuantSpec, engine_ranks: int = 1) -> int:
    """Return the bytes that one rank of an engine holds of the weights under `spec`; with one rank, those that a sync
    sends.

    A quantized weight has one byte an element and a scale per block, any other two bytes. Ranks share dense products
    and experts; each of them has the rest whole.
    """
    return sum(
        weight_bytes(shape, weight, spec) // (1 if weight.share == "replicated" else engine_ranks)
        for weight in shape.weights
        if not weight.tied
    )


def weight_bytes(shape: Shape, weight: WeightGroup, spec: QuantSpec) -> int:
    """Return the bytes of one group of weights, as an engine holds them under `spec`."""
    quantized = weight.copies * len(shape.quantized_layers(weight, spec))
    plain = (weight.count - quantized) * weight.size * BF16_BYTES
    if not quantized:
        return plain
    pieces = weight.pieces or (weight.rows,)  # the tensors that the checkpoint has of it
    scales = sum(math.prod(scale_shape((rows, weight.columns), spec.weight)) for rows in pieces)
    return plain + quantized * (weight.size * spec.weight.dtype.itemsize + scales * SERVED_SCALES.itemsize)

"""From the trainer's weights to the tensors that an engine serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from numerics.errors import UserError
from numerics.names import SCALE_SUFFIX, place_of
from numerics.quantize import QuantizedTensor, quantize, scale_shape
from numerics.spec import QuantSpec, TensorSpec
from weight_sync.buckets import Allocate
from weight_sync.manifest import Manifest, Recorder


def served_tensors(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]],
    spec: QuantSpec,
    layers: int,
    allocate: Allocate | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of what is served under `spec`: FP8 codes and their scales, or the tensor as it is.

    weights: (HF name, BF16 tensor), or what the trainer quantized itself, whose codes and scales are served as they
    are (dequantized, where the engine runs them in BF16). layers: of the model, of which the first and the last may be
    exceptions. A quantized `x.weight` [N, K] becomes `x.weight` (FP8) and `x.weight_scale_inv` (FP32, one per block).
    The tensors may share memory with the parameters. allocate: where to quantize to.
    """
    for name, weight in weights:
        place = place_of(name)
        if place is None or not spec.of_layer(place[0], layers).quantizes(place[1]):
            yield name, weight.dequantize(torch.bfloat16) if isinstance(weight, QuantizedTensor) else weight
            continue
        quantized = _quantized(name, weight, spec.weight, allocate)
        yield name, quantized.data
        yield name + SCALE_SUFFIX, quantized.scale_inv


def manifest_of(
    weights: Iterable[tuple[str, Tensor | QuantizedTensor]], spec: QuantSpec, layers: int, version: str
) -> Manifest:
    """What an engine that serves `spec` must hold of these weights (as in `served_tensors`), without sending them."""
    recorder = Recorder(version, spec.digest())
    for _ in recorder.watch(served_tensors(weights, spec, layers)):
        pass
    return recorder.manifest()


def _quantized(
    name: str, weight: Tensor | QuantizedTensor, spec: TensorSpec, allocate: Allocate | None
) -> QuantizedTensor:
    if isinstance(weight, QuantizedTensor):
        if weight.spec != spec:
            raise UserError(f"{name}: found it quantized as {weight.spec}, expected {spec}; one spec for both")
        return weight
    try:
        return quantize(weight, spec, _destination(weight, spec, allocate) if allocate else None)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _destination(weight: Tensor, spec: TensorSpec, allocate: Allocate) -> QuantizedTensor:
    data = allocate(weight.shape, spec.dtype, weight.device)
    return QuantizedTensor(data, allocate(scale_shape(weight.shape, spec), torch.float32, weight.device), spec)

"""From the trainer's weights to the tensors that an engine serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from numerics.errors import UserError
from numerics.names import SCALE_SUFFIX, module_kind
from numerics.quantize import quantize
from numerics.spec import QuantSpec
from weight_sync.manifest import Manifest, Recorder


def served_tensors(weights: Iterable[tuple[str, Tensor]], spec: QuantSpec) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of what is served under `spec`: FP8 codes and their scales, or the tensor as it is.

    weights: (HF name, BF16 tensor). A quantized `x.weight` [N, K] becomes `x.weight` (FP8) and `x.weight_scale_inv`
    (FP32, one per block). The tensors may share memory with the parameters.
    """
    for name, tensor in weights:
        kind = module_kind(name)
        if kind is None or not spec.quantizes(kind):
            yield name, tensor
            continue
        try:
            quantized = quantize(tensor, spec.weight)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        yield name, quantized.data
        yield name + SCALE_SUFFIX, quantized.scale_inv


def manifest_of(weights: Iterable[tuple[str, Tensor]], spec: QuantSpec, version: str) -> Manifest:
    """What an engine that serves `spec` must hold of these weights, (HF name, BF16 tensor), without sending them."""
    recorder = Recorder(version, spec.digest())
    for _ in recorder.watch(served_tensors(weights, spec)):
        pass
    return recorder.manifest()

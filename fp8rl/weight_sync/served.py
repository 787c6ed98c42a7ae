"""Makes an engine's tensors from the trainer's weights, writes them as an HF directory, and counts their bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8rl.models import Model, read_model, text_config
from fp8rl.models.checkpoint.peft import read_adapter, read_config
from fp8rl.models.checkpoint.reading import kept_tensors, starting_weights
from fp8rl.models.checkpoint.writing import INDEX, write_directory
from fp8rl.models.shape import BF16_BYTES, FP32_BYTES, Shape, WeightGroup
from fp8rl.models.tensors import SCALE_SUFFIX, SERVED_SCALES
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.memory import batches_by_bytes
from fp8rl.numerics.core.process import exhaust
from fp8rl.numerics.core.reading import read_bytes
from fp8rl.numerics.ops.low_rank import LowRank, merged
from fp8rl.numerics.quantize import NamedWeight, QuantizedTensor, check_quantizable, quantize_many, scale_shape
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.buckets import Allocate
from fp8rl.weight_sync.manifest import Recorder, ShardDigests

_BATCH_BYTES = 32 << 20  # quantized at a time: experts are many and small, and each launch has its price


def served_tensors(
    weights: Iterable[NamedWeight], spec: QuantSpec, model: Model, allocate: Allocate | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the (HF name, tensor) pairs that are served under `spec`: FP8 codes and their scales, or the tensor
    unchanged.

    weights: (HF name, tensor) pairs. If the trainer has quantized a tensor, its codes and scales are served unchanged,
    or dequantized if `spec` does not quantize this tensor. model: the model of the tensors. allocate: allocates codes
    and scales. A quantized `x.weight` [N, K] becomes `x.weight` (FP8) and `x.weight_scale_inv` (FP32, one per block).
    The tensors may share memory with the parameters. If a weight cannot be quantized, the rest of `weights` is still
    consumed, so that other ranks do not wait.
    """
    try:
        for batch in batches_by_bytes(weights, _BATCH_BYTES):
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


def would_send(weights: Iterable[NamedWeight], spec: QuantSpec, model: Model, engine_ranks: int = 1) -> ShardDigests:
    """Return the digests of what a rank would send of `weights` (see `served_tensors`) to an engine with `spec`."""
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
            raise UserError(f"{name}: found codes of {weight.spec}, expected {spec.weight}, the engine's format")
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


# HF model directories as an engine loads them: quantized by the spec, or BF16.

ADAPTER = "--adapter"
"""The name of a merged adapter in messages."""
_COPIED, _OF_PICTURES = ("*.json", "*.jinja", "*.txt", "*.model"), "*processor_config.json"


def write_served_checkpoint(tensors: Iterable[tuple[str, Tensor]], source: Path, path: Path, spec: QuantSpec) -> None:
    """Write `tensors` (from `served_tensors`) with the configuration and tokenizer files of `source`.

    All ranks take part, as in `write_directory`. Without tensors, the directory is for an engine that gets them by a
    sync. config.json gets the `quantization_config` that SGLang reads: block FP8 with dynamic activation scales, and
    `scale_fmt: ue8m0` if scales are powers of two.
    """
    write_directory(path, tensors, lambda partial: _copy_description(source, partial, spec))


def quantization_config(spec: QuantSpec, model: Model) -> dict[str, Any]:
    """Return the HF `quantization_config` of a spec with block-quantized weights.

    The config cannot express a static range or stochastic rounding of activations. An engine of this project reads both
    from the run's numerics. Any other engine scales activations dynamically and rounds to nearest.

    `modules_to_not_convert` names every product that is not quantized, and modules that are only kept. It names routers
    too: otherwise transformers and vLLM would take a router for quantized. Entries are path prefixes. SGLang's
    `is_layer_skipped` compares whole path components. A layer's experts have one entry, their common module. No entry
    is a whole layer, because transformers takes the prefix of layer 1 for layer 10 too. A module that the engine fuses
    (q_a_proj with kv_a_proj) has an entry too, because SGLang's GLM-4.7-Flash looks only for it.
    """
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": spec.weight.format,
        "activation_scheme": "dynamic",
        "weight_block_size": [spec.weight.block_rows, spec.weight.group],
    }
    if spec.activation.scale == "pow2":
        config["scale_fmt"] = "ue8m0"
    kept = [row for row in model.tensors.rows.values() if row.product and not model.quantizes(row, spec)]
    modules = [row.name if row.expert is None else row.name.rpartition(f".{row.expert}.")[0] for row in kept]
    fused = [row.engine.parameter for row in kept if row.engine.fused]
    unquantized = list(dict.fromkeys(name.removesuffix(".weight") for name in modules + fused))
    return config | {"modules_to_not_convert": unquantized + model.sizes.kept_modules}


def convert_checkpoint(
    source: Path,
    path: Path,
    spec: QuantSpec,
    recorder: Recorder | None = None,
    adapter: Path | None = None,
    whole: bool = False,
) -> None:
    """Quantize the weights of an HF directory by the spec, into a directory that an engine loads.

    Weights of another float format are rounded first to the trainer's dtype. recorder: digests what is written.
    adapter: a directory in PEFT's format. The adapter is added to the weights before they are quantized. whole: also
    write the tensors `kept_in_layers`, unquantized, for servers that compute with them.
    Raises UserError: the adapter does not fit this model; see :mod:`models.checkpoint.peft`.
    """
    model = read_model(source)
    add = _merging(source, model, adapter) if adapter is not None else None

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, weight in starting_weights(source, model):
            yield name, add(name, weight) if add is not None else weight

    tensors = served_tensors(weights(), spec, model)
    tensors = recorder.watch(tensors) if recorder else tensors
    if whole:
        kept = kept_tensors(source, model)
        tensors = chain(tensors, ((name, tensor) for name, tensor in kept if model.sizes.keeps_in_layer(name)))
    write_served_checkpoint(tensors, source, path, spec)


def _merging(source: Path, model: Model, adapter: Path) -> Callable[[str, Tensor], Tensor]:
    """Return a function that takes a weight's name and tensor, and adds the adapter to the tensor."""
    config = read_config(adapter, model, ADAPTER)
    tensors = read_adapter(adapter, source, model.adapted(config), ADAPTER)

    def add(name: str, weight: Tensor) -> Tensor:
        if not config.adapts(row := model.tensors[name]):
            return weight
        a, b = (tensors[factor].to(weight.dtype) for factor in config.pair_of(row))
        return merged(weight, LowRank(a, b, config.scale))

    return add


def _copy_description(source: Path, partial: Path, spec: QuantSpec) -> None:
    model = read_model(source)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name != INDEX and not (model.sizes.tower and file.match(_OF_PICTURES)):
                (partial / file.name).write_bytes(read_bytes(file, "model.path", "a file to copy"))
    config = model.architecture.engine_config(text_config(source), model.sizes)
    config.pop("quantization_config", None)
    if spec.quantized:
        config["quantization_config"] = quantization_config(spec, model)
    (partial / "config.json").write_text(json.dumps(config, indent=1))


# The bytes that a sync sends and an engine holds, calculated before there is a trainer.


def served_bytes(shape: Shape, spec: QuantSpec, engine_ranks: int = 1) -> int:
    """Return the bytes of weights in one rank of an engine under `spec`. To an engine of one rank, a sync sends as
    many.

    A quantized weight has one byte per element and a scale per block. Any other weight has two bytes per element, or
    four in FP32. Ranks split dense products and experts; each rank holds all other weights whole.
    """
    heads = min(engine_ranks, shape.sizes.kv_heads)  # more ranks than heads have copies of them

    def of_rank(weight: WeightGroup) -> int:
        """Rows of key-value heads are split into `heads` parts, all other rows over all ranks."""
        size, keys = weight_bytes(shape, weight, spec), weight.kv_rows
        if weight.share == "replicated":
            return size
        return size * ((weight.rows - keys) * heads + keys * engine_ranks) // (weight.rows * heads * engine_ranks)

    return sum(of_rank(weight) for weight in shape.weights if not weight.tied)


def weight_bytes(shape: Shape, weight: WeightGroup, spec: QuantSpec) -> int:
    """Return the bytes of one group of weights, as an engine holds them under `spec`."""
    quantized = weight.copies * len(shape.quantized_layers(weight, spec))
    plain = (weight.count - quantized) * weight.size * (FP32_BYTES if weight.fp32 else BF16_BYTES)
    if not quantized:
        return plain
    pieces = weight.pieces or (weight.rows,)  # the tensors that the checkpoint has of it
    scales = sum(math.prod(scale_shape((rows, weight.columns), spec.weight)) for rows in pieces)
    return plain + quantized * (weight.size * spec.weight.dtype.itemsize + scales * SERVED_SCALES.itemsize)

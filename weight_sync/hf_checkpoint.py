"""HF model directories as an engine loads them: quantized by the spec, or BF16."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8rl.models import Model, read_model
from fp8rl.models.peft import pair_of, read_adapter, read_config
from fp8rl.models.stored import starting_weights
from fp8rl.models.storing import INDEX, write_directory
from fp8rl.numerics.core.reading import read_bytes
from fp8rl.numerics.ops.low_rank import LowRank
from fp8rl.numerics.ops.merged import merged
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.manifest import Recorder
from fp8rl.weight_sync.quantized import served_tensors

ADAPTER = "--adapter"
"""The name of a merged adapter in messages."""
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")


def write_served_checkpoint(tensors: Iterable[tuple[str, Tensor]], source: Path, path: Path, spec: QuantSpec) -> None:
    """Write `tensors` (from `served_tensors`) with the configuration and tokenizer files of `source`.

    All ranks take part, as in `write_directory`. config.json gets the `quantization_config` that SGLang reads: block
    FP8 with dynamic activation scales, `scale_fmt: ue8m0` where they are powers of two.
    """
    write_directory(path, tensors, lambda partial: _copy_description(source, partial, spec))


def write_description(source: Path, path: Path, spec: QuantSpec) -> None:
    """Write the directory of `write_served_checkpoint` without weights, for an engine that waits for a sync."""
    write_directory(path, (), lambda partial: _copy_description(source, partial, spec))


def quantization_config(spec: QuantSpec, model: Model) -> dict[str, Any]:
    """Return the HF `quantization_config` of a spec with block-quantized weights.

    It cannot say that activations have a static range or are rounded stochastically: an engine of this project knows
    from the run's numerics, any other quantizes them dynamically to nearest.

    `modules_to_not_convert` names every product that stays as it is, without which transformers and vLLM take a router
    for quantized. Its entries are path prefixes: SGLang's `is_layer_skipped` takes them for whole path components, and
    so for the fused projections and the experts of a layer alike. For a layer's experts the common module is named, but
    never a layer's prefix: transformers takes that of 1 for 10's, too. q_a_proj and kv_a_proj are one module in the
    engine, which is named as well: SGLang's GLM-4.7-Flash looks for no other.
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
    fused = [row.engine.parameter for row in kept if row.engine.together]
    unquantized = list(dict.fromkeys(name.removesuffix(".weight") for name in modules + fused))
    return config | {"modules_to_not_convert": unquantized}


def convert_checkpoint(
    source: Path, path: Path, spec: QuantSpec, recorder: Recorder | None = None, adapter: Path | None = None
) -> None:
    """Quantize the weights of an HF directory by the spec, into a directory that an engine loads.

    Weights of another float format are rounded first to the trainer's dtype. recorder: digests what is written.
    adapter: a directory in PEFT's format, which is added to the weights before they are quantized.

    Raises:
        UserError: the adapter is not one of this model; see :mod:`models.peft`.
    """
    model = read_model(source)
    add = _merging(source, model, adapter) if adapter is not None else None

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, weight in starting_weights(source, model):
            yield name, add(name, weight) if add is not None else weight

    tensors = served_tensors(weights(), spec, model)
    write_served_checkpoint(recorder.watch(tensors) if recorder else tensors, source, path, spec)


def _merging(source: Path, model: Model, adapter: Path) -> Callable[[str, Tensor], Tensor]:
    """Return a function of a weight's name and tensor that adds the adapter to it."""
    config = read_config(adapter, model, ADAPTER)
    tensors = read_adapter(adapter, source, model.adapted(config), ADAPTER)

    def add(name: str, weight: Tensor) -> Tensor:
        if not config.adapts(row := model.tensors[name]):
            return weight
        a, b = (tensors[each].to(weight.dtype) for each in pair_of(row, config))
        return merged(weight, LowRank(a, b, config.scale))

    return add


def _copy_description(source: Path, partial: Path, spec: QuantSpec) -> None:
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name != INDEX:
                (partial / file.name).write_bytes(read_bytes(file, "model.path", "a file to copy"))
    config = json.loads((partial / "config.json").read_text())
    config.pop("quantization_config", None)
    if spec.quantized:
        config["quantization_config"] = quantization_config(spec, read_model(source))
    (partial / "config.json").write_text(json.dumps(config, indent=1))

"""An HF model directory as an engine loads it: quantized by the spec, or BF16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from numerics.files import publish_directory
from numerics.spec import QuantSpec
from weight_sync.quantized import served_tensors
from weight_sync.shards import shards

_SHARD_BYTES = 4 << 30
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHT_INDEX = "model.safetensors.index.json"
_LAYERS = "num_hidden_layers"


def write_served_checkpoint(tensors: Iterable[tuple[str, Tensor]], source: Path, path: Path, spec: QuantSpec) -> None:
    """Write `tensors` (from `served_tensors`) with the configuration and tokenizer files of `source`.

    `path` appears whole or not at all, in place of what stood there. config.json gets the `quantization_config` that
    SGLang reads: block FP8 with dynamic activation scales, `scale_fmt: ue8m0` where they are powers of two.
    """
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _copy_description(source, partial, spec)
        _write_tensors(tensors, partial)
        publish_directory(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def quantization_config(spec: QuantSpec, layers: int) -> dict[str, Any]:
    """The HF `quantization_config` of a spec with block-quantized weights, for a model of `layers` layers.

    `modules_to_not_convert` holds path prefixes: SGLang's `is_layer_skipped` takes them for whole path components, and
    so for the fused projections and the experts of a layer alike.
    """
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": spec.weight.format,
        "activation_scheme": "dynamic",
        "weight_block_size": [spec.weight.group, spec.weight.group],
    }
    if spec.activation.scale == "pow2":
        config["scale_fmt"] = "ue8m0"
    if exceptions := spec.bf16_layers(layers):
        config["modules_to_not_convert"] = [f"model.layers.{layer}" for layer in exceptions]
    return config


def convert_checkpoint(source: Path, path: Path, spec: QuantSpec) -> None:
    """The weights of an HF directory, quantized by the spec, as a directory that an engine loads.

    Weights of another float format are rounded to BF16 first, as the trainer does when it loads them.
    """
    weights = ((name, tensor.to(torch.bfloat16)) for name, tensor in _stored_tensors(source))
    layers = json.loads((source / "config.json").read_text())[_LAYERS]
    write_served_checkpoint(served_tensors(weights, spec, layers), source, path, spec)


def _copy_description(source: Path, partial: Path, spec: QuantSpec) -> None:
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name != _WEIGHT_INDEX:
                shutil.copy(file, partial)
    config = json.loads((partial / "config.json").read_text())
    config.pop("quantization_config", None)
    if spec.quantized:
        config["quantization_config"] = quantization_config(spec, config[_LAYERS])
    (partial / "config.json").write_text(json.dumps(config, indent=1))


def _write_tensors(tensors: Iterable[tuple[str, Tensor]], partial: Path) -> None:
    where: dict[str, str] = {}
    for index, shard in enumerate(shards(tensors, _SHARD_BYTES)):
        file = f"model-{index:05d}.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in shard}, partial / file, {"format": "pt"})
        where |= dict.fromkeys((name for name, _ in shard), file)
    (partial / _WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _stored_tensors(source: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():
                yield name, stored.get_tensor(name)

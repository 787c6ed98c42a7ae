"""Pads a model with zeros, so that every width becomes a multiple of the quantization block.

The zeros change only the mean in the model's norms, and the norms' weights are scaled to undo that. Training leaves the
zeros at zero. Each of their gradients is a product with an activation or a gradient of a padded channel, so it is
exactly zero. :func:`unpadded` removes the zeros.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.architecture import Model, model_of, read_model
from fp8rl.models.checkpoint.reading import kept_tensors, stored_tensors
from fp8rl.models.checkpoint.writing import copy_beside_weights, write_directory
from fp8rl.models.config_file import ConfigFile
from fp8rl.models.tensors import FP8_BLOCK, TensorRow
from fp8rl.numerics.core.errors import UserError, user_error

UNPADDED = "fp8rl_unpadded"
"""The key of config.json that has the former values of keys that padding changed; null for a key that was absent."""
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
NORM = "norm.weight"
MOST = 2
"""The largest factor by which a width may grow."""


def padded(source: Path, out: Path, key: str, check: Callable[[Model], object]) -> dict[str, Any]:
    """Write the model of `source`, padded to whole blocks, in the dtypes that it is stored in.

    If heads are narrower than a block, heads are added until they fill blocks together. check: called before anything
    is written, to refuse a padded model that cannot be used. Returns the new values of keys of config.json.

    Raises UserError: the model has whole blocks already, or zeros would change what it computes.
    """
    model, values = read_model(source, key), ConfigFile.read(source, key).values
    changes = _changes(values, model, key)
    before = {name: values.get(name) for name in changes}
    config = values | changes | {UNPADDED: before}
    config.pop("quantization_config", None)  # what was in FP8 is read in BF16
    wider = model_of(ConfigFile(config, out / "config.json", key))
    check(wider)
    # Padding changes the mean of norms over `hidden_size` values, and one epsilon is for all of them.
    hidden, norms = model.sizes.hidden_size, [row for row in model.tensors.rows.values() if row.name.endswith(NORM)]
    widens = hidden != wider.sizes.hidden_size
    if not (widens and model.sizes.zero_centered_norms):
        norms = [row for row in norms if row.shape != (hidden,)]
    if others := [row for row in norms if widens or wider.tensors[row.name].shape != row.shape]:
        raise UserError(
            f"{key}: found the norm {others[0].name}, in which padding would change the mean or the epsilon, "
            f"expected only norms of hidden_size = {hidden} values. Train this model in BF16 on both sides."
        )
    if model.multimodal is not None or any(True for _ in kept_tensors(source, model, key)):
        expected = "a model without them, because their widths would no longer fit"
        remedy = "Save only its text model with transformers."
        raise user_error(key, "a model with draft layers or an image encoder", expected, remedy)
    _write(source, out, key, model, wider, config)
    return changes


def unpadded(source: Path, out: Path, key: str) -> dict[str, Any]:
    """Write a padded model in its former widths. Return the widths by their keys in config.json. Raises UserError if
    the model was not padded, or if its padding is no longer zero."""
    wider, values = read_model(source, key), ConfigFile.read(source, key).values
    before = values.get(UNPADDED)
    if not isinstance(before, dict):
        expected = "the former widths, which `fp8rl convert --pad` writes"
        remedy = "Leave out --unpad: the model was not padded."
        raise user_error(f"{key}: {UNPADDED} in {source / 'config.json'}", before, expected, remedy)
    absent = {UNPADDED, *(name for name, value in before.items() if value is None)}
    config = {name: value for name, value in {**values, **before}.items() if name not in absent}
    model = model_of(ConfigFile(config, out / "config.json", key))
    _write(source, out, key, wider, model, config)
    return before


def _write(source: Path, out: Path, key: str, old: Model, new: Model, config: Mapping[str, Any]) -> None:
    """Write the model `old` of `source` in the widths of `new`, with zeros where these are larger."""
    scale = math.sqrt(old.sizes.hidden_size / new.sizes.hidden_size)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stored_tensors(source, old, key):
            row = new.tensors[name]
            _check_zeros(name, tensor, row, key)
            both = tuple(slice(min(sizes)) for sizes in zip(tensor.shape, row.shape, strict=True))
            resized = tensor.new_zeros(row.shape)
            resized[both] = tensor[both]
            if name.endswith(NORM) and row.shape == (new.sizes.hidden_size,):
                resized = (resized.double() * scale).to(resized.dtype)
            yield name, resized

    def describe(partial: Path) -> None:
        copy_beside_weights(source, partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    write_directory(out, tensors(), describe)


def _changes(values: Mapping[str, Any], model: Model, key: str) -> dict[str, Any]:
    sizes = model.sizes
    sized = {name: values[name] for name in WIDTHS if isinstance(values.get(name), int)}
    changes: dict[str, Any] = {
        name: -(-size // FP8_BLOCK) * FP8_BLOCK for name, size in sized.items() if size % FP8_BLOCK
    }
    together = FP8_BLOCK // sizes.head_dim
    if FP8_BLOCK % sizes.head_dim == 0 and sizes.kv_heads % together:
        groups = -(-sizes.kv_heads // together) * together
        queries = groups * sizes.heads // sizes.kv_heads
        changes |= {"num_key_value_heads": groups, "num_attention_heads": queries, "head_dim": sizes.head_dim}
    if (hidden := changes.get("hidden_size")) is not None:
        changes |= {"head_dim": sizes.head_dim, "rms_norm_eps": sizes.norm_eps * sizes.hidden_size / hidden}
    if not changes:
        raise user_error(key, "whole blocks in every width", "a width that needs padding", "Leave out --pad.")
    for name, new in changes.items():
        old = {"num_key_value_heads": sizes.kv_heads, "num_attention_heads": sizes.heads}.get(name, values.get(name))
        if isinstance(old, int) and new > MOST * old:
            expected = f"at least {-(-new // MOST)}, so that padding to {new} does not more than double it"
            remedy = (
                "Train this model in BF16 on both sides (numerics.preset=bf16 numerics.trainer=bf16 "
                "numerics.rollout=bf16)."
            )
            raise user_error(f"{key}: {name}", old, expected, remedy)
    if not _accepted({**values, **changes}):
        changes = {"num_key_value_heads": sizes.kv_heads, **changes, **model.architecture.any_heads}
    return changes


def _accepted(config: Mapping[str, Any]) -> bool:
    """Return whether transformers accepts a config.json: in some models the number of heads must divide the width."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return True
    try:
        CONFIG_MAPPING[config["model_type"]](**config)
    except StrictDataclassError:
        return False
    return True


def _check_zeros(name: str, tensor: Tensor, row: TensorRow, key: str) -> None:
    """Raise UserError unless a tensor is zero in the rows beyond `row` and, for an embedding, in the columns beyond it.

    Added columns of a product are multiplied by zeros, so they may have any value. A merged adapter makes them random.
    """
    beyond = [tensor[row.shape[0] :]]
    if tensor.dim() > 1 and row.op == "embed":
        beyond.append(tensor[:, row.shape[1] :])
    count = sum(int(torch.count_nonzero(part)) for part in beyond)
    if count:
        expected = "zeros, which training leaves as they are"
        remedy = "Keep the padded model: something else has changed it."
        raise user_error(f"{key}: {name}", f"{count} values that are not zero where it was padded", expected, remedy)

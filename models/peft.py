"""Adapters in the format of PEFT, out and in: `adapter_config.json` and `adapter_model.safetensors`.

Each matrix has its pair under its own name in the checkpoint, experts too: what PEFT wrote of a model whose experts
are modules, and what it turns itself into stacked experts where transformers has them so (PEFT 0.19 and later).
Adapters that a layer's experts share stand there once for each of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, equal

from fp8rl.models.adapters import WEIGHT, AdapterSection, matrix
from fp8rl.models.architecture import Model
from fp8rl.models.peft_config import CONFIG, MERGE, PeftConfig, read_peft_config
from fp8rl.models.stored import FLOAT_DTYPES, check_finite, starting_weights
from fp8rl.models.storing import open_tensors, write_tensors
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.files import new_directory
from fp8rl.numerics.digest import tensor_digest

TENSORS = "adapter_model.safetensors"
START = "adapter.start"
"""Key of the spec that names such a directory."""
BASE = "base_digest"
"""Key of the tensors' metadata by which they name the weights that they were trained beside."""
_PREFIX = "base_model.model."


def pair_of(row: TensorRow, config: AdapterSection) -> tuple[str, str]:
    """The names of A and B beside a weight."""
    name = row.name.removesuffix(f".{WEIGHT}")
    if row.expert is not None and config.experts == "shared":
        before, _, after = name.rpartition(f".{row.expert}.")
        name = f"{before}.{after}"
    return f"{name}.lora_A.{WEIGHT}", f"{name}.lora_B.{WEIGHT}"


def base_digest(path: Path, model: Model) -> str:
    """Return what the weights of a directory are, in 32 hex digits, as BF16 and whatever files they are in."""
    return digest_of_all({name: tensor_digest(weight) for name, weight in starting_weights(path, model)})


def digest_of_all(weights: Mapping[str, str]) -> str:
    """The same of the digests of all weights, by name."""
    return hashlib.blake2b(json.dumps(dict(weights), sort_keys=True).encode(), digest_size=16).hexdigest()


def write_adapter(path: Path, tensors: Mapping[str, Tensor], model: Model, base: Path) -> None:
    """Write the adapters of a model as a directory, in place of what stood there.

    tensors: by the names of the model's table. base: directory of the weights that they stand beside.
    """
    config = model.adapter
    assert config is not None, "a model without adapters"
    adapted = list(filter(config.adapts, _weights(model)))
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({matrix(row) for row in adapted}),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    written: dict[str, Tensor] = {}
    for row in adapted:
        for letter, name in zip("AB", pair_of(row, config), strict=True):
            own = tensors[name].detach().cpu()
            written[_key(row, letter)] = own.clone() if config.experts == "shared" else own.contiguous()
    with new_directory(path) as partial:
        write_tensors(partial / TENSORS, written, {"format": "pt", BASE: base_digest(base, model)})
        (partial / CONFIG).write_text(json.dumps(described, indent=1))


def read_config(path: Path, model: Model, key: str) -> AdapterSection:
    """Return what the adapters of a PEFT directory are: which matrices have one, how wide, and how much it counts.

    Raises:
        UserError: no such directory, another method than LoRA or a variant of it, or matrices that the model lacks.
    """
    described = read_peft_config(path, key)
    found = _adapted(path, model, described, key)
    config = AdapterSection(
        rank=described.r,
        alpha=described.lora_alpha,
        targets=tuple(dict.fromkeys(map(matrix, found))),
        experts="per_expert" if any(row.expert is not None for row in found) else "none",
    )
    held = {row.name for row in found}
    if without := [row.name for row in _weights(model) if config.adapts(row) and row.name not in held]:
        some = f"{path} with adapters of some matrices {matrix(model.tensors[without[0]])} and none of {without[0]}"
        raise _refusal(key, some, "one for each matrix of that name", MERGE)
    return config


def read_adapter(path: Path, base: Path, model: Model, key: str) -> dict[str, Tensor]:
    """The tensors of a PEFT directory, by the names that the table of `model` has for its adapters.

    base: directory of the weights that they are to stand beside.

    Raises:
        UserError: as `read_config` does; or the tensors are not those of the model's adapters, or of another base.
    """
    config = model.adapter
    assert config is not None, "a model without adapters"
    stored = read_config(path, model, key)
    for name in ("rank", "alpha"):
        if (found := getattr(stored, name)) != (expected := getattr(config, name)):
            raise _refusal(key, f"{name} {found} in {path}", f"adapter.{name}={expected}", f"Set it to {found}.")
    adapted = list(filter(config.adapts, _weights(model)))
    if others := {row.name for row in _weights(model) if stored.adapts(row)} ^ {row.name for row in adapted}:
        remedy = f"Set adapter.targets to {', '.join(stored.targets)} and adapter.experts={stored.experts}."
        raise _refusal(key, f"adapters of other matrices in {path}, e.g. {min(others)}", "those of the spec", remedy)
    tensors: dict[str, Tensor] = {}
    with open_tensors(path / TENSORS, key) as file:
        if (digest := (file.metadata() or {}).get(BASE)) is not None and digest != (ours := base_digest(base, model)):
            found = f"{path}, trained beside weights with the digest {digest}"
            remedy = "Give the model that they were trained beside."
            raise _refusal(key, found, f"those of {base}, {ours}", remedy)
        for row in adapted:
            for letter, name in zip("AB", pair_of(row, config), strict=True):
                tensor = file.get_tensor(_key(row, letter))
                check_finite(_key(row, letter), tensor, key)
                if name in tensors and not equal(tensors[name], tensor):
                    found = f"experts with adapters of their own in {path}, e.g. {_key(row, letter)}"
                    raise _refusal(key, found, "one for all of a layer", "Set adapter.experts=per_expert.")
                tensors[name] = tensor
    return tensors


def _adapted(path: Path, model: Model, described: PeftConfig, key: str) -> list[TensorRow]:
    """The weights that the tensors of a PEFT directory stand beside, as their shapes and the description have it."""
    with open_tensors(path / TENSORS, key) as file:
        stored = {name: file.get_slice(name) for name in file.keys()}
        shapes = {name: (tuple(held.get_shape()), held.get_dtype()) for name, held in stored.items()}
    found, left = [], set(shapes)
    for row in _weights(model):
        if (pair := {_key(row, "A"), _key(row, "B")}) <= left:
            left -= pair
            found.append(row)
    if left or not found:
        what = f"{path}: {min(left)}" if left else f"{path}: no tensors"
        expected = f"pairs like {_key(next(_weights(model)), 'A')}, of products of attention, MLPs and experts"
        remedy = "Give an adapter of this model whose target_modules are such products."
        raise _refusal(key, what, expected, remedy)
    for row in found:
        (rows, columns), rank = row.shape, described.r
        for name, shape in ((_key(row, "A"), (rank, columns)), (_key(row, "B"), (rows, rank))):
            if (held := shapes[name][0]) != shape:
                raise _refusal(key, f"{name} of shape {list(held)}", f"{list(shape)}", "Give an adapter of this model.")
            if (dtype := shapes[name][1]) not in FLOAT_DTYPES:
                raise _refusal(
                    key, f"{name} in {dtype}", f"one of {', '.join(FLOAT_DTYPES)}", "Save it in one of them."
                )
        if not described.adapts(module := row.name.removesuffix(f".{WEIGHT}"), row.layer):
            listed = "what target_modules, exclude_modules and layers_to_transform name, which is all that PEFT loads"
            raise _refusal(key, f"{path} with adapters of {module}", listed, f"Correct {CONFIG}, or remove them.")
    return found


def _weights(model: Model) -> Iterator[TensorRow]:
    return (row for row in model.tensors.rows.values() if row.product and row.kind is not None and row.adapts is None)


def _key(row: TensorRow, letter: str) -> str:
    return f"{_PREFIX}{row.name.removesuffix(f'.{WEIGHT}')}.lora_{letter}.{WEIGHT}"


def _refusal(key: str, found: str, expected: str, remedy: str) -> UserError:
    return user_error(key, found=found, expected=expected, remedy=remedy)

"""Writes and reads adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Each matrix, an expert's too, has its pair A, B under its own name in the checkpoint. PEFT writes this form for a model
whose experts are modules. If transformers stacks the experts, PEFT 0.19 and later converts the form itself. Adapters
that a layer's experts share are written once for each expert.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor, equal

from fp8rl.models.adapters import WEIGHT, AdapterSection, matrix
from fp8rl.models.architecture import Model
from fp8rl.models.checkpoint.reading import FLOAT_DTYPES, check_finite, starting_weights
from fp8rl.models.checkpoint.writing import open_tensors, write_tensors
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.core.errors import UserError, shown, user_error
from fp8rl.numerics.core.files import new_directory
from fp8rl.numerics.core.reading import read_json
from fp8rl.numerics.digest import tensor_digest

TENSORS = "adapter_model.safetensors"
START = "adapter.start"
"""The key of a spec that names a directory in PEFT's format."""
BASE = "base_digest"
"""The key of a file's metadata that identifies the weights to which its adapters belong."""
_PREFIX = "base_model.model."


def base_digest(path: Path, model: Model) -> str:
    """Return a digest, 32 hex digits, of a directory's weights, in BF16 even if the files have another dtype."""
    return digest_of_all({name: tensor_digest(weight) for name, weight in starting_weights(path, model)})


def digest_of_all(weights: Mapping[str, str]) -> str:
    """Combine the digests of all weights, by name, into one digest of 32 hex digits."""
    return hashlib.blake2b(json.dumps(dict(weights), sort_keys=True).encode(), digest_size=16).hexdigest()


def write_adapter(path: Path, tensors: Mapping[str, Tensor], model: Model, base: Path) -> None:
    """Write the adapters of a model as a directory, which replaces what was there.

    tensors: the adapters by their names in the model's table. base: the directory with the weights that they belong to.
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
        for letter, name in zip("AB", config.pair_of(row), strict=True):
            tensor = tensors[name].detach().cpu()
            written[_key(row, letter)] = tensor.clone() if config.experts == "shared" else tensor.contiguous()
    with new_directory(path) as partial:
        write_tensors(partial / TENSORS, written, {"format": "pt", BASE: base_digest(base, model)})
        (partial / CONFIG).write_text(json.dumps(described, indent=1))


def read_config(path: Path, model: Model, key: str) -> AdapterSection:
    """Return the section that describes the adapters of a PEFT directory: their matrices, rank and scale. Raises
    UserError: no such directory, another method than plain LoRA, or matrices that the model lacks."""
    described = read_peft_config(path, key)
    found = _adapted(path, model, described, key)
    config = AdapterSection(
        rank=described.r,
        alpha=described.lora_alpha * (math.sqrt(described.r) if described.use_rslora else 1.0),
        targets=tuple(dict.fromkeys(map(matrix, found))),
        experts="per_expert" if any(row.expert is not None for row in found) else "none",
    )
    adapted = {row.name for row in found}
    if without := [row.name for row in _weights(model) if config.adapts(row) and row.name not in adapted]:
        some = f"{path} with adapters of some matrices {matrix(model.tensors[without[0]])} and none of {without[0]}"
        raise user_error(key, some, "an adapter for each matrix of that name", MERGE)
    return config


def read_adapter(path: Path, base: Path, model: Model, key: str) -> dict[str, Tensor]:
    """Return the tensors of a PEFT directory, by the names that the table of `model` has for its adapters.

    base: directory of the weights to which the adapters are added.

    Raises UserError: as `read_config` does; or the model's adapters have other tensors, or another base.
    """
    config = model.adapter
    assert config is not None, "a model without adapters"
    stored = read_config(path, model, key)
    for name in ("rank", "alpha"):
        if (found := getattr(stored, name)) != (expected := getattr(config, name)):
            raise user_error(key, f"{name} {found} in {path}", f"adapter.{name}={expected}", f"Set it to {found}.")
    adapted = list(filter(config.adapts, _weights(model)))
    if others := {row.name for row in _weights(model) if stored.adapts(row)} ^ {row.name for row in adapted}:
        remedy = f"Set adapter.targets to {', '.join(stored.targets)} and adapter.experts={stored.experts}."
        raise user_error(key, f"adapters of other matrices in {path}, e.g. {min(others)}", "the spec's", remedy)
    tensors: dict[str, Tensor] = {}
    with open_tensors(path / TENSORS, key) as file:
        if (digest := (file.metadata() or {}).get(BASE)) is not None and digest != (ours := base_digest(base, model)):
            found = f"{path}, trained on weights with the digest {digest}"
            remedy = "Give the model that they were trained on."
            raise user_error(key, found, f"the digest {ours} of {base}", remedy)
        for row in adapted:
            for letter, name in zip("AB", config.pair_of(row), strict=True):
                tensor = file.get_tensor(_key(row, letter))
                check_finite(_key(row, letter), tensor, key)
                if name in tensors and not equal(tensors[name], tensor):
                    found = f"experts with adapters of their own in {path}, e.g. {_key(row, letter)}"
                    raise user_error(key, found, "one adapter for a layer's experts", "Set adapter.experts=per_expert.")
                tensors[name] = tensor
    return tensors


def _adapted(path: Path, model: Model, described: PeftConfig, key: str) -> list[TensorRow]:
    """Return the rows of the weights that a PEFT directory adapts. Its tensors and its description must agree."""
    with open_tensors(path / TENSORS, key) as file:
        stored = {name: file.get_slice(name) for name in file.keys()}
        shapes = {name: (tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in stored.items()}
    found, left = [], set(shapes)
    for row in _weights(model):
        if (pair := {_key(row, "A"), _key(row, "B")}) <= left:
            left -= pair
            found.append(row)
    if left or not found:
        what = f"{path}: {min(left)}" if left else f"{path}: no tensors"
        expected = f"pairs like {_key(next(_weights(model)), 'A')}, of products of attention, MLPs and experts"
        remedy = "Give an adapter of this model whose target_modules are such products."
        raise user_error(key, what, expected, remedy)
    for row in found:
        (rows, columns), rank = row.shape, described.r
        for name, shape in ((_key(row, "A"), (rank, columns)), (_key(row, "B"), (rows, rank))):
            if (held := shapes[name][0]) != shape:
                raise user_error(
                    key, f"{name} of shape {list(held)}", f"{list(shape)}", "Give an adapter of this model."
                )
            if (dtype := shapes[name][1]) not in FLOAT_DTYPES:
                raise user_error(
                    key, f"{name} in {dtype}", f"one of {', '.join(FLOAT_DTYPES)}", "Save it in one of them."
                )
        if not described.adapts(module := row.name.removesuffix(f".{WEIGHT}"), row.layer):
            listed = "what target_modules, exclude_modules and layers_to_transform name, which is all that PEFT loads"
            raise user_error(key, f"{path} with adapters of {module}", listed, f"Correct {CONFIG}, or remove them.")
    return found


def _weights(model: Model) -> Iterator[TensorRow]:
    return (row for row in model.tensors.rows.values() if row.adaptable)


def _key(row: TensorRow, letter: str) -> str:
    return f"{_PREFIX}{row.name.removesuffix(f'.{WEIGHT}')}.lora_{letter}.{WEIGHT}"


# The adapter_config.json of PEFT, read by what each of its keys may say.
#
# An adapter is accepted if it adds scale · B A to unchanged weights. PEFT has some twenty other kinds of adapters, and
# its next version will have more. So unknown keys and values are refused.

CONFIG = "adapter_config.json"
MERGE = "Merge it into its model with PEFT (merge_and_unload), and start from that model."
_RESTORE = "Restore the file as PEFT wrote it."
_TRAIN = "PEFT cannot merge it either: train a plain LoRA adapter."
_CONVERT = "Save it as plain LoRA with PEFT (save_pretrained with path_initial_model_for_weight_conversion)"

Off = Literal[False]
Empty = Annotated[list[Any] | dict[str, Any], Field(max_length=0)]
Lowered = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)


class _History(BaseModel):
    """Settings that are read but not used: how an adapter was trained, and details of what `PeftConfig` refuses."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_version: str | None = None
    auto_mapping: dict[str, Any] | None = None
    inference_mode: bool | None = None
    lora_dropout: float | None = None
    runtime_config: dict[str, Any] | None = None
    ensure_weight_tying: bool | None = None
    megatron_core: str | None = None
    qalora_group_size: int | None = None
    eva_config: dict[str, Any] | None = None


class PeftConfig(_History):
    """Each key that PEFT 0.21 writes for LoRA, with the values for which an adapter is just scale · B A."""

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    r: int = Field(ge=1, lt=1 << 31)
    lora_alpha: float = Field(gt=0)
    use_rslora: bool = False
    """True: the scale is alpha / sqrt(r)."""

    # Which matrices have a pair. The tensors say it too; they are compared.
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: Literal["layers"] | list[Literal["layers"]] | None = None
    target_parameters: Empty | None = None

    # How the base was changed before training. The accepted values leave it unchanged.
    init_lora_weights: Annotated[bool | Literal["gaussian", "orthogonal", "eva", "mica"], Lowered] = True
    loftq_config: Empty | None = None
    corda_config: Empty | None = None
    lora_ga_config: Empty | None = None

    # What else would be added, scaled or trained.
    rank_pattern: Empty | None = None
    alpha_pattern: Empty | None = None
    fan_in_fan_out: Off = False
    bias: Literal["none"] = "none"
    lora_bias: Off = False
    modules_to_save: Empty | None = None
    trainable_token_indices: Empty | None = None
    layer_replication: Empty | None = None
    use_dora: Off = False
    use_qalora: Off = False
    alora_invocation_tokens: Empty | None = None
    use_bdlora: None = None
    arrow_config: None = None
    kasa_config: None = None
    velora_config: None = None
    monteclora_config: None = None
    megatron_config: None = None

    def adapts(self, module: str, layer: int | None) -> bool:
        """Return whether PEFT may adapt a matrix. Patterns (texts) are not tried; the tensors show what
        they match."""
        layers = self.layers_to_transform
        layers = [layers] if isinstance(layers, int) else layers
        if layers and layer not in layers:  # an empty list is all layers
            return False
        targets, excluded = self.target_modules, self.exclude_modules
        if isinstance(excluded, list) and _any_of(excluded, module):
            return False
        return not isinstance(targets, list) or _any_of(targets, module)


def _any_of(names: list[str], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


_OTHERWISE = {
    "peft_type": ("LORA", "Train a LoRA adapter."),
    "task_type": ("CAUSAL_LM", "Train an adapter of a causal language model."),
    **dict.fromkeys(_History.model_fields, ("a value as PEFT writes it", _RESTORE)),
    "r": ("a positive integer", _RESTORE),
    "lora_alpha": ("a positive number", _RESTORE),
    "target_modules": ("a text or a list of names", _RESTORE),
    "exclude_modules": ("a text or a list of names", _RESTORE),
    "layers_to_transform": ("numbers of layers", _RESTORE),
    "layer_replication": ("plain LoRA, without it", _TRAIN),
    "use_qalora": ("plain LoRA, without it", _TRAIN),
    "alora_invocation_tokens": ("plain LoRA, without it", _TRAIN),
    "arrow_config": ("plain LoRA, without it", _TRAIN),
}
"""For a key: the expected value and the remedy. All other keys expect plain LoRA, and have the remedy `MERGE`."""


def read_peft_config(directory: Path, key: str) -> PeftConfig:
    """Read the adapter_config.json of a directory; messages call the directory `key`. Raises UserError if the file
    does not describe a plain LoRA adapter."""
    path = directory / CONFIG
    values = read_json(path, key, f"the {CONFIG} of PEFT", _RESTORE)
    given = {name: value for name, value in values.items() if value is not None}  # null: not set
    try:
        return PeftConfig.model_validate(given)
    except ValidationError as error:
        raise _config_refusal(key, path, str(error.errors()[0]["loc"][0]), given) from None


def _config_refusal(key: str, path: Path, name: str, given: dict[str, Any]) -> UserError:
    if name not in given:
        return user_error(key, found=f"no {name} in {path}", expected=f"the {CONFIG} of PEFT", remedy=_RESTORE)
    value = given[name]
    expected, remedy = _OTHERWISE.get(name, ("plain LoRA, without it", MERGE))
    if name not in PeftConfig.model_fields:
        expected = "keys that PEFT 0.21 writes"
        remedy = f"If it changes what the adapter computes: {MERGE} Else remove it."
    elif name == "init_lora_weights":
        expected = "true, false, gaussian, orthogonal, eva or mica, which leave the base weights unchanged"
        remedy = _of_changed_base(str(value).lower())
    elif name in ("loftq_config", "corda_config", "lora_ga_config"):
        expected = "none, as it belongs to an initialization that changes the base weights"
        remedy = f"{_of_changed_base(name.removesuffix('_config'))} If PEFT has converted it already, remove the key."
    return user_error(key, found=f"{name}={shown(value, 80)} in {path}", expected=expected, remedy=remedy)


def _of_changed_base(name: str) -> str:
    """Return the remedy for an initialization that changed the weights. PEFT repeats some of these when it merges."""
    if name in ("pissa", "olora"):
        return f"{_CONVERT}, or merge it into its model (merge_and_unload), and start from that model."
    return f"{_CONVERT}." if name in ("corda", "lora_ga") or name.startswith("pissa") else MERGE

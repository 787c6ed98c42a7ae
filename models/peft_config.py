"""The adapter_config.json of PEFT, read by what each of its keys may say.

An adapter is taken where it is scale · B A beside the weights as they are. PEFT has some twenty ways to make more of
one, or to change the weights below it, and its next version will have others: what is not known here is refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fp8rl.numerics.core.errors import UserError, shown, user_error
from fp8rl.numerics.core.reading import read_json

CONFIG = "adapter_config.json"
MERGE = "Merge it into its model with PEFT (merge_and_unload), and start from that model."
_RESTORE = "Restore the file as PEFT wrote it."
_TRAIN = "PEFT cannot merge it either: train a plain LoRA adapter."
_CONVERT = "Save it as plain LoRA with PEFT (save_pretrained with path_initial_model_for_weight_conversion)"

Off = Literal[False]
Empty = Annotated[list[Any] | dict[str, Any], Field(max_length=0)]
Lowered = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)


class _History(BaseModel):
    """Settings of how an adapter was trained, and of what `PeftConfig` refuses: they change nothing in what is read."""

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
    loftq_config: dict[str, Any] | None = None
    eva_config: dict[str, Any] | None = None
    corda_config: dict[str, Any] | None = None
    lora_ga_config: dict[str, Any] | None = None


class PeftConfig(_History):
    """Each key that PEFT 0.21 writes of LoRA, and the values by which the adapter is scale · B A and no more."""

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    r: int = Field(ge=1, lt=1 << 31)
    lora_alpha: float = Field(gt=0)

    # Which matrices have a pair. The tensors say it too; they are compared.
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: Literal["layers"] | list[Literal["layers"]] | None = None
    target_parameters: Empty | None = None

    # What the base was made into before training. The names that are left begin with the base as it is.
    init_lora_weights: Annotated[bool | Literal["gaussian", "orthogonal", "eva", "mica"], Lowered] = True

    # What else would be added, scaled or trained.
    use_rslora: Off = False
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
        """Return whether PEFT puts a pair beside a matrix. What a pattern (a text) names, the tensors show."""
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
"""What is expected of a key, and the remedy where it is something else. Of the others: plain LoRA, and `MERGE`."""


def read_peft_config(directory: Path, key: str) -> PeftConfig:
    """Read the adapter_config.json of a directory; messages speak of the directory as `key`.

    Raises:
        UserError: it is not the file of a plain LoRA adapter.
    """
    path = directory / CONFIG
    values = read_json(path, key, f"the {CONFIG} of PEFT", _RESTORE)
    given = {name: value for name, value in values.items() if value is not None}  # null: not set
    try:
        return PeftConfig.model_validate(given)
    except ValidationError as error:
        raise _refusal(key, path, str(error.errors()[0]["loc"][0]), given) from None


def _refusal(key: str, path: Path, name: str, given: dict[str, Any]) -> UserError:
    if name not in given:
        return user_error(key, found=f"no {name} in {path}", expected=f"the {CONFIG} of PEFT", remedy=_RESTORE)
    value = given[name]
    expected, remedy = _OTHERWISE.get(name, ("plain LoRA, without it", MERGE))
    if name not in PeftConfig.model_fields:
        expected, remedy = (
            "keys that PEFT 0.21 writes",
            f"If it changes what the adapter computes: {MERGE} Else remove it.",
        )
    elif name == "init_lora_weights":
        expected = "true, false, gaussian, orthogonal, eva or mica, which leave the weights below as they are"
        remedy = _of_changed_base(str(value).lower())
    elif name == "use_rslora" and value is True:
        remedy = _without_rslora(given.get("r"), given.get("lora_alpha"))
    return user_error(key, found=f"{name}={shown(value, 80)} in {path}", expected=expected, remedy=remedy)


def _of_changed_base(name: str) -> str:
    """The remedy for an initialization that changed the weights, which PEFT repeats for some of them when it merges."""
    if name in ("pissa", "olora"):
        return f"{_CONVERT}, or merge it into its model (merge_and_unload), and start from that model."
    return f"{_CONVERT}." if name in ("corda", "lora_ga") or name.startswith("pissa") else MERGE


def _without_rslora(rank: object, alpha: object) -> str:
    """The remedy for a scale of alpha / sqrt(r): the same one as alpha / r."""
    try:
        plain = float(alpha) * math.sqrt(rank)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return _RESTORE
    return f"Write use_rslora: false and lora_alpha: {plain}, which is the same adapter."

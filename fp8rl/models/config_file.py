"""Reads typed values of a Hugging Face `config.json`, and refuses a wrong value by its key and the expected value."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from fp8rl.models.tensors import FP8_BLOCK
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.reading import read_json
from fp8rl.numerics.ops.rope import Llama3, Scaling, Yarn

T = TypeVar("T")

LARGEST = 1 << 31
"""Sizes must be below this number. A larger one would cause endless work before the tensors show that it is wrong."""
_UNSET: Any = object()
_BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
_ROPE_PLACES = ("rope_parameters", "rope_scaling")
"""Keys that describe the rotation. transformers writes the first; the second, in older files, overrides it."""
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SCALING_KEYS = {
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    | {"truncate"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}
_MROPE_KEYS = {"mrope_section", "mrope_interleaved"}
"""Keys for channels that are rotated by positions in a picture. In a text all channels have the same position."""


class ConfigFile:
    """Reads one config.json. Messages call the model's directory `key`. Every method raises UserError for a value that
    is missing or wrong."""

    def __init__(self, values: Mapping[str, Any], path: Path, key: str) -> None:
        self._values, self._path, self._key = values, path, key

    @classmethod
    def read(cls, directory: Path, key: str) -> ConfigFile:
        path = directory / "config.json"
        if not path.is_file():
            expected = "a Hugging Face model directory with config.json"
            remedy = "Give the directory of a model, with config.json and safetensors weights."
            raise user_error(key, f"{directory} without config.json", expected, remedy)
        return cls(read_json(path, key, "a Hugging Face config.json"), path, key)

    def inner(self, name: str, with_keys: Collection[str]) -> ConfigFile:
        """Return the configuration of an inner model: the value of `name`, and the keys `with_keys` of the whole file.
        A key that occurs in both must have the same value in both."""
        values = self._values.get(name)
        if not isinstance(values, dict):
            raise self.refusal(name, values, "the configuration of the text model, a JSON object")
        shared = {key: self._values[key] for key in with_keys if self._values.get(key) is not None}
        for key, value in shared.items():
            if values.get(key) not in (None, value):
                raise self.refusal(f"{name}.{key}", values[key], f"{value}, as beside {name}", "Make them equal.")
        return ConfigFile(values | shared, Path(f"{name} of {self._path}"), self._key)

    @property
    def values(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return dict(self._values)

    def refusal(self, name: str, found: object, expected: str, remedy: str = "Restore the file.") -> UserError:
        return user_error(f"{self._key}: {name} in {self._path}", found=found, expected=expected, remedy=remedy)

    def architecture(self, known: str) -> str:
        """Return the first of `architectures`. known: the expected values, for the error message."""
        found = self._values.get("architectures")
        name = found[0] if isinstance(found, list) and found else found
        if not isinstance(name, str):
            raise self.refusal("architectures", name, known)
        return name

    def model_type(self) -> str:
        """Return the value of `model_type`, or "" if the file has none."""
        found = self._values.get("model_type")
        return found if isinstance(found, str) else ""

    def expect(self, name: str, value: str, reason: str) -> None:
        """Refuse a value of the key `name` other than `value`. reason: why, for the error message."""
        if self._values.get(name) != value:
            raise self.refusal(name, self._values.get(name), f"{value!r}, {reason}")

    def refuse_unknown_alias(self, usual: str) -> None:
        """Refuse an alias of the `model_type` `usual` that the installed transformers does not know."""
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        found = self.model_type()
        if found not in CONFIG_MAPPING_NAMES:
            expected = f"{usual!r}: transformers {transformers.__version__} does not know {found!r}"
            raise self.refusal("model_type", found, expected, f"Write {usual!r}, which computes the same.")

    def refuse_quantized(self) -> None:
        """Refuse weights that are neither BF16 nor FP8 with a scale for each block of 128 x 128. `fmt` is optional."""
        for name in ("quantization_config", "compression_config"):
            found = self._values.get(name)
            if found is not None and not (
                isinstance(found, dict) and _BLOCK_FP8.items() <= ({"fmt": "e4m3"} | found).items()
            ):
                expected = f"none if weights are in BF16, or FP8 in blocks: {_BLOCK_FP8}"
                raise self.refusal(name, found, expected, "Use the BF16 checkpoint of this model.")

    def refuse_variants(
        self,
        expected: Mapping[str, Any],
        rotary_part: bool = False,
        scaled: bool = False,
        layers: Collection[str] = ("full_attention",),
        mrope: bool = False,
    ) -> None:
        """Refuse what is not supported: a key with another value than in `expected`, a kind of layer that
        is not in `layers` (such as a window of attention), and scaled rotary embeddings.

        rotary_part: allow that only a part of a head is rotated. scaled: leave the check of the scaling to
        `rope_scaling`. mrope: allow keys of the rotation that matter only for pictures."""
        for name, value in {"use_sliding_window": False, **expected}.items():
            found = self._values.get(name)
            if found is not None and found != value:
                raise self._variant(name, found, repr(value))
        kinds = self._values.get("layer_types")
        if kinds is not None and not (isinstance(kinds, list) and all(kind in layers for kind in kinds)):
            raise self._variant("layer_types", kinds, f"{' or '.join(map(repr, layers))} in every layer")
        for name in () if scaled else _ROPE_PLACES:
            self._scaling_at(name, None, _MROPE_KEYS if mrope else set())
        for place, part in () if rotary_part else self._stated("partial_rotary_factor").items():
            if part != 1:
                raise self._variant(place, part, "1")

    def refuse_unfixed(self, model: str, **values: tuple[float, float]) -> None:
        """Refuse values other than those that SGLang's code of a model fixes. values: (found, fixed) by key."""
        for name, (found, fixed) in values.items():
            if found != fixed:
                remedy = f"Use another model: SGLang computes {model} with this value only."
                raise self.refusal(name, found, f"{fixed:g}", remedy)

    def _rope(self, name: str) -> dict[str, Any]:
        """Return the description of the rotation under the key `name`; an empty one if it is null or missing."""
        rope = self._values.get(name)
        if not isinstance(rope, dict | None):
            raise self._variant(name, rope, "a JSON object or null")
        return rope or {}

    def rope_scaling(self, known: Literal["yarn", "llama3"]) -> Scaling | None:
        """Return the method that lengthened the context, or None. All places of the config must agree on it. known: the
        one method that is accepted."""
        found = {name: self._scaling_at(name, known) for name in _ROPE_PLACES if self._values.get(name) is not None}
        return self._agreed("rope_scaling", found, "one scaling in all places")

    def _scaling_at(self, name: str, known: str | None, unused: Collection[str] = ()) -> Scaling | None:
        """Return the scaling that the key `name` describes. known: the accepted method, if any. unused: further keys
        that may be there."""
        rope = self._rope(name)
        named = {key: str(rope[key]) for key in ("rope_type", "type") if rope.get(key)}
        kind = self._agreed(f"{name}.rope_type", named, "one method") or "default"
        if kind not in ("default", known):
            expected = "'default'" if known is None else f"'default' or {known!r}"
            raise self._variant(f"{name}.rope_type", kind, expected)
        for key in rope.keys() - _ROPE_KEYS - _SCALING_KEYS.get(kind, set()) - set(unused):
            if rope[key] is not None:
                raise self._variant(f"{name}.{key}", rope[key], "no such key")
        if kind == "default":
            return None

        def number(key: str, default: float | None = None) -> float:
            return self._positive(f"{name}.{key}", rope.get(key, default))

        if known == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if low >= high:
                raise self._variant(f"{name}.low_freq_factor", low, f"less than high_freq_factor = {high:g}")
            original = int(number("original_max_position_embeddings"))
            return Llama3(factor=number("factor"), original=original, low=low, high=high)
        if rope.get("truncate", True) is not True:
            raise self._variant(f"{name}.truncate", rope["truncate"], "true")
        mscale = number("mscale_all_dim")
        if number("mscale") != mscale:
            raise self._variant(f"{name}.mscale", rope["mscale"], f"mscale_all_dim = {mscale:g}")
        return Yarn(
            factor=number("factor"),
            original=int(number("original_max_position_embeddings")),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            mscale=mscale,
        )

    def _stated(self, key: str) -> dict[str, float]:
        """Return the positive number that the config has for `key`, in each place where it has one."""
        places = {key: self._values, **{f"{name}.{key}": self._rope(name) for name in _ROPE_PLACES}}
        return {at: self._positive(at, values[key]) for at, values in places.items() if values.get(key) is not None}

    def rope_theta(self, default: float = 10000.0) -> float:
        """Return the base of the rotation, or transformers' default. All places of the config must agree."""
        return self._agreed("rope_theta", self._stated("rope_theta"), "one value in all places") or default

    def rotary_dim(self, head_dim: int, default: float) -> int:
        """Return how many channels of a head are rotated, from `partial_rotary_factor` in any place of the config."""
        name = "partial_rotary_factor"
        found = self._stated(name)
        parts = set(found.values()) or {default}
        size = head_dim * max(parts)
        if len(parts) > 1 or not 2 <= size <= head_dim or int(size) % 2:
            raise self.refusal(name, found, f"one value, which gives an even number of the {head_dim} channels")
        return int(size)

    def dense_layers(self, default: int) -> int:
        """Return how many leading layers are dense by the list `mlp_layer_types`; all others must be sparse. Without
        the list return the default."""
        kinds = self._values.get("mlp_layer_types")
        if kinds is None:
            return default
        count = kinds.count("dense") if isinstance(kinds, list) else 0
        if not isinstance(kinds, list) or kinds != ["dense"] * count + ["sparse"] * (len(kinds) - count) or not count:
            raise self._variant("mlp_layer_types", kinds, "'dense' in the first layers and 'sparse' in all others")
        return count

    def interval(self, name: str, kinds: str, other: str, one: str, layers: int, default: int) -> int:
        """Return N if each Nth layer is `one` and all others are `other`. N is the value of the key `name`, or follows
        from the list under the key `kinds`, or is the default if there is neither."""
        found, listed = self._values.get(name), self._values.get(kinds)
        if listed is None:
            return self.size(name, default=default, if_null=default)
        every = listed.index(one) + 1 if one in listed else layers + 1
        regular = [other if (layer + 1) % every else one for layer in range(layers)]
        if listed != regular:
            raise self._variant(kinds, listed, f"{one!r} in every Nth of {layers} layers, {other!r} in all others")
        if found is not None and found != every:
            raise self.refusal(name, found, f"{every}, as {kinds} has it", "Make them equal.")
        return every

    def one_of(self, *names: str) -> int:
        """Return a size that config.json may have under several keys, which must agree."""
        sizes = {name: self.size(name) for name in names if self._values.get(name) is not None}
        return self._agreed(names[0], sizes, "one value in both spellings") or self.size(names[0])

    def _agreed(self, name: str, found: Mapping[str, T], expected: str) -> T | None:
        """Return the value that all places of `found` have; None: there is no place. name, expected: for a refusal."""
        if len(set(found.values())) > 1:
            raise self.refusal(name, found, expected, "Make them equal.")
        return next(iter(found.values()), None)

    def size(self, name: str, default: int | None = None, if_null: Any = _UNSET) -> int:
        if name not in self._values and default is not None:
            return default
        value = self._values.get(name)
        if value is None and if_null is not _UNSET:
            return int(if_null)
        if name not in self._values:
            raise user_error(f"{self._key}: {self._path}", f"no {name}", "its value", "Restore the file.")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < LARGEST:
            raise self.refusal(name, value, f"a positive integer below {LARGEST}")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """Return a size that may be 0."""
        return 0 if self._values.get(name, default) in (0, None) else self.size(name, default)

    def number(self, name: str, default: float) -> float:
        return self._positive(name, self._values.get(name, default))

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, value, "true or false")
        return value

    def _positive(self, name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refusal(name, value, "a positive number")
        return float(value)

    def _variant(self, name: str, found: object, expected: str) -> UserError:
        remedy = "Use a model without this variant; the shared ops do not define it."
        return self.refusal(name, found, expected, remedy)

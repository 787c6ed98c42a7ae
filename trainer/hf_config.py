"""A Hugging Face Qwen3 or Qwen3-MoE `config.json`: its numbers, or why the shared ops do not define the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numerics.errors import UserError, user_error

MODEL_TYPES = {"Qwen3MoeForCausalLM": "qwen3_moe", "Qwen3ForCausalLM": "qwen3"}
"""Architecture to model_type."""
_UNSET: Any = object()
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a Qwen3 architecture that trainer and engine need.

    Attributes:
        ffn_size: width of the dense MLP, or of one expert.
        experts, top_k: 0 for a dense model; otherwise every layer has routed experts.
        renormalize: the top-k router probabilities are scaled to sum to one.
        tied: the embedding is also the output projection.
    """

    model_type: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    experts: int = 0
    top_k: int = 0
    renormalize: bool = True

    @property
    def moe(self) -> bool:
        return self.experts > 0


def read_shape(model_path: Path, key: str = "model.path") -> ModelShape:
    """Read `config.json` in `model_path`; messages speak of it as `key`.

    Absent keys have the defaults of transformers' Qwen3Config and Qwen3MoeConfig.

    Raises:
        UserError: no readable config, another architecture, or a variant of it that the shared ops do not define.
    """
    config = _Config.read(Path(model_path), key)
    moe = config.model_type() == "qwen3_moe"
    config.refuse_quantized()
    config.refuse_variants()
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    experts = config.experts() if moe else 0
    shape = ModelShape(
        model_type=config.model_type(),
        layers=config.size("num_hidden_layers"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", default=4 if moe else 32, if_null=_UNSET if moe else heads),
        head_dim=config.size("head_dim", default=max(1, hidden // heads) if moe else 128),
        ffn_size=config.size("moe_intermediate_size" if moe else "intermediate_size"),
        vocab_size=config.size("vocab_size"),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope_theta=config.rope_theta(),
        max_positions=config.size("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        experts=experts,
        top_k=config.size("num_experts_per_tok") if moe else 0,
        renormalize=config.flag("norm_topk_prob", default=False) if moe else True,
    )
    if shape.heads % shape.kv_heads:
        raise config.refusal("num_key_value_heads", shape.kv_heads, f"a divisor of num_attention_heads = {shape.heads}")
    if shape.head_dim % 2:
        raise config.refusal("head_dim", shape.head_dim, "an even number: rotary embeddings turn pairs")
    if shape.top_k > shape.experts:
        raise config.refusal("num_experts_per_tok", shape.top_k, f"at most num_experts = {shape.experts}")
    return shape


class _Config:
    """One config.json; every reading names the key, the value found and the value expected when it refuses."""

    def __init__(self, values: Mapping[str, Any], path: Path, key: str) -> None:
        self._values, self._path, self._key = values, path, key

    @classmethod
    def read(cls, directory: Path, key: str) -> _Config:
        path = directory / "config.json"
        if not path.is_file():
            raise user_error(
                key,
                found=f"{directory} without config.json",
                expected="a Hugging Face model directory with config.json",
                remedy="Give the directory of a Qwen3 or Qwen3-MoE model, with config.json and safetensors weights.",
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise user_error(
                f"{key}: {path}", found=str(error), expected="valid JSON", remedy="Restore the file."
            ) from error
        if not isinstance(values, dict):
            raise user_error(f"{key}: {path}", found=values, expected="a JSON object", remedy="Restore the file.")
        return cls(values, path, key)

    def refusal(self, name: str, found: object, expected: str, remedy: str = "Restore the file.") -> UserError:
        return user_error(f"{self._key}: {name} in {self._path}", found=found, expected=expected, remedy=remedy)

    def model_type(self) -> str:
        found = self._values.get("architectures")
        architecture = found[0] if isinstance(found, list) and found else found
        if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
            remedy = "Choose a Qwen3 or Qwen3-MoE model."
            raise self.refusal("architectures", architecture, " or ".join(MODEL_TYPES), remedy)
        expected = MODEL_TYPES[architecture]
        if self._values.get("model_type") != expected:
            raise self.refusal("model_type", self._values.get("model_type"), f"{expected!r}, as for {architecture}")
        return expected

    def refuse_quantized(self) -> None:
        for name in ("quantization_config", "compression_config"):
            if self._values.get(name) is not None:
                raise self.refusal(
                    name, self._values[name], "none: the weights are BF16", "Use the BF16 checkpoint of this model."
                )

    def refuse_variants(self) -> None:
        """Refuse what the shared ops do not define."""
        required: dict[str, Any] = {
            "hidden_act": "silu",
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "partial_rotary_factor": 1,
        }
        for name, expected in required.items():
            found = self._values.get(name)
            if found is not None and found != expected:
                raise self._variant(name, found, repr(expected))
        layers = self._values.get("layer_types")
        if layers is not None and not (isinstance(layers, list) and all(kind == "full_attention" for kind in layers)):
            raise self._variant("layer_types", layers, "'full_attention' in every layer")
        # transformers writes the first and lets the second, of older files, win over it.
        for name in ("rope_parameters", "rope_scaling"):
            self._refuse_scaled_rope(name)

    def _refuse_scaled_rope(self, name: str) -> None:
        rope = self._values.get(name)
        if rope is None:
            return
        if not isinstance(rope, dict):
            raise self._variant(name, rope, "a JSON object or null")
        for key, expected in (("rope_type", "default"), ("type", "default"), ("partial_rotary_factor", 1)):
            if rope.get(key) is not None and rope[key] != expected:
                raise self._variant(f"{name}.{key}", rope[key], repr(expected))
        for key in rope.keys() - _ROPE_KEYS:
            if rope[key] is not None:
                raise self._variant(f"{name}.{key}", rope[key], "no such key: plain rotary embeddings")

    def rope_theta(self) -> float:
        """The one base that every place of the config gives, or transformers' default."""
        found: dict[str, float] = {}
        for name in ("rope_scaling", "rope_parameters"):
            rope = self._values.get(name) or {}
            if rope.get("rope_theta") is not None:
                found[f"{name}.rope_theta"] = self._positive(f"{name}.rope_theta", rope["rope_theta"])
        if self._values.get("rope_theta") is not None:
            found["rope_theta"] = self.number("rope_theta", default=0.0)
        if len(set(found.values())) > 1:
            raise self.refusal("rope_theta", found, "one value in all places", "Make them equal.")
        return next(iter(found.values()), 10000.0)

    def experts(self) -> int:
        """transformers 5 writes `num_local_experts`, older ones `num_experts`."""
        names = [name for name in ("num_experts", "num_local_experts") if self._values.get(name) is not None]
        sizes = {name: self.size(name) for name in names or ["num_experts"]}
        if len(set(sizes.values())) > 1:
            raise self.refusal("num_experts", sizes, "one value in both spellings", "Make them equal.")
        return next(iter(sizes.values()))

    def size(self, name: str, default: int | None = None, if_null: Any = _UNSET) -> int:
        if name not in self._values and default is not None:
            return default
        value = self._values.get(name)
        if value is None and if_null is not _UNSET:
            return int(if_null)
        if name not in self._values:
            raise user_error(
                f"{self._key}: {self._path}", found=f"no {name}", expected="its value", remedy="Restore the file."
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(name, value, "a positive integer")
        return value

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

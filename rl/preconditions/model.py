"""The model directory, and whether its dimensions suit the parallel layout and the quantization blocks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from numerics.errors import user_error
from numerics.spec import QuantSpec
from rl.spec import ExperimentSpec
from trainer.config import TrainerConfig

ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class ModelShape:
    """What config.json says of the model; `experts` and `moe_intermediate` are 0 for a dense model."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    intermediate: int
    """Width of the dense MLP; 0 if every layer has experts."""
    experts: int
    experts_per_token: int
    moe_intermediate: int

    @property
    def is_moe(self) -> bool:
        return self.experts > 0


def read_model(path: str | Path) -> ModelShape:
    """Read config.json of the Hugging Face directory `path` and look into its weights and tokenizer.

    Raises:
        UserError: the directory, its config, weights or tokenizer are missing, broken or of another architecture.
    """
    path = Path(path)
    if not path.is_dir():
        raise user_error(
            "model.path",
            found=str(path),
            expected="an existing Hugging Face model directory",
            remedy="Correct the path; a relative one is looked up in the current directory, then beside the spec file. "
            "`python -m rl.tiny_model --out DIR` writes a small model.",
        )
    config = _read_json(path / "config.json")
    architectures = config.get("architectures") or [None]
    if architectures[0] not in ARCHITECTURES:
        raise user_error(
            f"model.path: architectures in {path / 'config.json'}",
            found=architectures[0],
            expected=" or ".join(ARCHITECTURES),
            remedy="Choose a Qwen3 or Qwen3-MoE model.",
        )
    _check_weights(path)
    if not (path / "tokenizer.json").is_file():
        raise user_error(
            "model.path",
            found=f"{path} without tokenizer.json",
            expected="a fast tokenizer beside the weights",
            remedy="Copy the tokenizer files of the model into the directory.",
        )
    return _shape(config, path / "config.json")


def check_layout(model: ModelShape, trainer: TrainerConfig) -> None:
    """Whether the model splits into tp, pp, ep and dp parts.

    Raises:
        UserError: it does not.
    """
    if trainer.pp > 1:
        raise user_error(
            "trainer.pp",
            found=trainer.pp,
            expected="1: pipeline parallelism is not in this release",
            remedy="Set trainer.pp=1 and use trainer.tp, trainer.ep or trainer.dp.",
        )
    split = {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "vocab_size": model.vocab}
    for name, size in split.items():
        _require_divisor("trainer.tp", trainer.tp, name, size)
    if trainer.ep > 1 and not model.is_moe:
        raise user_error(
            "trainer.ep",
            found=trainer.ep,
            expected="1 for a dense model",
            remedy="Set trainer.ep=1, or choose a mixture of experts.",
        )
    if model.is_moe:
        _require_divisor("trainer.ep", trainer.ep, "num_experts", model.experts)
    if (trainer.tp * trainer.dp) % trainer.ep:
        raise user_error(
            "trainer.ep",
            found=trainer.ep,
            expected=f"a divisor of tp * dp = {trainer.tp} * {trainer.dp}, whose ranks the experts are spread over",
            remedy=f"Set trainer.dp={trainer.ep} or another multiple, or lower trainer.ep.",
        )


def check_quantization_blocks(model: ModelShape, spec: ExperimentSpec) -> None:
    """Whether every quantized matrix splits into whole blocks per tensor-parallel rank.

    A block that straddles two fused pieces (q|k|v, gate|up) or two ranks would hold other bytes in the engine than in
    the trainer. Experts are never split by tp.

    Raises:
        UserError: a dimension is no multiple of the block.
    """
    if not spec.numerics.quantizes:
        return
    tp, block = spec.trainer.tp, _block(spec.numerics.quant_spec())
    pieces: dict[str, float] = {"hidden_size": model.hidden, "head_dim": model.head_dim}
    if model.is_moe:
        pieces["moe_intermediate_size"] = model.moe_intermediate
    if model.intermediate:
        pieces["intermediate_size" + (f" / trainer.tp = {model.intermediate} / {tp}" if tp > 1 else "")] = (
            model.intermediate / tp
        )
    for name, size in pieces.items():
        if size % block:
            raise user_error(
                f"model.path: {name}",
                found=int(size) if size == int(size) else size,
                expected=f"a multiple of {block}, the quantization block of {spec.numerics.preset}",
                remedy="Choose a model with aligned dimensions, lower trainer.tp, or run both sides in BF16 "
                "(numerics.preset=bf16 numerics.trainer=bf16 numerics.rollout=bf16).",
            )


def _block(quant: QuantSpec) -> int:
    """The smallest number of elements that holds whole blocks of every role."""
    roles = (quant.weight, quant.activation, quant.gradient)
    return math.lcm(*(role.group for role in roles if role.quantized and role.granularity in ("block", "token_group")))


def _require_divisor(key: str, parts: int, name: str, size: int) -> None:
    if size % parts:
        raise user_error(
            key,
            found=parts,
            expected=f"a divisor of the model's {name} = {size}",
            remedy=f"Set {key} to a divisor of {size}.",
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise user_error(
            "model.path",
            found=f"{path.parent} without {path.name}",
            expected=f"a Hugging Face model directory with {path.name}",
            remedy="Give the directory that holds config.json and the safetensors weights.",
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise user_error(
            f"model.path: {path}", found=str(error), expected="valid JSON", remedy="Restore the file."
        ) from error
    if not isinstance(value, dict):
        raise user_error(f"model.path: {path}", found=value, expected="a JSON object", remedy="Restore the file.")
    return value


def _check_weights(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({path / name for name in _read_json(index).get("weight_map", {}).values()})
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise user_error(
            "model.path",
            found=f"{path} without *.safetensors",
            expected="safetensors weights",
            remedy="Convert the weights to safetensors; pickled weights are not read.",
        )
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise user_error(
                f"model.path: {file}",
                found=str(error),
                expected="a whole safetensors file",
                remedy="Copy the file again.",
            ) from error


def _shape(config: dict[str, Any], path: Path) -> ModelShape:
    def size(*names: str, default: int | None = None) -> int:
        """The first of `names` (spellings of different transformers versions) that the config gives."""
        for name in names:
            if config.get(name) is not None:
                value = config[name]
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise user_error(
                        f"model.path: {names[0]} in {path}",
                        found=value,
                        expected="a positive integer",
                        remedy="Restore the file.",
                    )
                return value
        if default is None:
            raise user_error(
                f"model.path: {path}", found=f"no {names[0]}", expected="its value", remedy="Restore the file."
            )
        return default

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    moe = config["architectures"][0] == "Qwen3MoeForCausalLM"
    has_dense_layers = not moe or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    return ModelShape(
        architecture=config["architectures"][0],
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=max(1, hidden // heads)),
        vocab=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        intermediate=size("intermediate_size") if has_dense_layers else 0,
        experts=size("num_experts", "num_local_experts") if moe else 0,
        experts_per_token=size("num_experts_per_tok") if moe else 0,
        moe_intermediate=size("moe_intermediate_size") if moe else 0,
    )

"""The tensors of a model directory against its config.json, by the headers of the files: names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from numerics.errors import UserError, user_error
from rl.experiment.preconditions.model import weight_files
from trainer.hf_config import ModelShape

_SPARE = ("rotary_emb.inv_freq",)
"""Endings of names that older files have and nothing reads."""


def check_tensors(path: str | Path, model: ModelShape, key: str = "model.path") -> None:
    """Whether the directory holds the tensors of `model`, no more and no less, in its shapes.

    Raises:
        UserError: the weights of another architecture; the message names the first tensor.
    """
    expected = dict(tensors_of(model))
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(Path(path), key):
        with safe_open(file, framework="pt") as stored:
            found |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}
    for name, shape in expected.items():
        if name not in found:
            raise _refusal(key, name, "no such tensor", f"one of shape {list(shape)}")
        if found[name] != shape:
            raise _refusal(key, name, f"shape {list(found[name])}", f"{list(shape)}")
    spare = {"lm_head.weight"} if model.tied else set()
    for name in sorted(found.keys() - expected.keys() - spare):
        if not name.endswith(_SPARE):
            raise _refusal(key, name, f"a tensor of shape {list(found[name])}", "no such tensor")


def tensors_of(model: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(HF name, shape) of every tensor of a Qwen3 or Qwen3-MoE checkpoint."""
    hidden, queries, keys = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "model.embed_tokens.weight", (model.vocab_size, hidden)
    for index in range(model.layers):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (queries, hidden)
        yield layer + "self_attn.k_proj.weight", (keys, hidden)
        yield layer + "self_attn.v_proj.weight", (keys, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, queries)
        yield layer + "self_attn.q_norm.weight", (model.head_dim,)
        yield layer + "self_attn.k_norm.weight", (model.head_dim,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        if model.moe:
            yield layer + "mlp.gate.weight", (model.experts, hidden)
        for mlp in [f"mlp.experts.{expert}." for expert in range(model.experts)] or ["mlp."]:
            yield layer + mlp + "gate_proj.weight", (model.ffn_size, hidden)
            yield layer + mlp + "up_proj.weight", (model.ffn_size, hidden)
            yield layer + mlp + "down_proj.weight", (hidden, model.ffn_size)
    yield "model.norm.weight", (hidden,)
    if not model.tied:
        yield "lm_head.weight", (model.vocab_size, hidden)


def _refusal(key: str, name: str, found: str, expected: str) -> UserError:
    return user_error(
        f"{key}: {name}",
        found=found,
        expected=f"{expected}, as config.json describes the model",
        remedy="The weights are those of another architecture: put the config.json and the weights of one model into "
        "the directory.",
    )

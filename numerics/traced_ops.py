"""The ops of one forward pass of a Qwen3 or Qwen3-MoE model, by the names that both sides record them under.

A recording is a flat mapping from `key(where, tensor)` to tensors whose first axis is the tokens [T] of some sequences,
end to end. `where` is an op, in a layer or outside. The trainer records what went into each of its ops and what came
out; the engine puts the same inputs through its own ops. The inputs of each op, and its output `out`:

    embed        tokens int64 [T]                     -> [T, H]
    input_norm   x, residual [T, H]                   -> normed and sum, [T, 2, H]; the first layer has no residual
    qkv          x [T, H]                             -> q, k and v end to end [T, (heads + 2 kv heads) * D]
    q_norm       x [T, heads, D]                      -> [T, heads, D]
    k_norm       x [T, kv heads, D]                   -> [T, kv heads, D]
    rope         q [T, heads, D], k [T, kv heads, D]  -> both [T, heads + kv heads, D]
    attention    q, k, v                              -> [T, heads * D]
    o_proj       x [T, heads * D]                     -> [T, H]
    post_norm    x, residual [T, H]                   -> normed and sum [T, 2, H]
    router       x [T, H]                             -> logits [T, E]
    topk         logits [T, E]                        -> probabilities FP32 [T, E], 0 for experts not chosen
    experts      x [T, H], probs [T, E], chosen int64 [T, k] -> [T, H]; and `each` [T, k, H], one expert's share of it
    gate_up      x [T, H]                             -> [T, 2F]
    swiglu       x [T, 2F]                            -> [T, F]
    down         x [T, F]                             -> [T, H]
    final_norm   x, residual [T, H]                   -> normed and sum [T, 2, H]
    lm_head      x [T, H]                             -> logits [T, V]
    logprobs     logits [T, V]                        -> FP32 [T], of the sequence's next token

Besides: `lengths` int64 [sequences], and `targets` int64 [T], each token's next one (0 behind a sequence's last).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

ATTENTION_OPS = ("input_norm", "qkv", "q_norm", "k_norm", "rope", "attention", "o_proj", "post_norm")
MOE_OPS = ("router", "topk", "experts")
DENSE_OPS = ("gate_up", "swiglu", "down")
LAST_OPS = ("final_norm", "lm_head", "logprobs")

Place = tuple[int | None, str]
"""Layer (None outside the layers) and op."""


@dataclass(frozen=True)
class OpTrace:
    """A recording of the trainer's ops.

    tensors: as described above. settings: constants of the ops, such as `rope_theta`.
    """

    tensors: dict[str, torch.Tensor]
    settings: dict[str, float]


def places(layers: int, moe: bool) -> list[Place]:
    """Every op of a model in the order of its forward pass."""
    inside = ATTENTION_OPS + (MOE_OPS if moe else DENSE_OPS)
    return [
        (None, "embed"),
        *((layer, op) for layer in range(layers) for op in inside),
        *((None, op) for op in LAST_OPS),
    ]


def key(place: Place, tensor: str) -> str:
    """`layers.1.qkv:x`, `lm_head:out`"""
    layer, op = place
    return f"{op}:{tensor}" if layer is None else f"layers.{layer}.{op}:{tensor}"


def inputs_of(record: Mapping[str, torch.Tensor], place: Place) -> dict[str, torch.Tensor]:
    """The inputs of one op, by name."""
    prefix = key(place, "")
    outputs = {prefix + "out", prefix + "each"}
    return {k.removeprefix(prefix): t for k, t in record.items() if k.startswith(prefix) and k not in outputs}


def places_in(record: Mapping[str, torch.Tensor]) -> list[Place]:
    """The ops of a recording in the order of the forward pass."""
    names = {k.removesuffix(":out") for k in record if k.endswith(":out")}
    layers = sum(name.endswith(".qkv") for name in names)
    return places(layers, moe="layers.0.experts" in names)

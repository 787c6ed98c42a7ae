"""Weights in the engine that are not the trainer's, by digest, and which op each belongs to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from numerics.names import SCALE_SUFFIX
from numerics.spec import QuantSpec
from weight_sync.manifest import Manifest
from weight_sync.quantized import manifest_of

if TYPE_CHECKING:
    from trainer.trainer import Trainer  # megatron is for the ranks, not for the driver

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.\w+_proj\.weight")
_IN_LAYER = {
    "input_layernorm.weight": "input_norm",
    "self_attn.q_proj.weight": "qkv",
    "self_attn.k_proj.weight": "qkv",
    "self_attn.v_proj.weight": "qkv",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "self_attn.o_proj.weight": "o_proj",
    "post_attention_layernorm.weight": "post_norm",
    "mlp.gate.weight": "router",
    "mlp.gate_proj.weight": "gate_up",
    "mlp.up_proj.weight": "gate_up",
    "mlp.down_proj.weight": "down",
}
_OUTSIDE = {"model.embed_tokens.weight": "embed", "model.norm.weight": "final_norm", "lm_head.weight": "lm_head"}

Owner = tuple[int | None, str, int | None]
"""Layer, op and expert."""


def expected_manifest(trainer: Trainer, spec: QuantSpec) -> Manifest | None:
    """What an engine that serves `spec` must hold at the trainer's version; on rank 0, and every rank must call it."""
    manifest = manifest_of(trainer.export_weights(), spec, trainer.shape.layers, str(trainer.weight_version))
    return manifest if trainer.layout.rank == 0 else None


def owner(name: str) -> Owner:
    """The op that a tensor of the HF checkpoint, or its scales, is a weight of."""
    name = name.removesuffix(SCALE_SUFFIX)
    inside = _LAYER.fullmatch(name)
    if inside is None:
        return None, _OUTSIDE[name], None
    if expert := _EXPERT.fullmatch(inside[2]):
        return int(inside[1]), "experts", int(expert[1])
    return int(inside[1]), _IN_LAYER[inside[2]], None


def uncommitted(expected: Manifest, found: dict[str, str]) -> bool:
    """Whether the engine's last update was never committed: nothing stands for its quantized weights then."""
    return any("@" in digest and "@" not in found.get(name, "@") for name, digest in expected.entries.items())

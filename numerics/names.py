"""Exact names: the layer and the module kind that a tensor of a Qwen3 or Qwen3-MoE checkpoint belongs to."""

from __future__ import annotations

import re

SCALE_SUFFIX = "_scale_inv"
"""What the name of a quantized weight is followed by in the name of its scales, as in HF checkpoints."""

_LAYER = r"model\.layers\.(\d+)\."
_PATTERNS = (
    (re.compile(_LAYER + r"self_attn\.([qkvo]_proj)\.weight"), ""),
    (re.compile(_LAYER + r"mlp\.((?:gate|up|down)_proj)\.weight"), ""),
    (re.compile(_LAYER + r"mlp\.experts\.\d+\.((?:gate|up|down)_proj)\.weight"), "experts."),
)


def place_of(hf_name: str) -> tuple[int, str] | None:
    """The layer, from 0, and the kind (`numerics.spec.MODULE_KINDS`) whose weight this is.

    None for what no spec quantizes: embeddings, lm_head, norms, router. The whole name must match, so that a router
    (`mlp.gate.weight`) is never taken for a projection.
    """
    for pattern, prefix in _PATTERNS:
        if match := pattern.fullmatch(hf_name):
            return int(match[1]), prefix + match[2]
    return None

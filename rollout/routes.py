"""The experts that an engine sent each token to, as it reports them with an answer."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.errors import EngineError

_BYTES = 4
"""SGLang reports int32."""


@dataclass(frozen=True)
class RouteShape:
    """The sizes of routes: a model's layers, a token's experts in each MoE layer, and leading dense layers."""

    layers: int
    top_k: int
    dense: int = 0


def route_shape(sizes: ModelSizes) -> RouteShape:
    """Return the shape of a model's routes.

    Raises:
        UserError: it is a dense model.
    """
    if not sizes.moe:
        raise UserError(
            "numerics.router_replay: found it on for a dense model, expected off: it has no experts. Set "
            "numerics.router_replay=off, or choose a mixture of experts."
        )
    return RouteShape(sizes.layers, sizes.top_k, sizes.dense_layers)


def parse_routes(meta: dict[str, Any], tokens: int, shape: RouteShape) -> Tensor:
    """Parse an answer's `meta_info` -> int16 [tokens - 1, MoE layers, top_k]; `tokens` are those of prompt and answer.

    The last token was sampled but never computed with, so it has no route. SGLang keeps room for dense layers too.

    Raises:
        EngineError: the answer reports none, or not as many as the tokens need.
    """
    text = meta.get("routed_experts")
    if text is None:
        raise EngineError(f"request {meta['id']}: found no routed experts, expected those of {tokens - 1} tokens")
    data = bytearray(base64.b64decode(text))
    expected = (tokens - 1) * shape.layers * shape.top_k
    if len(data) != expected * _BYTES:
        raise EngineError(
            f"request {meta['id']}: found {len(data) / _BYTES:g} routed experts, expected {expected}, for {tokens - 1} "
            f"tokens in {shape.layers} layers with {shape.top_k} each"
        )
    routes = torch.frombuffer(data, dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)
    return routes.to(torch.int16).view(tokens - 1, shape.layers, shape.top_k)[:, shape.dense :]

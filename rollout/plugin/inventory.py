"""Inventory of one rank of the engine: weights by their names in the checkpoint, what is made of them, and the KV
cache.

What a forward holds for a moment is not in it, nor what SGLang keeps beside: requests, tables of slots, CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.numerics.core.memory import Holding, format_of, holding
from fp8rl.rollout.plugin.weights import ServedWeights

WEIGHTS, SCALES, DERIVED, KV_CACHE = "weights", "scales", "derived", "kv_cache"
"""Kinds of what an engine holds. `derived`: what products multiply with in place of the weights, in further memory."""


def inventory(weights: ServedWeights, runner: Any) -> tuple[Holding, ...]:
    """runner: SGLang's ModelRunner."""
    return (*_weights(weights), *_derived(weights), *_kv_cache(runner.token_to_kv_pool))


def _weights(weights: ServedWeights) -> Iterator[Holding]:
    for name, _, part in weights.tensors():
        yield holding(name, SCALES if name.endswith(SCALE_SUFFIX) else WEIGHTS, part)


def _derived(weights: ServedWeights) -> Iterator[Holding]:
    """An operand may be the weights themselves, as kernels take them."""
    own = {_storage(parameter) for _, parameter, _ in weights.tensors()}
    for name, tensors in weights.operands():
        if made := [tensor for tensor in tensors if _storage(tensor) not in own]:
            yield holding(name, DERIVED, *made)


def _kv_cache(pool: Any) -> Iterator[Holding]:
    """The pool's own dtype: where it is an FP8 one, its buffers are uint8."""
    for kind, layer, buffer in _layers(pool):
        yield Holding(f"{kind} of layer {layer}", KV_CACHE, format_of(pool.dtype), tuple(buffer.shape), buffer.nbytes)


def cache_buffers(pool: Any) -> Iterator[Tensor]:
    """The tensors that hold keys and values."""
    return (buffer for _, _, buffer in _layers(pool))


def _layers(pool: Any) -> Iterator[tuple[str, int, Tensor]]:
    for kind in ("k", "v", "kv"):  # `kv` of latent attention
        for layer, buffer in enumerate(getattr(pool, f"{kind}_buffer", None) or ()):
            yield kind, layer, buffer


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

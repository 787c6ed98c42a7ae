"""Holds the plugin's state in the engine's scheduler process, and makes its report and its inventory of tensors."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.architecture import Role
from fp8rl.models.tensors import SCALE_SUFFIX
from fp8rl.numerics.backend.implementation import Implementation
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.files import code_digest
from fp8rl.numerics.core.memory import Holding, format_of, holding
from fp8rl.numerics.probe import row_variant_ops
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from fp8rl.rollout.engine.protocol import ENGINE_PACKAGES, LIBRARIES, EngineReport


@dataclasses.dataclass
class EngineState:
    """The plugin's state in one process. It is made when SGLang loads the plugin."""

    numerics: NumericsConfig
    role: Role
    weights: ServedWeights = dataclasses.field(init=False)
    """The weights of the model, once it is loaded."""
    adapter: AdapterSection | None = None
    waits: bool = False
    """Whether the engine starts with placeholders for weights, until it maps the shared base."""
    base_name: str | None = None
    """The name by which clients ask for the model without adapters. None: it is not served."""
    architecture: str | None = None
    """The user's file that defines the model's architecture. None: fp8rl has the architecture."""
    hooks: tuple[str, ...] = ()
    implementation: Implementation = "torch"
    row_variant: tuple[str, ...] | None = None
    without_deepgemm: str | None = None
    released: dict[str, list[tuple[torch.UntypedStorage, int]]] = dataclasses.field(default_factory=dict)
    """For each tag of released memory, (storage, bytes) of what the plugin itself freed. SGLang may have freed more."""


_state: EngineState | None = None


def configure(numerics: NumericsConfig, role: Role = "policy", **settings: Any) -> None:
    """Make this process's state. Call this before hooks are installed. settings: more fields of `EngineState`."""
    global _state
    _state = EngineState(numerics, role, **settings)


def state() -> EngineState:
    """Return this process's state. Raises `RuntimeError` if the plugin was not configured."""
    if _state is None:
        raise RuntimeError("fp8rl plugin: not configured in this process, because it started without FP8RL_PLUGIN")
    return _state


def report(runner: Any) -> EngineReport:
    """Return the engine's report for the handshake. runner: SGLang's ModelRunner."""
    current = state()
    exact = current.numerics.mode == "exact"
    if exact and current.row_variant is None:
        current.row_variant = tuple(row_variant_ops(current.weights.device, current.numerics.kv_format))
    return EngineReport(
        role=current.role,
        spec_digest=current.numerics.spec.digest(),
        numerics=current.numerics.to_dict(),
        hooks=tuple(sorted(current.hooks)),
        versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        code=code_digest(ENGINE_PACKAGES, current.architecture),
        weight_version=current.weights.version,
        row_variant_ops=current.row_variant if exact else None,
        implementation=current.implementation,
        without_deepgemm=current.without_deepgemm,
        threads=torch.get_num_threads(),
        dtype=str(runner.dtype).removeprefix("torch."),
        adapter=current.adapter.model_dump(mode="json") if current.adapter else None,
        kv_cache_dtype=str(runner.kv_cache_dtype).removeprefix("torch."),
    )


# The inventory: weights by their names in the checkpoint, what is made of them, and the KV cache.
#
# What a forward holds for a moment is not in it, nor what SGLang keeps beside: requests, tables of slots, CUDA graphs.

WEIGHTS, SCALES, DERIVED, KV_CACHE, STATES = "weights", "scales", "derived", "kv_cache", "states"
"""Kinds of tensors that an engine holds. `derived`: operands of products that take memory in addition to the weights.
`states`: the states of sequences, which linear attention updates with each token."""


def inventory(weights: ServedWeights, runner: Any) -> tuple[Holding, ...]:
    """Return the tensors that a rank holds. runner: SGLang's ModelRunner."""
    views = (pair for stacks in weights.views.values() for stack in stacks.items() for pair in zip(*stack, strict=True))
    found = [holding(name, SCALES if name.endswith(SCALE_SUFFIX) else WEIGHTS, part) for name, part in views]
    storages = {parameter.untyped_storage().data_ptr() for parameter in weights.views}
    for name, tensors in weights.operands():
        # An operand may be the weights themselves, as kernels take them.
        if made := [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in storages]:
            found.append(holding(name, DERIVED, *made))
    kept_in = runner.token_to_kv_pool.dtype
    for name, kind, buffer in cache_buffers(runner):
        # The pool's own dtype: where it is an FP8 one, its buffers are uint8.
        dtype = kept_in if buffer.dtype == torch.uint8 else buffer.dtype
        found.append(Holding(name, kind, format_of(dtype), tuple(buffer.shape), buffer.nbytes))
    return tuple(found)


def cache_buffers(runner: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, kind, tensor) for the tensors in which layers keep past tokens, or states of sequences in FP32."""
    pool = runner.token_to_kv_pool
    # SGLang's pool of states for all layers with linear attention and all slots. None without such layers.
    states = None if getattr(pool, "full_kv_pool", None) is None else pool.mamba_pool.mamba_cache
    # Beside linear attention, a pool of its own has the layers that keep keys.
    keeping, layers = (pool, None) if states is None else (pool.full_kv_pool, pool.full_attention_layer_id_mapping)
    for which in ("k", "v", "kv"):  # `kv` of latent attention
        if buffers := getattr(keeping, f"{which}_buffer", None):
            for layer, buffer in zip(layers or range(len(buffers)), buffers, strict=True):
                yield f"{which} of layer {layer}", KV_CACHE, buffer
    if states is not None:
        yield "rows of short convolutions", KV_CACHE, states.conv[0]
        yield "states of linear attention", STATES, states.temporal

"""Linear attention in the engine: the gated delta rule over SGLang's states, and what SGLang lacks for it on a CPU.

SGLang keeps a state and the last rows of the convolution for each request, in slots of a pool of its own
(`MambaPool`), beside the keys and values of the layers that attend. It clears and copies slots and never looks inside,
so the memory of a slot has our layout. The rule goes token by token, so prefill, chunks and decode leave the same bits
in a slot, and a prefix can be shared wherever SGLang has kept a state: where a chunk of a prefill, a prompt or an
answer ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.families.gated_delta import CONV, DELTA, GATED_NORM, GATES, IN_PROJ
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rollout.engine.plugin.families import OF_ITS_SCHEDULER, EngineFamily, EngineSide, Hook, Probed
from fp8rl.rollout.engine.plugin.families.ends import never
from fp8rl.rollout.engine.plugin.state import state

_NETS = ("models.qwen3_next.Qwen3GatedDeltaNet.forward", "models.qwen3_5.Qwen3_5GatedDeltaNet.forward")
_MADE = {
    "models.qwen3_next.Qwen3GatedDeltaNet.__init__": "config layer_id quant_config alt_stream prefix",
    "models.qwen3_5.Qwen3_5GatedDeltaNet.__init__": "config layer_id quant_config alt_stream prefix",
}
_FROM_KERNELS = "arg_groups.overrides.supports_mamba_cache_extra_buffer"
_PROVIDED = (ops.linear, ops.causal_conv, ops.gated_delta_rule, ops.gated_rms_norm)


def _hooks(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    exact = numerics.mode == "exact"
    made = tuple(Hook(net, "around", in_fp32, parameters) for net, parameters in _MADE.items())
    if cuda and not exact:
        return made
    # In native mode too on a CPU: SGLang has kernels for CPUs with AMX alone.
    provides = _PROVIDED if exact else ()
    nets = tuple(Hook(net, "replace", linear_attention, "hidden_states forward_batch", provides) for net in _NETS)
    # On a GPU SGLang would rather take states for its prefix cache out of its own kernels, and overlap batches. Without
    # that it copies a slot between two batches, as on a CPU.
    nets = (*made, *nets)
    return (*nets, Hook(_FROM_KERNELS, "replace", never, "view model_arch")) if cuda else nets


def in_fp32(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`__init__` of both nets; then make `dt_bias` and the norm's weight FP32, as `A_log` is, before any load."""
    original(self, *args, **kwargs)
    for vector in (self.dt_bias, self.norm.weight):
        vector.data = vector.data.float()


@dataclass(frozen=True)
class States:
    """The states of a batch's sequences in one layer: read from SGLang's memory, updated, and written back."""

    rows: Tensor
    """[slots, W - 1, C], the last inputs of the convolution, the oldest first."""
    rule: Tensor
    """FP32 [slots, heads, K, V]"""
    slots: Tensor
    """int64 [B], each sequence's slot. Rows that pad a CUDA graph's batch have slot 0, which SGLang reserves."""
    lengths: Tensor
    """int64 [B], each sequence's number of new tokens."""
    begun: Tensor
    """bool [B], True for a sequence that had tokens before."""

    @classmethod
    def of(cls, backend: Any, layer: int, batch: Any) -> States:
        """Find the states of SGLang's ForwardBatch. backend: SGLang's for linear attention, which has the slots."""
        held = backend.req_to_token_pool.mamba2_layer_cache(layer)
        slots = backend.forward_metadata.mamba_cache_indices.long().clamp(min=0)  # SGLang pads with -1
        if batch.forward_mode.is_decode_or_idle():
            lengths, begun = torch.ones_like(slots), torch.ones_like(slots, dtype=torch.bool)
        else:
            lengths, begun = batch.extend_seq_lens.long(), batch.extend_prefix_lens > 0
        (count, channels, rows), (heads, values, keys) = held.conv[0].shape, held.temporal.shape[1:]
        views = held.conv[0].view(count, rows, channels), held.temporal.view(count, heads, keys, values)
        return cls(*views, slots, lengths, begun)


def linear_attention(self: Any, hidden_states: Tensor, forward_batch: Any) -> Tensor:
    """`Qwen3GatedDeltaNet.forward` and Qwen3.5's: prefill, whole or in chunks, and decode alike."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    states = States.of(get_attn_backend().linear_attn_backend, self.layer_id, forward_batch)
    where = states.slots, states.lengths, states.begun
    qkv, z, b, a = projected(self, self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0])
    qkv = ops.paged_causal_conv(qkv, self.conv1d.weight.flatten(1), states.rows, *where)
    q, k, v, g, beta = rule_of(self.attn, qkv, b, a)
    out = ops.paged_gated_delta_rule(q, k, v, g, beta, states.rule, *where)
    return self.out_proj(ops.gated_rms_norm(out, z, self.norm.weight, self.layer_norm_epsilon).flatten(1))[0]


def projected(net: Any, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the outputs [T, ...] of two products: queries, keys, values [T, C], z [T, heads, V], b and a [T, heads]."""
    query, key, value, z, b, a = net.fix_query_key_value_ordering(qkvz, ba)
    return torch.cat([each.flatten(1) for each in (query, key, value)], -1), z, b, a


def rule_of(attn: Any, qkv: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, g and beta of the rule. attn: SGLang's RadixLinearAttention, of one rank."""
    q, k, v = qkv.split((attn.q_dim, attn.k_dim, attn.v_dim), -1)
    q, k = q.unflatten(-1, (attn.num_q_heads, -1)), k.unflatten(-1, (attn.num_k_heads, -1))
    g, beta = ops.delta_gates(a, b, attn.A_log, attn.dt_bias)
    return q, k, v.unflatten(-1, (attn.num_v_heads, -1)), g, beta


def caches(runner: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the keys and values of the attention layers, which SGLang here keeps in a pool within its pool, and the
    convolution rows of all layers and slots."""
    pool = runner.token_to_kv_pool
    if (inner := getattr(pool, "full_kv_pool", None)) is None:
        return
    for layer, place in pool.full_attention_layer_id_mapping.items():
        yield f"k of layer {layer}", inner.k_buffer[place]
        yield f"v of layer {layer}", inner.v_buffer[place]
    yield "rows of short convolutions", pool.mamba_pool.mamba_cache.conv[0]


def states_of_layers(runner: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the states of all layers and slots."""
    if getattr(runner.token_to_kv_pool, "full_kv_pool", None) is not None:
        yield "states of linear attention", runner.token_to_kv_pool.mamba_pool.mamba_cache.temporal


# Ops one by one, on whole sequences.


def _in_proj(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    net, qkvz = _net(engine, module), module(x)[0]
    qkv, z, _, _ = projected(net, qkvz, qkvz.new_zeros(len(x), 2 * net.num_v_heads))
    return qkv, z.flatten(1)


def _gates(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    net = _net(engine, module)
    return projected(net, x.new_zeros(len(x), 2 * (net.key_dim + net.value_dim)), module(x)[0])[2:]


def _net(engine: Probed, projection: Any) -> Any:
    """Return the module that has this projection: only that module knows the order of the rows."""
    nets = (module for module in engine.runner.model.modules() if hasattr(module, "in_proj_qkvz"))
    return next(net for net in nets if projection in (net.in_proj_qkvz, net.in_proj_ba))


def _conv(engine: Probed, module: Any, qkv: Tensor) -> tuple[Tensor, ...]:
    _check_mode(qkv)
    return (ops.causal_conv(qkv, module.weight.flatten(1), engine.lengths)[0],)


def _delta(engine: Probed, attn: Any, qkv: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, ...]:
    _check_mode(qkv)
    q, k, v, g, beta = rule_of(attn, qkv, b, a)
    return (ops.gated_delta_rule(q, k, v, g, beta, engine.lengths)[0].flatten(1),)


def _gated_norm(_: Probed, module: Any, x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    _check_mode(x)
    heads, gates = (each.unflatten(-1, (-1, len(module.weight))) for each in (x, z))
    return (ops.gated_rms_norm(heads, gates, module.weight, module.eps).flatten(1),)


def _check_mode(x: Tensor) -> None:
    if x.device.type != "cpu" and state().numerics.mode == "native":
        raise NotImplementedError(OF_ITS_SCHEDULER)


FAMILY = EngineFamily(
    sides={
        IN_PROJ: EngineSide(_in_proj),
        GATES: EngineSide(_gates),
        CONV: EngineSide(_conv),
        DELTA: EngineSide(_delta),
        GATED_NORM: EngineSide(_gated_norm, constants=lambda module: (module.eps,)),
    },
    hooks=_hooks,
    caches=caches,
    states=states_of_layers,
)

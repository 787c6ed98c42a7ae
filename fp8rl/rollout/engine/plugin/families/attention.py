"""Grouped-query attention in the engine: rotation, and attention over SGLang's cache, in exact mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rl.models.families.attention import ATTENTION, HEAD_NORM, HEADS_NORM, QKV, ROPE
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.ops import HeadNorms, NewSlots
from fp8rl.rollout.engine.plugin.families import OF_ITS_SCHEDULER, EngineFamily, EngineSide, Hook, Probed
from fp8rl.rollout.engine.plugin.families.ends import epsilon, never
from fp8rl.rollout.engine.plugin.state import state

_TORCH = "layers.attention.torch_native_backend.TorchNativeAttnBackend."
_TRITON = "layers.attention.triton_backend.TritonAttnBackend."
_ROTARY = "layers.rotary_embedding.base.RotaryEmbedding."
_POOL = "mem_cache.memory_pool.MHATokenToKVPool."
_QWEN3, _QWEN3_MOE = "models.qwen3.Qwen3Attention.", "models.qwen3_moe.Qwen3MoeAttention."
_ROPE = "positions query key offsets fused_set_kv_buffer_arg"
_CACHE = "query output k_cache v_cache req_to_token req_pool_indices seq_lens"
_MASK = "encoder_lens scaling enable_gqa causal is_cross_attn sliding_window_size"
_SET = "layer loc_info cache_k cache_v k_scale v_scale layer_id_override dcp_kv_mask"
_LAYER = "q k v layer forward_batch save_kv_cache sinks score_mod aux_tensors"


def _hooks(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    if numerics.mode != "exact":
        return ()
    quantized = (Hook(_POOL + "set_kv_buffer", "around", set_kv_buffer, _SET),) if numerics.kv == "fp8" else ()
    if cuda:
        return (
            Hook(_ROTARY + "forward_cuda", "replace", rotary_embedding, _ROPE, (ops.rope,)),
            Hook(_TRITON + "forward_extend", "replace", attention_backend_extend, _LAYER, (ops.attention,)),
            Hook(_TRITON + "forward_decode", "replace", attention_backend_decode, _LAYER, (ops.attention,)),
            # A kernel that fuses norms which are hooked one by one.
            Hook("models.utils.can_use_fused_inplace_qknorm", "replace", never, "head_dim dtype"),
            Hook(_QWEN3 + "forward_prepare_native", "around", qwen3_heads, "positions hidden_states"),
            Hook(_QWEN3_MOE + "apply_qk_norm_rope", "around", qwen3_moe_heads, "qkv positions forward_batch"),
            *quantized,
        )
    extend = f"{_CACHE} extend_prefix_lens extend_seq_lens {_MASK}"
    return (
        Hook(_ROTARY + "forward_native", "replace", rotary_embedding, _ROPE, (ops.rope,)),
        Hook(_TORCH + "_run_sdpa_forward_extend", "replace", attention_extend, extend, (ops.attention,)),
        Hook(_TORCH + "_run_sdpa_forward_decode", "replace", attention_decode, f"{_CACHE} {_MASK}", (ops.attention,)),
        *quantized,
    )


def rotary_embedding(
    self: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    if fused_set_kv_buffer_arg is not None:
        raise NotImplementedError("exact mode: found a model whose rotation writes the cache; use another model")
    return _rotated(self, positions, query, key)


def _rotated(
    rotary: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    norms: HeadNorms | None = None,
    cache: NewSlots | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.rope_heads` of query and key [T, heads * D]."""
    q, k = (x.reshape(len(x), -1, rotary.head_size) for x in (query, key))
    scaling = state().weights.definition.sizes.rope_scaling
    q, k = ops.rope_heads(q, k, positions.flatten(), rotary.base, rotary.rotary_dim, scaling, norms, cache)
    return q.view(query.shape), k.view(key.shape)


def qwen3_heads(original: Any, self: Any, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`Qwen3Attention.forward_prepare_native`: its product, the norms of heads, and the rotation."""
    if self.use_fused_qk_norm_mrope:  # positions of more than one axis
        return original(self, positions, hidden_states)  # type: ignore[no-any-return]
    q, k, v = self.qkv_proj(hidden_states)[0].split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    return *_rotated(self.rotary_emb, positions, q, k, _head_norms(self)), v


def qwen3_moe_heads(
    original: Any, self: Any, qkv: Tensor, positions: Tensor, batch: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`Qwen3MoeAttention.apply_qk_norm_rope`, which also writes keys and values into the cache if SGLang's
    `enable_fused_set_kv_buffer` says so. SGLang asks the same function before it would write them itself."""
    from sglang.srt.models import utils

    if not self.compatible_with_fused_kv_buffer:  # positions of more than one axis
        return original(self, qkv, positions, batch)  # type: ignore[no-any-return]
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    cache = None
    if utils.enable_fused_set_kv_buffer(batch):
        pool, layer = utils.get_token_to_kv_pool(), self.attn.layer_id
        new = v.unflatten(-1, (-1, self.head_dim))
        cache = NewSlots(pool.get_key_buffer(layer), pool.get_value_buffer(layer), batch.out_cache_loc, new)
    self._used_fused_qk_norm_rope_last_call = False
    return *_rotated(self.rotary_emb, positions, q, k, _head_norms(self), cache), v


def _head_norms(attention: Any) -> HeadNorms:
    return HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)


def attention_extend(
    self: Any, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, requests: Tensor,
    lengths: Tensor, prefixes: Tensor, new: Tensor, *_: Any, scaling: float, **__: Any
) -> Tensor:  # fmt: skip
    """Prefill, whole or in chunks: query [tokens, heads, D] holds the new tokens of every sequence, end to end."""
    return output.copy_(_over_slots(query, k_cache, v_cache, slots, requests, new, lengths, scaling))


def attention_decode(
    self: Any, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, requests: Tensor,
    lengths: Tensor, *_: Any, scaling: float, **__: Any
) -> Tensor:  # fmt: skip
    """One new token of every sequence: query [sequences, heads, D]."""
    new = torch.ones_like(lengths)
    return output.copy_(_over_slots(query, k_cache, v_cache, slots, requests, new, lengths, scaling))


def attention_backend_extend(
    self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **extras: Any
) -> Tensor:
    """Prefill on a GPU: q [tokens, heads * D] of the new tokens of every sequence, end to end."""
    return _attend(self, q, k, v, layer, batch, batch.extend_seq_lens, save_kv_cache, extras)


def attention_backend_decode(
    self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **extras: Any
) -> Tensor:
    """One new token of every sequence on a GPU: q [sequences, heads * D].

    In a captured CUDA graph, the batch's lengths and the table of slots are the buffers that each replay fills.
    """
    return _attend(self, q, k, v, layer, batch, None, save_kv_cache, extras)


def _attend(
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    batch: Any,
    new: Tensor | None,
    save: bool,
    extras: dict[str, Any],
) -> Tensor:
    """Put the new keys and values into their slots, then attend over the slots."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    beyond = any(extra is not None for extra in extras.values())
    if layer.sliding_window_size not in (None, -1) or layer.logit_cap or beyond:
        raise NotImplementedError("exact mode: found attention with more than a causal mask; use another model")
    pool = backend.token_to_kv_pool
    if save:
        places = backend.forward_metadata
        written = KVWriteLoc(batch.out_cache_loc, places.swa_out_cache_loc, full_loc=places.out_cache_loc_full_physical)
        pool.set_kv_buffer(layer, written, k, v)
    heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    slots, requests = backend.req_to_token_pool.req_to_token, batch.req_pool_indices
    return _over_slots(heads, keys, values, slots, requests, new, batch.seq_lens, layer.scaling).view(q.shape)


def set_kv_buffer(
    original: Any, self: Any, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, *args: Any, **kwargs: Any
) -> None:
    """`MHATokenToKVPool.set_kv_buffer` after a cast to E4M3 by the run's format: SGLang's cast gives NaN beyond 448."""
    kv = state().numerics.kv_format
    original(self, layer, loc_info, kv.keys(cache_k), kv.values(cache_v), *args, **kwargs)


def _over_slots(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    requests: Tensor,
    new: Tensor | None,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    """Compute `ops.paged_attention` over a cache in the run's format."""
    kv = state().numerics.kv_format
    return kv.result(ops.paged_attention(q, keys, values, table, requests, new, lengths, scale * kv.key_scale))


def _qkv(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    size, keys = engine.sizes.head_dim, engine.sizes.kv_heads
    return module(x)[0].unflatten(-1, (-1, size)).split((engine.sizes.heads, keys, keys), 1)


def _rope(engine: Probed, module: Any, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    rotated = module(engine.positions, q.flatten(1), k.flatten(1))
    return tuple(new.view(old.shape) for new, old in zip(rotated, (q, k), strict=True))


def _attention(engine: Probed, attn: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Prefill of whole sequences; token t has slot t of a cache."""
    runner, lengths = engine.runner, engine.lengths
    starts = lengths.cumsum(0) - lengths
    slots = starts[:, None] + torch.arange(int(lengths.max()), device=q.device)
    slots = slots.clamp(max=len(q) - 1)
    requests = torch.arange(len(lengths), device=q.device)
    kv = state().numerics.kv_format
    k, v, out = kv.keys(k).to(runner.kv_cache_dtype), kv.values(v).to(runner.kv_cache_dtype), torch.empty_like(q)
    if q.device.type == "cpu":
        grouped, none = attn.tp_q_head_num != attn.tp_k_head_num, torch.zeros_like(lengths)
        # Beside layers of another kind, SGLang has a backend for those that attend within its backend.
        backend = getattr(runner.attn_backend, "full_attn_backend", runner.attn_backend)
        backend._run_sdpa_forward_extend(
            *(q, out, k, v, slots, requests, lengths, none, lengths),
            scaling=attn.scaling, enable_gqa=grouped, causal=True
        )  # fmt: skip
    elif state().numerics.mode == "exact":
        out = _over_slots(q, k, v, slots.int(), requests, lengths, lengths, attn.scaling)
    else:
        raise NotImplementedError(OF_ITS_SCHEDULER)
    return (out.flatten(1),)


FAMILY = EngineFamily(
    sides={
        HEAD_NORM: EngineSide(lambda _, module, x: (module(x.flatten(0, 1)).view(x.shape),), constants=epsilon),
        HEADS_NORM: EngineSide(lambda _, module, x: (module(x.flatten(1)).view(x.shape),), constants=epsilon),
        QKV: EngineSide(_qkv),
        ROPE: EngineSide(_rope, constants=lambda module: (module.base, getattr(module, "scaling_factor", 1.0))),
        ATTENTION: EngineSide(_attention),
    },
    hooks=_hooks,
)

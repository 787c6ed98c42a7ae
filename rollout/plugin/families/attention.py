"""Grouped-query attention in the engine: rotation, and attention over SGLang's cache, in exact mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8rl.models.families.attention import ATTENTION, HEAD_NORM, HEADS_NORM, QKV, ROPE
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.rollout.plugin.families import OF_ITS_SCHEDULER, EngineFamily, EngineSide, Hook, Probed
from fp8rl.rollout.plugin.families.ends import epsilon, never
from fp8rl.rollout.plugin.state import state

_TORCH = "layers.attention.torch_native_backend.TorchNativeAttnBackend."
_TRITON = "layers.attention.triton_backend.TritonAttnBackend."
_ROTARY = "layers.rotary_embedding.base.RotaryEmbedding."
_ROPE = "positions query key offsets fused_set_kv_buffer_arg"
_CACHE = "query output k_cache v_cache req_to_token req_pool_indices seq_lens"
_MASK = "encoder_lens scaling enable_gqa causal is_cross_attn sliding_window_size"
_LAYER = "q k v layer forward_batch save_kv_cache sinks score_mod aux_tensors"


def _hooks(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    if numerics.mode != "exact":
        return ()
    if cuda:
        return (
            Hook(_ROTARY + "forward_cuda", "replace", rotary_embedding, _ROPE, (ops.rope,)),
            Hook(_TRITON + "forward_extend", "replace", attention_backend_extend, _LAYER, (ops.attention,)),
            Hook(_TRITON + "forward_decode", "replace", attention_backend_decode, _LAYER, (ops.attention,)),
            # Kernels that fuse ops which are hooked one by one.
            Hook("models.utils.can_use_fused_inplace_qknorm", "replace", never, "head_dim dtype"),
            Hook("models.utils.enable_fused_set_kv_buffer", "replace", never, "forward_batch"),
        )
    extend = f"{_CACHE} extend_prefix_lens extend_seq_lens {_MASK}"
    return (
        Hook(_ROTARY + "forward_native", "replace", rotary_embedding, _ROPE, (ops.rope,)),
        Hook(_TORCH + "_run_sdpa_forward_extend", "replace", attention_extend, extend, (ops.attention,)),
        Hook(_TORCH + "_run_sdpa_forward_decode", "replace", attention_decode, f"{_CACHE} {_MASK}", (ops.attention,)),
    )


def rotary_embedding(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    where = positions.reshape(1, -1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(1, x.shape[0], -1, self.head_size)
        return ops.rope(heads, where, self.base, self.rotary_dim).reshape(x.shape)

    return rotated(query), rotated(key)


def attention_extend(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: Any = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Prefill, whole or in chunks: query [tokens, heads, D] holds the new tokens of every sequence, end to end."""
    new, keys = extend_seq_lens, seq_lens
    return output.copy_(
        ops.paged_attention(query, k_cache, v_cache, req_to_token, req_pool_indices, new, keys, scaling)
    )


def attention_decode(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: Any = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """One new token of every sequence: query [sequences, heads, D]."""
    new, keys = torch.ones_like(seq_lens), seq_lens
    return output.copy_(
        ops.paged_attention(query, k_cache, v_cache, req_to_token, req_pool_indices, new, keys, scaling)
    )


def attention_backend_extend(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    sinks: torch.Tensor | None = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
) -> torch.Tensor:
    """Prefill on a GPU: q [tokens, heads * D] of the new tokens of every sequence, end to end."""
    new = forward_batch.extend_seq_lens
    return _attend(self, q, k, v, layer, forward_batch, save_kv_cache, new, (sinks, score_mod, aux_tensors))


def attention_backend_decode(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    sinks: torch.Tensor | None = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
) -> torch.Tensor:
    """One new token of every sequence on a GPU: q [sequences, heads * D].

    In a captured CUDA graph, the batch's lengths and the table of slots are the buffers that each replay fills.
    """
    new = torch.ones_like(forward_batch.seq_lens)
    return _attend(self, q, k, v, layer, forward_batch, save_kv_cache, new, (sinks, score_mod, aux_tensors))


def _attend(
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool,
    new: torch.Tensor,
    extras: tuple[Any, ...],
) -> torch.Tensor:
    """The new keys and values into their slots, then attention over the slots."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if layer.sliding_window_size not in (None, -1) or layer.logit_cap or any(extra is not None for extra in extras):
        raise NotImplementedError("exact mode: found attention with more than a causal mask; use another model")
    pool = backend.token_to_kv_pool
    if save_kv_cache:
        metadata = backend.forward_metadata
        slots = KVWriteLoc(
            forward_batch.out_cache_loc, metadata.swa_out_cache_loc, full_loc=metadata.out_cache_loc_full_physical
        )
        pool.set_kv_buffer(layer, slots, k, v)
    return ops.paged_attention(
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        pool.get_key_buffer(layer.layer_id),
        pool.get_value_buffer(layer.layer_id),
        backend.req_to_token_pool.req_to_token,
        forward_batch.req_pool_indices,
        new,
        forward_batch.seq_lens,
        layer.scaling,
    ).view(q.shape)


def _qkv(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    size, keys = engine.sizes.head_dim, engine.sizes.kv_heads
    return module(x)[0].unflatten(-1, (-1, size)).split((engine.sizes.heads, keys, keys), 1)


def _rope(engine: Probed, module: Any, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    rotated = module(engine.positions, q.flatten(1), k.flatten(1))
    return tuple(new.view(old.shape) for new, old in zip(rotated, (q, k), strict=True))


def _attention(engine: Probed, attn: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Prefill of whole sequences; token t lies in slot t of a cache."""
    runner, lengths = engine.runner, engine.lengths
    starts = lengths.cumsum(0) - lengths
    slots = starts[:, None] + torch.arange(int(lengths.max()), device=q.device)
    slots = slots.clamp(max=len(q) - 1)
    requests = torch.arange(len(lengths), device=q.device)
    k, v, out = k.to(runner.kv_cache_dtype), v.to(runner.kv_cache_dtype), torch.empty_like(q)
    if q.device.type == "cpu":
        runner.attn_backend._run_sdpa_forward_extend(
            q,
            out,
            k,
            v,
            slots,
            requests,
            lengths,
            torch.zeros_like(lengths),
            lengths,
            scaling=attn.scaling,
            enable_gqa=attn.tp_q_head_num != attn.tp_k_head_num,
            causal=True,
        )
    elif state().numerics.mode == "exact":
        out = ops.paged_attention(q, k, v, slots.int(), requests, lengths, lengths, attn.scaling)
    else:
        raise NotImplementedError(OF_ITS_SCHEDULER)
    return (out.flatten(1),)


FAMILY = EngineFamily(
    sides={
        HEAD_NORM: EngineSide(lambda _, module, x: (module(x.flatten(0, 1)).view(x.shape),), constants=epsilon),
        HEADS_NORM: EngineSide(lambda _, module, x: (module(x.flatten(1)).view(x.shape),), constants=epsilon),
        QKV: EngineSide(_qkv),
        ROPE: EngineSide(_rope, constants=lambda module: (module.base,)),
        ATTENTION: EngineSide(_attention),
    },
    hooks=_hooks,
)

"""Latent attention in the engine (`numerics.ops.latent`): it replaces SGLang's `DeepseekV2AttentionMLA` in exact mode,
and adds what SGLang lacks for it on a CPU.

SGLang multiplies by copies of kv_b_proj (w_kc, w_vc), which it makes at the end of a load that names a kv_b_proj. That
is not enough: a delta writes the parameter without a load, and a parameter and its scales may come in two loads. So a
commit has the copies made anew, and a manifest marks copies that differ from the kv_b_proj that is held. Exact mode has
no copies: it multiplies by the operand of kv_b_proj, which has the version of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.models.families.latent import LATENT_ATTENTION, LATENT_DOWN, Latent
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.quantize import QuantizedTensor
from fp8rl.numerics.spec import TensorSpec
from fp8rl.rollout.engine.plugin.families import (
    OF_ITS_SCHEDULER,
    Copies,
    EngineFamily,
    EngineSide,
    Hook,
    Probed,
    nothing,
)
from fp8rl.rollout.engine.plugin.families.ends import never
from fp8rl.rollout.engine.plugin.state import state

_MODEL = "models.deepseek_v2."
_MLA = "positions hidden_states forward_batch zero_allocator layer_scatter_modes llama_4_scaling prev_topk_indices"
_ROPE_CPU = "head_size rotary_dim max_position base is_neox_style rope_scaling dtype partial_rotary_factor device"
_LOADER = "models.deepseek_common.deepseek_weight_loader."


def _hooks(numerics: NumericsConfig, cuda: bool) -> tuple[Hook, ...]:
    # Rows are no longer than what an indexer of sparse attention chooses whole (`ModelSizes.limit`).
    found = (Hook("configs.model_config.is_deepseek_dsa", "replace", never, "config"),)
    if not cuda:  # SGLang's rotation on a CPU knows YaRN alone
        found += (Hook("layers.rotary_embedding.factory.get_rope_cpu", "around", rope_on_cpu, _ROPE_CPU),)
    if numerics.mode == "exact":
        computed = (ops.linear, ops.latent_attention)
        return (
            Hook(_MODEL + "DeepseekV2AttentionMLA.forward", "replace", attention, _MLA, computed),
            # A BF16 product of few rows that goes around the hook of products.
            Hook(_MODEL + "fused_a_gemm_weight_eligible", "replace", never, "layer"),
            # Copies of kv_b_proj for SGLang's own attention, by which exact mode does not multiply.
            Hook(
                _LOADER + "DeepseekV2WeightLoaderMixin.post_load_weights", "replace", nothing, "is_nextn weight_names"
            ),
            *found,
        )
    if not cuda:
        # With torch_native SGLang takes for granted that a cache holds keys of heads, and gives latents to the wrong
        # attention.
        dispatch = _MODEL + "DeepseekV2AttentionMLA.dispatch_attn_forward_method"
        found = (*found, Hook(dispatch, "replace", absorbed, "forward_batch"))
        if numerics.rollout_spec.quantized:
            # Copies of kv_b_proj: SGLang makes them in BF16 on a GPU, and on a CPU quantizes once more, with one scale.
            of_copies = _LOADER + "block_quant_to_tensor_quant"
            found = (*found, Hook(of_copies, "replace", dequantized, "x_q_block x_s block_size"))
    return found


@dataclass(frozen=True)
class Where:
    """The slots of some sequences' rows, as arguments of `ops.paged_latent_attention`."""

    table: Tensor
    requests: Tensor
    new: Tensor | None
    lengths: Tensor


def attention(
    self: Any,
    positions: Tensor,
    hidden_states: Tensor,
    forward_batch: Any,
    zero_allocator: Any,
    layer_scatter_modes: Any = None,
    llama_4_scaling: Tensor | None = None,
    prev_topk_indices: Tensor | None = None,
) -> Tensor:
    """`DeepseekV2AttentionMLA.forward`: prefill, whole or in chunks, and decode alike."""
    from sglang.srt.layers.communicator import get_attn_tp_context
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.model_executor.forward_context import get_attn_backend

    if llama_4_scaling is not None or prev_topk_indices is not None or self.use_dsa:
        raise NotImplementedError("exact mode: found latent attention with more than a causal mask; use another model")
    if not len(hidden_states):
        return hidden_states
    if self.q_lora_rank is not None:
        low, kv_row = (
            get_attn_tp_context()
            .fetch_qkv_latent()
            .split((self.q_lora_rank, self.kv_lora_rank + self.qk_rope_head_dim), -1)
        )
        q = self.q_b_proj(self.q_a_layernorm(low.contiguous()))[0]
    else:
        q, kv_row = self.q_proj(hidden_states)[0], self.kv_a_proj_with_mqa(hidden_states)[0]
    backend, layer = get_attn_backend(), self.attn_mqa
    pool = backend.token_to_kv_pool

    def cached(rows: Tensor) -> Tensor:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), rows[:, None], None)
        return pool.get_key_buffer(layer.layer_id)[:, 0]

    lengths = forward_batch.seq_lens
    decode = forward_batch.forward_mode.is_decode_or_idle()
    new = None if decode else forward_batch.extend_seq_lens
    where = Where(backend.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, new, lengths)
    return self.o_proj(attend(self, q, kv_row, positions, cached, where))[0]


def attend(
    module: Any, q: Tensor, kv_row: Tensor, positions: Tensor, cached: Callable[[Tensor], Tensor], where: Where
) -> Tensor:
    """q [T, heads * D] and kv_row [T, kv rank + rope] of the new tokens -> [T, heads * value], before the last product.

    cached: puts the new rows, in the format of keys, into a cache, and returns the cache [slots, kv rank + rope].
    """
    current = state()
    sizes, rank = current.weights.definition.sizes, module.kv_lora_rank
    weight = module.kv_b_proj.weight
    operand = current.weights.operand(weight) if weight.dtype == torch.float8_e4m3fn else None
    low_rank = current.weights.low_rank(weight)
    plain, value = sizes.plain_dim, module.v_head_dim

    def of_heads(x: Tensor, first: int, count: int, transposed: bool = False) -> Tensor:
        """`ops.head_linear` with the adapter of the weight, if it has one."""
        plus = None if low_rank is None else ops.head_term(x, low_rank, first, count, transposed)
        return ops.head_linear(x, weight, operand, first, count, transposed, plus)

    def rotated(x: Tensor) -> Tensor:
        return ops.rope_pairs(x[None], positions[None], sizes.rope_theta, sizes.rope_scaling)[0]

    heads = q.unflatten(-1, (-1, sizes.head_dim))
    latents = module.kv_a_layernorm(kv_row[:, :rank].contiguous())
    kv = current.numerics.kv_format
    cache = cached(kv.keys(torch.cat((latents, rotated(kv_row[:, None, rank:])[:, 0]), -1)))
    inside = of_heads(heads[..., :plain], 0, plain, True)
    queries = torch.cat((inside, rotated(heads[..., plain:])), -1)
    scale = sizes.attention_scale * kv.key_scale
    out = ops.paged_latent_attention(queries, cache, where.table, where.requests, where.new, where.lengths, rank, scale)
    return of_heads(kv.result_of_keys(out), plain, value).flatten(1)


def dequantized(x_q_block: Tensor, x_s: Tensor, block_size: list[int]) -> tuple[Tensor, None]:
    """`block_quant_to_tensor_quant`: return kv_b_proj in BF16, as on a GPU, and no scale; copies are made of it."""
    spec = state().numerics.rollout_spec.weight
    return QuantizedTensor(x_q_block, x_s.to(spec.scale_dtype), spec).dequantize(torch.bfloat16), None


def own_attention(
    module: Any,
    backend: Any,
    q: Tensor,
    kv_row: Tensor,
    positions: Tensor,
    slots: Tensor,
    requests: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Compute SGLang's latent attention on a CPU, from SGLang's parts, over whole sequences with a slot for each token.

    q [T, heads * D] and kv_row [T, kv rank + rope] -> [T, heads * value], before the last product.
    """
    rank = module.kv_lora_rank
    plain, turned = q.unflatten(-1, (-1, module.qk_head_dim)).split(
        (module.qk_nope_head_dim, module.qk_rope_head_dim), -1
    )
    latents = module.kv_a_layernorm(kv_row[:, :rank].contiguous())
    turned, key = module.rotary_emb(positions, turned, kv_row[:, None, rank:])
    inside = torch.bmm(plain.transpose(0, 1), module.w_kc).transpose(0, 1)
    queries, rows = torch.cat((inside, turned), -1), torch.cat((latents[:, None], key), -1)
    out = torch.empty_like(inside)
    backend._run_sdpa_forward_extend(
        queries,
        out,
        rows,
        rows[..., :rank],
        slots,
        requests,
        lengths,
        torch.zeros_like(lengths),
        lengths,
        scaling=module.attn_mqa.scaling,
        enable_gqa=True,
        causal=True,
    )
    return torch.bmm(out.transpose(0, 1), module.w_vc).transpose(0, 1).flatten(1)


def absorbed(self: Any, forward_batch: Any) -> Any:
    """`dispatch_attn_forward_method` on a CPU: never attention over expanded keys, which would read latents as keys."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def rope_on_cpu(
    original: Callable[..., Any],
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: Any = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: Any = None,
) -> Any:
    """`get_rope_cpu`, which can only do YaRN; for a model without YaRN, SGLang's usual rotation."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    usual = head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor
    return get_rope(*usual) if rope_scaling is None else original(*usual, device)


@dataclass(frozen=True)
class CopiesOfKvB:
    """Copies w_kc [heads, N, R] and w_vc [heads, R, V] of kv_b_proj [heads * (N + V), R], a head's keys first."""

    model: Any
    """SGLang's model, which makes the copies."""
    attention: Any
    """The layer's module, which has the copies."""
    name: str
    """The name of the layer's kv_b_proj."""

    def refresh(self) -> None:
        self.model.post_load_weights(weight_names=[self.name])

    def agree(self, spec: TensorSpec) -> bool:
        """Return whether the copies equal kv_b_proj bit for bit (dequantized, if it is quantized by `spec`)."""
        product = self.attention.kv_b_proj
        whole = product.weight.detach()
        if (scales := getattr(product, "weight_scale_inv", None)) is not None:
            whole = QuantizedTensor(whole, scales.detach().to(spec.scale_dtype), spec).dequantize(torch.bfloat16)
        held = torch.cat((self.attention.w_kc, self.attention.w_vc.transpose(1, 2)), 1).flatten(0, 1)
        return held.dtype == whole.dtype and held.view(torch.int16).equal(whole.view(torch.int16))


def copies_in(model: nn.Module) -> Mapping[Tensor, Copies]:
    """Return the copies of each kv_b_proj that has copies. Exact mode has none."""
    return {
        module.kv_b_proj.weight: CopiesOfKvB(model, module, f"{name}.kv_b_proj.weight")
        for name, module in model.named_modules()
        if getattr(module, "w_kc", None) is not None
    }


def _latent_down(engine: Probed, module: Any, x: Tensor) -> tuple[Tensor, ...]:
    rank, fused = engine.sizes.of(Latent).q_rank, module(x)[0]
    return fused[:, :rank], fused[:, rank:]


def _latent_attention(engine: Probed, module: Any, q: Tensor, kv_row: Tensor) -> tuple[Tensor, ...]:
    """Attention over whole sequences, with a slot for each token and without the product after it."""
    lengths, starts = engine.lengths, engine.lengths.cumsum(0) - engine.lengths
    slots = (starts[:, None] + torch.arange(int(lengths.max()), device=q.device)).clamp(max=len(q) - 1)
    requests = torch.arange(len(lengths), device=q.device)
    if state().numerics.mode == "native":
        if q.device.type != "cpu":
            raise NotImplementedError(OF_ITS_SCHEDULER)
        backend, positions = engine.runner.attn_backend, engine.positions
        return (own_attention(module, backend, q.flatten(1), kv_row, positions, slots, requests, lengths),)
    where = Where(slots.int(), requests, lengths, lengths)
    return (attend(module, q.flatten(1), kv_row, engine.positions, lambda rows: rows, where),)


def _rotation(attention: Any) -> tuple[float, ...]:
    """Return the base and the scaling factor, which is 1 for a model without YaRN."""
    return attention.rotary_emb.base, getattr(attention.rotary_emb, "scaling_factor", 1.0)


FAMILY = EngineFamily(
    sides={LATENT_DOWN: EngineSide(_latent_down), LATENT_ATTENTION: EngineSide(_latent_attention, constants=_rotation)},
    hooks=_hooks,
    copies=copies_in,
)

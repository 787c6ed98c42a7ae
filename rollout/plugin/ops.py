"""The shared ops in the shape of the SGLang methods that they replace in exact mode. Each is a row of `hooks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8rl.numerics import ops
from fp8rl.numerics.ops import ExpertWeights
from fp8rl.rollout.plugin import ranks
from fp8rl.rollout.plugin.state import state


def rms_norm(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    if post_residual_addition is not None:
        raise NotImplementedError("exact mode: found a second residual in RMSNorm, expected none; use another model")
    if residual is None:
        return ops.rms_norm(x, self.weight, self.variance_epsilon)
    return ops.add_rms_norm(x, residual, self.weight, self.variance_epsilon)


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


def silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.swiglu(x)


def linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    low_rank = state().weights.low_rank(layer.weight)
    if ranks.splits(layer):
        return ops.add_bias(ranks.merged(ops.linear_partial(x, layer.weight), x, low_rank), bias)
    splits = _k_splits(layer)
    plus = None if low_rank is None else ops.low_rank_of(x, low_rank, splits)
    return ops.add_bias(ops.linear(x, layer.weight, splits, plus), bias)


def fp8_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    current = state()
    operand, low_rank = current.weights.operand(layer.weight), current.weights.low_rank(layer.weight)
    spec = current.numerics.rollout_spec
    if ranks.splits(layer):
        partial = ops.fp8_linear_partial(x, layer.weight, operand, spec, "bf16")
        return ops.add_bias(ranks.merged(partial, x, low_rank), bias)
    splits = _k_splits(layer)
    plus = None if low_rank is None else ops.low_rank_of(x, low_rank, splits)
    return ops.add_bias(ops.fp8_linear(x, layer.weight, operand, spec, "bf16", splits, plus), bias)


def lm_head(self: Any, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: Any = None) -> torch.Tensor:
    return ops.linear(hidden_states, lm_head.weight)


def fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    scoring_func: str = "softmax",
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """others: of SGLang's routers on a GPU; none of them is for a softmax router without shared experts."""
    if correction_bias is not None or scoring_func != "softmax" or any(others.values()):
        raise NotImplementedError("exact mode: found a router with more than a softmax; use another model")
    probs, experts = ops.route(gating_output, topk, renormalize)
    return probs, experts.int()


def router_logits(self: Any, hidden_states: torch.Tensor, *others: Any, **unused: Any) -> torch.Tensor:
    """A router's weight is BF16 in the checkpoint, and held in FP32 by some models."""
    return ops.linear_partial(hidden_states, self.weight.to(hidden_states.dtype))


def biased_grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor is in the probabilities, and nowhere else (`lifecycle.after_load_model`)."""
    if num_fused_shared_experts:
        raise NotImplementedError("exact mode: found shared experts among the routed ones, expected them by themselves")
    probs, experts = ops.route_sigmoid(
        gating_output,
        correction_bias,
        topk,
        num_expert_group or 1,
        topk_group or 1,
        renormalize,
        routed_scaling_factor or 1.0,
    )
    return probs, experts.int()


def moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Routed experts, BF16: every expert's matrices as they are."""
    return _moe(layer, dispatch_output, lambda parameter: None)


def fp8_moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Routed experts, FP8."""
    return _moe(layer, dispatch_output, state().weights.operand)


def _moe(layer: Any, dispatch_output: Any, operand_of: Callable[[Any], Any]) -> Any:
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    probs, experts, _ = dispatch_output.topk_output
    spec, low_rank = state().numerics.rollout_spec, state().weights.low_rank

    def weights_of(parameter: Any, rows: torch.Tensor) -> ExpertWeights:
        beside = low_rank(parameter)
        return ExpertWeights(parameter, operand_of(parameter), beside and beside.of_rows(rows))

    def outputs_of(choices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        rows = choices // experts.shape[1]
        w13, w2 = weights_of(layer.w13_weight, rows), weights_of(layer.w2_weight, rows)
        return ops.experts(x[rows], counts, w13, w2, spec if spec.quantized else None, "bf16")

    if state().weights.rank.ranks > 1:
        return StandardCombineInput(hidden_states=ranks.experts(outputs_of, experts.long(), probs, layer, x.dtype))
    order, counts = ops.group_by_expert(experts.long(), layer.num_experts)
    return StandardCombineInput(hidden_states=ops.combine(outputs_of(order, counts), probs, order, x.dtype))


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


def _k_splits(layer: Any) -> int:
    """The trainer cuts the K of its row-parallel products over its tensor-parallel ranks, and only theirs."""
    from sglang.srt.layers.linear import RowParallelLinear

    return state().numerics.k_splits if isinstance(layer, RowParallelLinear) else 1

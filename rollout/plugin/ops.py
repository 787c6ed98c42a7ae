"""The shared ops in the shape of the SGLang methods that they replace in exact mode. Each is a row of `hooks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from numerics import ops
from numerics.ops import ExpertWeight
from rollout.plugin.engine import state


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
        return ops.rope(x.reshape(1, x.shape[0], -1, self.head_size), where, self.base).reshape(x.shape)

    return rotated(query), rotated(key)


def silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    return ops.swiglu(x)


def linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _with_bias(ops.linear(x, layer.weight, _k_splits(layer)), bias)


def fp8_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    current = state()
    (dequantized,) = current.weights.dequantized(layer.weight)
    spec = current.numerics.rollout_spec
    return _with_bias(ops.fp8_linear(x, layer.weight, dequantized, spec, "bf16", _k_splits(layer)), bias)


def lm_head(self: Any, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: Any = None) -> torch.Tensor:
    return ops.linear(hidden_states, lm_head.weight)


def fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor]:
    probs, experts = ops.route(gating_output, topk, renormalize)
    return probs, experts.int()


def moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Routed experts, BF16: every expert's matrices as they are."""
    return _moe(layer, dispatch_output, lambda parameter: [ExpertWeight(w) for w in parameter])


def fp8_moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Routed experts, FP8."""
    dequantized = state().weights.dequantized
    return _moe(layer, dispatch_output, lambda parameter: [ExpertWeight(w, w) for w in dequantized(parameter)])


def _moe(layer: Any, dispatch_output: Any, weights_of: Callable[[Any], list[ExpertWeight]]) -> Any:
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    probs, experts, _ = dispatch_output.topk_output
    w13, w2 = weights_of(layer.w13_weight), weights_of(layer.w2_weight)
    spec = state().numerics.rollout_spec
    order, counts = ops.group_by_expert(experts.long(), len(w13))
    outputs = ops.experts(x[order // experts.shape[1]], counts, w13, w2, spec if spec.quantized else None, "bf16")
    return StandardCombineInput(hidden_states=ops.combine(outputs, probs, order, x.dtype))


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
    starts = extend_seq_lens.cumsum(0) - extend_seq_lens
    for rows in _of_similar_length(extend_seq_lens, seq_lens):
        lengths, prefixes = extend_seq_lens[rows].long(), extend_prefix_lens[rows].long()
        steps = torch.arange(int(lengths.max()), device=query.device)
        real = steps < lengths[:, None]
        steps = torch.minimum(steps, lengths[:, None] - 1)  # a padding query repeats the last real one
        tokens = starts[rows].long()[:, None] + steps
        keys, values = _cached(k_cache, v_cache, req_to_token, req_pool_indices[rows], seq_lens[rows])
        result = ops.attention(query[tokens], keys, values, prefixes[:, None] + steps, scaling)
        output[tokens[real]] = result[real]
    return output


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
    for rows in _of_similar_length(torch.ones_like(seq_lens), seq_lens):
        lengths = seq_lens[rows].long()
        keys, values = _cached(k_cache, v_cache, req_to_token, req_pool_indices[rows], lengths)
        output[rows] = ops.attention(query[rows].unsqueeze(1), keys, values, lengths[:, None] - 1, scaling).squeeze(1)
    return output


def _of_similar_length(new: torch.Tensor, total: torch.Tensor) -> Iterator[torch.Tensor]:
    """Indices of sequences that are padded to one shape: new and cached lengths alike to within a factor of two."""
    keys = [(n.bit_length(), max(t, 64).bit_length()) for n, t in zip(new.tolist(), total.tolist(), strict=True)]
    for key in sorted(set(keys)):
        yield torch.tensor([i for i, k in enumerate(keys) if k == key], device=total.device)


def _cached(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [sequences, longest, kv heads, D] out of the paged cache."""
    positions = torch.arange(int(lengths.max()), device=k_cache.device)
    slots = req_to_token[requests, : len(positions)].long()
    # Behind a sequence's end the table is stale: repeat a slot of its own, which is finite, and which nobody sees.
    slots = torch.where(positions < lengths[:, None], slots, slots[:, :1])
    return k_cache[slots], v_cache[slots]


def _k_splits(layer: Any) -> int:
    """The trainer cuts the K of its row-parallel products over its tensor-parallel ranks, and only theirs."""
    from sglang.srt.layers.linear import RowParallelLinear

    return state().numerics.k_splits if isinstance(layer, RowParallelLinear) else 1


def _with_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product + bias

"""The kernels by the name of the op that they implement (`numerics.backend.dispatch`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8rl.numerics.kernels.attention.backward import attention_dkv, attention_dq
from fp8rl.numerics.kernels.attention.forward import attention, attention_forward, packed_attention, paged_attention
from fp8rl.numerics.kernels.attention.latent import latent_attention, packed_latent_attention, paged_latent_attention
from fp8rl.numerics.kernels.digest import chunk_sums
from fp8rl.numerics.kernels.draw import draw, truncation_floors
from fp8rl.numerics.kernels.logprobs import token_logprobs
from fp8rl.numerics.kernels.norm import add_rms_norm, rms_norm
from fp8rl.numerics.kernels.products.experts import experts, grouped_linear
from fp8rl.numerics.kernels.products.heads import head_linear
from fp8rl.numerics.kernels.products.linear import (
    fp8_linear,
    fp8_linear_partial,
    group_operand,
    linear,
    linear_partial,
    norm_fp8_linear,
    trained_operand,
    weight_operand,
)
from fp8rl.numerics.kernels.products.low_rank import grouped_low_rank_term, low_rank_term
from fp8rl.numerics.kernels.quantize import quantize, quantize_many
from fp8rl.numerics.kernels.rope import rope, rope_pairs
from fp8rl.numerics.kernels.router import route, route_sigmoid, top_experts
from fp8rl.numerics.kernels.swiglu import combine, swiglu

_ALL = (
    add_rms_norm, attention, attention_dkv, attention_dq, attention_forward, chunk_sums, combine, draw, experts,
    fp8_linear, fp8_linear_partial, group_operand, grouped_linear, grouped_low_rank_term, head_linear,
    latent_attention, linear, linear_partial, low_rank_term, norm_fp8_linear, packed_attention,
    packed_latent_attention, paged_attention, paged_latent_attention, quantize, quantize_many, rms_norm, rope,
    rope_pairs, route, route_sigmoid, truncation_floors, swiglu, token_logprobs, top_experts, trained_operand,
    weight_operand,
)  # fmt: skip
KERNELS: dict[str, Callable[..., Any]] = {kernel.__name__: kernel for kernel in _ALL}

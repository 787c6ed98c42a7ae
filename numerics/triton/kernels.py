"""The kernels by the name of the op that they implement (`numerics.dispatch`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numerics.triton.attention import attention, paged_attention
from numerics.triton.combine import combine
from numerics.triton.digest import chunk_sums
from numerics.triton.experts import experts, grouped_linear
from numerics.triton.linear import (
    fp8_linear,
    fp8_linear_partial,
    group_operand,
    linear,
    linear_partial,
    norm_fp8_linear,
    trained_operand,
    weight_operand,
)
from numerics.triton.logprobs import token_logprobs
from numerics.triton.norm import add_rms_norm, rms_norm
from numerics.triton.quantize import quantize, quantize_many
from numerics.triton.rope import rope
from numerics.triton.router import route, top_experts
from numerics.triton.swiglu import swiglu

_ALL = (
    add_rms_norm, attention, chunk_sums, combine, experts, fp8_linear, fp8_linear_partial, group_operand,
    grouped_linear, linear, linear_partial, norm_fp8_linear, paged_attention, quantize, quantize_many,
    rms_norm, rope, route, swiglu, token_logprobs, top_experts, trained_operand, weight_operand,
)  # fmt: skip
KERNELS: dict[str, Callable[..., Any]] = {kernel.__name__: kernel for kernel in _ALL}

"""The routed experts of an MoE layer: two grouped products with SwiGLU between them, and the weighted sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fp8rl.numerics.backend.dispatch import op
from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.numerics.ops.linear import Backward
from fp8rl.numerics.ops.low_rank import LowRank, grouped_low_rank_term, low_rank_of
from fp8rl.numerics.ops.norm import swiglu
from fp8rl.numerics.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """One matrix of every expert."""

    weights: Sequence[torch.Tensor] | torch.Tensor
    """The parameters [N, K], or one stack of them."""
    operand: Any = None
    """Their operand; None: not quantized."""
    low_rank: LowRank | None = None
    """The adapter, each expert's own or one for all; None: none."""


@op
def experts(
    x: torch.Tensor,
    counts: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
) -> torch.Tensor:
    """Run each expert's MLP on its own tokens: x [T, H] sorted by expert, counts int64 [experts], -> [T, H].

    An expert's w13 is [2F, H], gate rows first; its w2 is [H, F]. Rounded to x's dtype after each of the two products
    and after SwiGLU. Adapters are added as `numerics.ops.low_rank` says. The router's probability is applied by the
    caller, after this. An expert may have no tokens.
    """
    hidden = swiglu(adapted_grouped_linear(x, counts, w13, spec, backward))
    return adapted_grouped_linear(hidden, counts, w2, spec, backward)


def adapted_grouped_linear(
    x: torch.Tensor, counts: torch.Tensor, w: ExpertWeights, spec: QuantSpec | None, backward: Backward
) -> torch.Tensor:
    """Compute `grouped_linear` with these weights, and with their adapter if there is one."""
    low_rank, plus = w.low_rank, None
    if low_rank is not None and low_rank.per_expert:
        h = grouped_linear(x, counts, low_rank.a)
        plus = low_rank.on_rows(grouped_low_rank_term(h, counts, low_rank.b, low_rank.scale, low_rank.parts))
    elif low_rank is not None:
        plus = low_rank_of(x, low_rank)
    return grouped_linear(x, counts, w.weights, w.operand, spec, backward, plus)


def group_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order [T * k] that sorts (token, choice) pairs of int64 [T, k] by expert, and tokens per expert."""
    flat = experts.reshape(-1)
    counts = flat.new_zeros(num_experts).scatter_add(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), counts


@op
def combine(outputs: torch.Tensor, probs: torch.Tensor, order: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weighted sum over each token's experts, in ascending expert id, in FP32, rounded once to `dtype`.

    outputs [T * k, H] in the order of `group_by_expert`, probs FP32 [T, k] as `route` gives them -> [T, H].
    """
    weighted = torch.empty(outputs.shape, dtype=torch.float32, device=outputs.device)
    weighted[order] = outputs.float() * probs.reshape(-1)[order, None]
    return sum_in_order(weighted.reshape(*probs.shape, -1)).to(dtype)


def sum_in_order(choices: torch.Tensor) -> torch.Tensor:
    """Sum the k choices of each token, the first to the last: [T, k, H] -> [T, H]."""
    total = choices[:, 0]
    for choice in range(1, choices.shape[1]):
        total = total + choices[:, choice]
    return total

"""The routed experts of an MoE layer: two grouped products with SwiGLU between them, and the weighted sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from numerics.ops.grouped import grouped_linear
from numerics.ops.linear import Backward
from numerics.ops.swiglu import swiglu
from numerics.spec import QuantSpec


@dataclasses.dataclass(frozen=True)
class ExpertWeight:
    """One expert's matrix: the parameter [N, K], and what its quantized form dequantizes to (None: not quantized)."""

    weight: torch.Tensor
    dequantized: torch.Tensor | None = None


def experts(
    x: torch.Tensor,
    counts: Sequence[int],
    w13: Sequence[ExpertWeight],
    w2: Sequence[ExpertWeight],
    spec: QuantSpec | None = None,
    backward: Backward = "fp8",
) -> torch.Tensor:
    """Each expert's MLP on its own tokens: x [T, H] sorted by expert, `counts` tokens each, -> [T, H].

    w13[e] is [2F, H], gate rows first; w2[e] is [H, F]. Rounded to x's dtype after each of the two products and after
    SwiGLU. The router's probability is applied by the caller, after this. An expert may have no tokens.
    """
    return _grouped(swiglu(_grouped(x, counts, w13, spec, backward)), counts, w2, spec, backward)


def _grouped(
    x: torch.Tensor, counts: Sequence[int], experts: Sequence[ExpertWeight], spec: QuantSpec | None, backward: Backward
) -> torch.Tensor:
    weights = [expert.weight for expert in experts]
    dequantized = [expert.dequantized for expert in experts if expert.dequantized is not None]
    if spec is None or not dequantized:
        return grouped_linear(x, counts, weights)
    return grouped_linear(x, counts, weights, dequantized, spec, backward)


def group_by_expert(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """experts int64 [T, k] -> the order [T * k] that sorts (token, choice) pairs by expert, and tokens per expert."""
    flat = experts.reshape(-1)
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts).tolist()


def combine(outputs: torch.Tensor, probs: torch.Tensor, order: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weighted sum over each token's experts, in ascending expert id, in FP32, rounded once to `dtype`.

    outputs [T * k, H] in the order of `group_by_expert`, probs FP32 [T, k] as `route` gives them -> [T, H].
    """
    weighted = torch.empty(outputs.shape, dtype=torch.float32, device=outputs.device)
    weighted[order] = outputs.float() * probs.reshape(-1)[order, None]
    choices = weighted.reshape(*probs.shape, -1)
    total = choices[:, 0]
    for choice in range(1, probs.shape[1]):
        total = total + choices[:, choice]
    return total.to(dtype)

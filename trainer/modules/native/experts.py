"""Megatron's grouped experts, and the emulated grouped product in them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor

from fp8rl.numerics.ops.grouped import grouped_linear
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import GroupedWeights


class Experts(TEGroupedMLP):
    """Megatron's grouped experts, with the router's probabilities applied to their output.

    Megatron multiplies before fc2, so that they would be part of what is quantized there; engines multiply after it.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H] sorted by expert, probabilities [T] -> ([T, H], no bias), rounded before and after the product"""
        ones = torch.ones_like(permuted_probs)
        output, bias = super().forward(permuted_local_hidden_states, tokens_per_expert, ones)
        return (output * permuted_probs.unsqueeze(-1)).to(output.dtype), bias


class GroupedLinear(GroupedWeights):
    """One product per expert of this rank, in FP8 where the spec wants it: TransformerEngine's GroupedLinear."""

    def __init__(self, *args: Any, precision: LayerPrecision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        """[T, K] sorted by expert, m_splits rows each -> ([T, N], no bias)"""
        p, weights = self.precision, self.weights()
        if not p.quantizes(self.kind):
            products = [F.linear(rows, weight) for rows, weight in zip(x.split(m_splits), weights, strict=True)]
            return torch.cat(products), None
        counts = torch.tensor(m_splits, device=x.device)
        return grouped_linear(x, counts, weights, p.group_operand(weights), p.spec, p.backward), None

"""The grouped linear layers inside Megatron's TEGroupedMLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from numerics.ops.grouped import grouped_linear
from trainer.modules.precision import Precision
from trainer.modules.weights import GroupedWeights


class GroupedLinear(GroupedWeights):
    """One product per expert of this rank, in FP8 where the spec wants it: TransformerEngine's GroupedLinear."""

    def __init__(self, *args: Any, precision: Precision, kind: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.precision, self.kind = precision, kind

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        """[T, K] sorted by expert, m_splits rows each -> ([T, N], no bias)"""
        p, weights = self.precision, self.weights()
        if not p.quantizes(self.kind):
            products = [F.linear(rows, weight) for rows, weight in zip(x.split(m_splits), weights, strict=True)]
            return torch.cat(products), None
        dequantized = [p.dequantized(weight) for weight in weights]
        return grouped_linear(x, m_splits, weights, dequantized, p.spec, p.backward), None

"""Statistics that metrics of tokens and of sequences share: clamped exponents, percentiles, effective sample size."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_EXPONENT = 20.0
"""Exponents are clamped to ±20 before exp: e^20 is far outside every clip range and still far from overflow."""


def clamp_exponent(exponent: Tensor) -> Tensor:
    """Return the exponent clamped to ±20."""
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def order_statistics(values: Tensor) -> Tensor:
    """[median, 99th percentile, maximum] of [N], the percentiles by nearest rank, so that each is a value that occurs.

    An increasing function of the values has that function of these as its own.
    """
    return torch.stack([_percentile(values, 50), _percentile(values, 99), values.max()])


def distribution(name: str, mean: Tensor, order: Tensor) -> dict[str, float]:
    """`name_mean`, `name_p50`, `name_p99` and `name_max`; mean: scalar, order: as from `order_statistics`."""
    suffixes = ("mean", "p50", "p99", "max")
    return {f"{name}_{suffix}": value for suffix, value in zip(suffixes, [mean.item(), *order.tolist()])}


def effective_sample_size(weights: Tensor) -> Tensor:
    """(Σw)² / (N Σw²) of positive weights [N]: 1 where all are equal, 1/N where one outweighs the rest (Kish)."""
    return weights.sum() ** 2 / (weights.numel() * (weights**2).sum())


def _percentile(values: Tensor, percent: int) -> Tensor:
    """The smallest value that at least `percent` of all do not exceed."""
    rank = -(-percent * values.numel() // 100)
    return values.kthvalue(rank).values

"""Defines rotary position embeddings (Su et al. 2021): Llama's and Qwen's rotate-half form, and neighbouring pairs."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.backend.dispatch import composed, op
from fp8rl.numerics.ops.norm import rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(ABC):
    """The method by which a model's context was lengthened. It changes the frequencies of the rotation."""

    factor: float
    """The factor by which the context was lengthened."""
    original: int
    """Number of positions before the context was lengthened."""

    @property
    def temperature(self) -> float:
        """Return the factor by which scores are multiplied in addition to 1 / sqrt(a head's width)."""
        return 1.0

    @abstractmethod
    def lengthened(self, plain: Tensor, theta: float) -> Tensor:
        """Return the radians per position of each pair, FP64 [rotary_dim / 2]. plain: the same without lengthening."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn(Scaling):
    """The frequencies of a model whose context was lengthened by YaRN (arXiv 2309.00071, 3.2 and 3.3)."""

    beta_fast: float
    """A pair that makes at least this many turns over the original positions keeps its frequency."""
    beta_slow: float
    """A pair that makes at most this many turns over the original positions has its frequency divided by the factor."""
    mscale: float
    """Weight of the factor's logarithm in the temperature of the softmax."""

    @property
    def temperature(self) -> float:
        return (0.1 * self.mscale * math.log(self.factor) + 1.0) ** 2 if self.factor > 1 else 1.0

    def lengthened(self, plain: Tensor, theta: float) -> Tensor:
        rotary_dim = 2 * len(plain)

        def pair_with(turns: float) -> float:
            """Return the pair that makes this number of turns over the original positions."""
            return rotary_dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_with(self.beta_fast)), 0)
        high = min(math.ceil(pair_with(self.beta_slow)), rotary_dim - 1)
        slow = ((torch.arange(len(plain), dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
        return slow * plain / self.factor + (1 - slow) * plain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """The frequencies of Llama 3.1 and later (`rope_type: llama3`): pairs that make few turns over the original
    positions turn slower by the factor, pairs that make many turns are left alone, and the others are interpolated."""

    low: float
    """A pair that makes at most this many turns over the original positions has its frequency divided by the factor."""
    high: float
    """A pair that makes at least this many turns over the original positions keeps its frequency."""

    def lengthened(self, plain: Tensor, theta: float) -> Tensor:
        turns = self.original * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


@composed
def rope(
    x: Tensor, positions: Tensor, theta: float, rotary_dim: int | None = None, scaling: Scaling | None = None
) -> Tensor:
    """Rotate x [B, S, heads, D] by its positions int64 [B, S]. FP32 inside, rounded once to x's dtype.

    rotary_dim: number of leading channels of a head that are rotated; None: all. scaling: the method of a lengthened
    context; None: the frequencies follow from theta alone.
    """
    return _Rope.apply(x, positions, theta, rotary_dim or x.shape[-1], scaling, False)


@composed
def rope_pairs(x: Tensor, positions: Tensor, theta: float, scaling: Scaling | None = None) -> Tensor:
    """Rotate x [B, S, heads, D] as `rope` does, but with neighbours (x0, x1), (x2, x3), ... as the pairs."""
    return _Rope.apply(x, positions, theta, x.shape[-1], scaling, True)


@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """The norms of each head of queries and keys, before they are rotated."""

    queries: Tensor
    """The weight [D] of the norm of queries."""
    keys: Tensor
    eps: float


@dataclasses.dataclass(frozen=True)
class NewSlots:
    """The slots of a paged cache that get the keys and values of new tokens."""

    keys: Tensor
    """The cache's keys [slots, kv heads, D]."""
    values: Tensor
    """The cache's values [slots, kv heads, E]."""
    slots: Tensor
    """The slot of each new token, int [T]."""
    new_values: Tensor
    """The values of the new tokens [T, kv heads, E]."""


@op
def rope_heads(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    theta: float,
    rotary_dim: int | None = None,
    scaling: Scaling | None = None,
    norms: HeadNorms | None = None,
    cache: NewSlots | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm each head if there are norms (`rms_norm`), rotate it (`rope`), and put keys and values into a cache.

    q [T, heads, D], k [T, kv heads, D], positions int64 [T]. cache: None if other code writes it.
    """
    if norms is not None:
        q, k = rms_norm(q, norms.queries, norms.eps), rms_norm(k, norms.keys, norms.eps)
    q, k = (rope(x[None], positions[None], theta, rotary_dim, scaling)[0] for x in (q, k))
    if cache is not None:
        cache.keys[cache.slots.long()], cache.values[cache.slots.long()] = k, cache.new_values
    return q, k


def frequencies(theta: float, rotary_dim: int, scaling: Scaling | None = None) -> Tensor:
    """Return the radians per position of each pair, FP64 [rotary_dim / 2]."""
    plain = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return plain if scaling is None else scaling.lengthened(plain, theta)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positions: Tensor, theta: float, rotary_dim: int, scaling: Scaling | None, pairs: bool
    ) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.form = theta, rotary_dim, scaling, pairs
        return rotated(x, positions, theta, rotary_dim, scaling, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        theta, rotary_dim, scaling, pairs = ctx.form
        return rotated(grads[0], ctx.saved_tensors[0], theta, rotary_dim, scaling, pairs, True), *(None,) * 5


@op
def rotated(
    x: Tensor,
    positions: Tensor,
    theta: float,
    rotary_dim: int,
    scaling: Scaling | None,
    pairs: bool,
    back: bool = False,
) -> Tensor:
    """Rotate x without a gradient, as `rope_pairs` if `pairs`, else as `rope`. back: rotate backwards."""
    # Whole powers of two, so that few tables are ever made.
    length = 1 << max(10, int(positions.max()).bit_length()) if positions.numel() else 1
    cos, sin = _table(theta, rotary_dim, scaling, length, x.device)[:, positions].unsqueeze(-2)
    sin = -sin if back else sin
    if pairs:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)
    first, second = x[..., :rotary_dim].float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


@functools.lru_cache(maxsize=8)
def _table(theta: float, rotary_dim: int, scaling: Scaling | None, length: int, device: torch.device) -> Tensor:
    """Return cos and sin, FP32 [2, length, rotary_dim / 2]."""
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies(theta, rotary_dim, scaling)
    return torch.stack((angles.cos(), angles.sin())).float().to(device)

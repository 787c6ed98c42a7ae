"""Holds the precision of a model's GEMMs, and of the keys and values in its attention."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics import ops
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.kv import CODES, KVFormat
from fp8rl.numerics.ops.linear import Backward
from fp8rl.numerics.ops.low_rank import Fused, LowRank
from fp8rl.numerics.rounding import fp8_max
from fp8rl.numerics.spec import QuantSpec
from fp8rl.numerics.weight_cache import WeightCache

# The adapter of one weight parameter, as a module's forward asks for it.


@dataclass(frozen=True)
class Adapter:
    """The adapter of a weight [N, K] or of stacked weights [experts, N, K].

    Attributes:
        a: [parts * rank, K], the A of each adapted matrix in the weight, one below the other. If each expert has its
            own adapter, a and b have the experts as first dimension.
        b: [M, rank], the B of the adapted rows, in the order of the weight's rows.
        parts: number of adapted matrices in the weight. It is above 1 only if the weight is fused.
        fused: which rows of the weight b's rows belong to. None for a single matrix.
    """

    a: nn.Parameter
    b: nn.Parameter
    config: AdapterSection
    parts: int = 1
    fused: Fused | None = None

    @property
    def merges(self) -> bool:
        """Whether the adapter is merged into the weight that products take."""
        return self.config.mode == "merged"

    @property
    def low_rank(self) -> LowRank:
        """The adapter in the form that products take."""
        wide = self.b if self.fused is None else self.fused.wide(self.b)
        return LowRank(self.a, wide, self.config.scale, self.parts)

    def term(self, x: Tensor, k_splits: int = 1) -> Tensor | None:
        """Return the adapter's term, which the product of x adds before it rounds. None for a merged adapter."""
        return None if self.merges else ops.low_rank_of(x, self.low_rank, k_splits)

    def with_adapter_gradient(self, product: Tensor, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """Return `product` unchanged. In the backward pass its gradient also goes to a merged adapter's A and B.

        An adapter that is not merged gets its gradients through `term`.
        """
        return ops.with_adapter_gradient(product, x, self.low_rank, counts) if self.merges else product

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight with the adapter merged into it."""
        return ops.merged(weight, self.low_rank)


def initial_a(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial A of a matrix, FP32 [rank, K]. It is uniform, as in `peft`, and depends only on the matrix's
    name and the run's seed. The initial B is zero."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@dataclass
class Precision:
    """The precision of a model in the trainer. To change it while the model is in use, set `numerics`.

    Attributes:
        cache: the operands of products at the current weight version.
        layers: number of layers in the whole model.
        bare: the operands of the weights without adapters, while the model computes without adapters. Otherwise None.
    """

    numerics: NumericsConfig
    cache: WeightCache
    layers: int
    bare: WeightCache | None = None

    @property
    def weights(self) -> WeightCache:
        """The operands that products take at present."""
        return self.cache if self.bare is None else self.bare

    @contextmanager
    def without_adapters(self, adapter: AdapterSection | None) -> Iterator[None]:
        """Let the model compute without adapters inside the block. adapter: the settings of the model's adapters."""
        # Products of a merged adapter have operands of their own; the base has operands only inside the block.
        self.bare = WeightCache() if adapter is not None and adapter.mode == "merged" else self.cache
        try:
            yield
        finally:
            self.bare = None


@dataclass(frozen=True)
class LayerPrecision:
    """The precision of one layer. Modules read it in each forward pass, so that a change takes effect."""

    model: Precision
    layer: int

    @property
    def spec(self) -> QuantSpec:
        """The quantization spec of the layer's forward pass."""
        return self.model.numerics.trainer_spec.of_layer(self.layer, self.model.layers)

    @property
    def backward(self) -> Backward:
        """The precision of a quantized module's GEMMs in the backward pass."""
        numerics = self.model.numerics
        return "fp8" if numerics.trainer == "fp8" and numerics.spec.gradient.quantized else "bf16"

    def quantizes(self, kind: str | None) -> bool:
        """Return whether the GEMMs of this module kind run in FP8. kind: None for a product that never does."""
        return kind is not None and self.spec.quantizes(kind)

    def operand(self, weight: Tensor) -> Any:
        """Return the operand of a quantized weight [N, K] or [experts, N, K]."""
        return self.model.weights.operand(weight, self.spec.weight)

    def fp8_linear(self, x: Tensor, weight: Tensor, k_splits: int = 1, plus: Tensor | None = None) -> Tensor:
        """Compute `ops.fp8_linear` of x [..., K] and weight [N, K]."""
        return ops.fp8_linear(x, weight, self.operand(weight), self.spec, self.backward, k_splits, plus)

    def product(
        self, kind: str | None, x: Tensor, weight: Tensor, adapter: Adapter | None = None, k_splits: int = 1
    ) -> Tensor:
        """Compute the product of x [..., K] and weight [N, K] with the adapter, in FP8 if `kind` is quantized."""
        adapter = self.used(adapter)
        plus = adapter.term(x, k_splits) if adapter is not None else None
        if self.quantizes(kind):
            out = self.fp8_linear(x, weight, k_splits, plus)
        else:
            out = ops.linear(x, self.plain(weight), k_splits, plus)
        return out if adapter is None else adapter.with_adapter_gradient(out, x)

    def plain(self, weight: Tensor) -> Tensor:
        """Return the operand of an unquantized weight."""
        return self.model.weights.plain(weight)

    def used(self, adapter: Adapter | None) -> Adapter | None:
        """Return the adapter, or None while the model computes without adapters."""
        return None if self.model.bare is not None else adapter


# Keys and values in the format of the engine's cache, and what part of them saturates.


class KVRounding:
    """Rounds an attention's keys and values to the run's `KVFormat`. `count` makes it count saturated FP8 numbers."""

    def __init__(self, precision: LayerPrecision) -> None:
        self._precision = precision
        self.counts: Tensor | None = None
        """int64 [2] on the device: how many numbers have saturated, and how many were counted in all."""
        self.real: Tensor | None = None
        """bool [b, s], False for the padding tokens of this forward pass. None: do not count."""

    @property
    def format(self) -> KVFormat:
        """The present format. It changes with the numerics of the model."""
        return self._precision.model.numerics.kv_format

    def keys(self, x: Tensor) -> Tensor:
        """Return `KVFormat.keys` of x [b, s, ...], or of packed rows [s, ...]."""
        return self._counted(x, self.format.key_scale, self.format.keys(x))

    def values(self, x: Tensor) -> Tensor:
        """Return `KVFormat.values` of x [b, s, ...], or of packed rows [s, ...]."""
        return self._counted(x, self.format.value_scale, self.format.values(x))

    def _counted(self, x: Tensor, scale: float, rounded: Tensor) -> Tensor:
        if self.format.quantized and self.real is not None:
            beyond = (x.detach().abs() > fp8_max(CODES) * scale).reshape(self.real.numel(), -1)
            real = self.real.reshape(-1, 1)
            both = torch.stack(((beyond & real).sum(), real.sum() * beyond.shape[1]))
            self.counts = both if self.counts is None else self.counts + both
        return rounded


def count(model: nn.Module, real: Tensor | None) -> None:
    """Start or stop the count of saturated keys and values in forward passes.

    real: bool [b, s], False in the padding. None stops. Stop before a backward pass, which may recompute the forward.
    """
    for rounding in _rounding_of(model):
        rounding.real = real


def kv_saturated(model: nn.Module) -> float:
    """Return the fraction of keys and values that saturated since the last call, over all ranks.

    All ranks must call this, also ranks whose layers have no keys.
    """
    total = torch.zeros(2, dtype=torch.int64, device=next(model.parameters()).device)
    for rounding in _rounding_of(model):
        if rounding.counts is not None:
            total += rounding.counts
            rounding.counts = None
    dist.all_reduce(total)
    saturated, numbers = total.tolist()
    return float(saturated / max(numbers, 1))


def _rounding_of(model: nn.Module) -> Iterator[KVRounding]:
    for module in model.modules():
        if isinstance(kv := getattr(module, "kv", None), KVRounding):
            yield kv

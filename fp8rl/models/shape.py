"""Computes size and cost of a model from its table of tensors and its families, without reading a weight.

Consecutive equal layers are computed once, so that a model of tens of thousands of tensors takes only a moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import groupby
from typing import Literal

import torch

from fp8rl.models.families import Activations, Family, first_tensors, last_tensors
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.spec import QuantSpec

Share = Literal["split", "experts", "replicated"]
"""How the ranks of a pipeline stage share a weight. `split`: over tensor-parallel ranks. `experts`: whole experts are
spread over expert-parallel ranks. `replicated`: each rank has it."""

BF16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """Equal weights of a model: one parameter of Megatron's, in consecutive layers."""

    name: str
    """The name of the op that reads the weight, e.g. `qkv`."""
    rows: int
    """N of a product x [T, K] @ W [N, K]^T."""
    columns: int
    """K of the product; a vector has one column."""
    pieces: tuple[int, ...] = ()
    """The number of rows of each checkpoint tensor that the weight consists of."""
    kind: str | None = None
    """The module kind that a spec names to quantize the weight; None: it is never quantized."""
    share: Share
    place: Literal["first", "attention", "mlp", "last"]
    """The place of the weight: before the layers, in a part of each layer, or after the layers."""
    layers: range = range(0)
    """The layers that have the weight, counted from 0; empty for a weight outside the layers."""
    copies: int = 1
    """The number of such weights in each of the layers."""
    taken: int = 0
    """How many of the copies a token is multiplied with; 0 if the weight is not of a product."""
    kv_rows: int = 0
    """The number of the rows that belong to key-value heads, of which each of more ranks of an engine has one whole."""
    by_heads: bool = False
    """True if Megatron interleaves the weight's tensors by heads."""
    tied: bool = False
    """True if the weight is a copy of the embedding. Only the last of several pipeline stages holds this copy."""
    trained: bool = True
    """True for a parameter, False for an FP32 buffer."""
    fp32: bool = False
    """True for a parameter in FP32 on both sides."""

    @property
    def size(self) -> int:
        """The number of elements of one copy."""
        return self.rows * self.columns

    @property
    def in_layers(self) -> bool:
        return self.place in ("attention", "mlp")

    @property
    def count(self) -> int:
        """The number of copies in the whole model."""
        return self.copies * (len(self.layers) if self.in_layers else 1)


@dataclass(frozen=True)
class Shape:
    """The size and the cost of a model."""

    sizes: ModelSizes
    families: tuple[Family, ...]
    adapters: tuple[TensorRow, ...] = ()
    """Rows of the adapters that are trained in place of the weights."""

    @cached_property
    def weights(self) -> tuple[WeightGroup, ...]:
        """The weights of a checkpoint, family by family."""
        s = self.sizes
        groups = list(_groups(first_tensors(s), s, "first"))
        for family, layers in self.layers_of():
            groups += _groups(family.tensors(s, layers.start), s, family.part, layers)
        groups += _groups(last_tensors(s), s, "last")
        if s.tied:
            groups += _groups(first_tensors(s), s, "last", tied=True)
        return tuple(groups)

    @cached_property
    def parameters(self) -> int:
        """The number of elements of all weights; a tied weight counts once."""
        return sum(weight.size * weight.count for weight in self.weights if not weight.tied)

    @cached_property
    def active_parameters(self) -> int:
        """The number of weights that one token is multiplied with. The output projection counts, the embedding does
        not."""
        return sum(w.size * w.taken * (len(w.layers) if w.in_layers else 1) for w in self.weights)

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes of adapters in an engine: all A and B. If a product fuses matrices, their Bs are stored once more, in
        rows as wide as the ranks of all these matrices together (`numerics.ops.low_rank`)."""
        fused: dict[tuple[str, int | None], list[TensorRow]] = {}
        for row in self.adapters:
            fused.setdefault((row.engine.parameter, row.engine.index), []).append(row)
        wide = sum(
            sum(row.shape[0] for row in rows) * sum(row.shape[1] for row in rows)
            for rows in fused.values()
            if len(rows) > 1 and ".lora_B." in rows[0].name
        )
        return (wide + sum(math.prod(row.shape) for row in self.adapters)) * BF16_BYTES

    def kv_bytes(self, each: int = BF16_BYTES, ranks: int = 1) -> int:
        """Bytes of one token in the caches of all layers on one rank of an engine with `ranks` tensor-parallel ranks.
        each: bytes of an element."""
        return each * self._sum(lambda family: family.cached(self.sizes, ranks))

    def request_bytes(self, ranks: int = 1) -> int:
        """Bytes of one request that do not depend on its length (`kv_bytes` counts its tokens): in all layers, on one
        rank of an engine with `ranks` tensor-parallel ranks."""
        return self._sum(lambda family: family.held(self.sizes, ranks))

    def quantized_layers(self, weight: WeightGroup, spec: QuantSpec) -> range:
        """Return the layers of `weight` in which `spec` quantizes it."""
        if weight.kind is None or not spec.quantizes(weight.kind):
            return range(0)
        inner = range(spec.first_layers_bf16, self.sizes.layers - spec.last_layers_bf16)
        return overlap(weight.layers, inner)

    def attention_flops(self, context: float) -> float:
        """FLOPs of one token's forward pass over `context` keys, in all layers: query times keys, weights times values,
        and the FLOPs of recurrent layers, which do not depend on `context`."""
        recurrent = self._sum(lambda family: family.recurrent(self.sizes))
        return recurrent + 2.0 * context * self._sum(lambda family: family.scored(self.sizes))

    def training_flops(self, length: int) -> float:
        """FLOPs of one token in a sequence of `length`, forward and backward, without recomputation: 6 per active
        parameter, and 3 times `attention_flops`, for which half of the tokens are keys."""
        return 6.0 * self.active_parameters + 3 * self.attention_flops(length / 2)

    def activations(self, layer: int, part: str | None = None) -> Activations:
        """Bytes that training keeps for the backward pass, for a layer or for one part of it."""
        return self._activations[layer][part]

    @cached_property
    def _activations(self) -> list[dict[str | None, Activations]]:
        """The activations of each layer by part; None: the whole layer. Cached, since plans read it 100,000 times."""

        def total(kept: list[Activations]) -> Activations:
            return Activations(*(sum(getattr(part, field.name) for part in kept) for field in fields(Activations)))

        parts: set[str | None] = {None, *(family.part for family in self.families)}
        found = []
        for layer in range(self.sizes.layers):
            within = [(f.part, f.activations(self.sizes)) for f in self.families if f.within(self.sizes, layer)]
            found.append({part: total([kept for of, kept in within if part in (None, of)]) for part in parts})
        return found

    def _sum(self, of_family: Callable[[Family], int]) -> int:
        return sum(of_family(family) * len(layers) for family, layers in self.layers_of())

    def layers_of(self) -> Iterator[tuple[Family, range]]:
        """Yield each family with each range of consecutive layers that have the family."""
        for family in self.families:
            for has, layers in groupby(range(self.sizes.layers), partial(family.within, self.sizes)):
                if has:
                    run = list(layers)
                    yield family, range(run[0], run[-1] + 1)


def _groups(
    rows: Iterator[TensorRow],
    sizes: ModelSizes,
    place: Literal["first", "attention", "mlp", "last"],
    layers: range = range(0),
    tied: bool = False,
) -> Iterator[WeightGroup]:
    """Yield the parameters that hold these rows. Equal experts are one parameter with several copies."""
    fused: dict[str, list[TensorRow]] = {}
    for row in rows:
        if not row.expert:  # the first one stands for all
            fused.setdefault(row.megatron.parameter, []).append(row)
    for members in fused.values():
        row, expert = members[0], members[0].expert is not None
        product = row.product or tied
        yield WeightGroup(
            name=row.op,
            rows=sum(member.shape[0] for member in members),
            columns=math.prod(row.shape[1:]),
            pieces=tuple(member.shape[0] for member in members) if len(members) > 1 else (),
            kind=row.kind,
            share="experts" if expert else "replicated" if row.engine.split is None else "split",
            place=place,
            layers=layers,
            copies=sizes.experts if expert else 1,
            taken=(sizes.top_k if expert else 1) if product else 0,
            kv_rows=sum(member.shape[0] for member in members if member.engine.kv_heads),
            by_heads=row.megatron.layout == "heads",
            tied=tied,
            trained=not row.megatron.buffer,
            fp32=row.trained == torch.float32,
        )


def overlap(one: range, other: range) -> range:
    """Return the layers that two ranges have in common."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))

"""Size and cost of a model: sums over the rows of its tensors and over its families, without a weight.

One layer of each run of equal ones is looked at, so that a model of tens of thousands of tensors takes a moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import groupby
from typing import Literal

import torch

from fp8rl.models.families import Activations, Family, families_of_layer, first_tensors, last_tensors
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.spec import QuantSpec

Share = Literal["split", "experts", "replicated"]
"""How the ranks of a pipeline stage share a weight: `split` over tensor-parallel ranks; `experts`: whole ones, spread
over expert-parallel ranks; `replicated`: each has it."""

BF16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """Weights of a model that are alike: a parameter of Megatron's, in a run of layers."""

    name: str
    """Of the op that reads it, e.g. `qkv`."""
    rows: int
    """N of a product x [T, K] @ W [N, K]^T."""
    columns: int
    """K; a vector has one column."""
    pieces: tuple[int, ...] = ()
    """Rows of each tensor that the checkpoint has of it."""
    kind: str | None = None
    """Module kind by which a quantization spec decides; None: no spec quantizes it."""
    share: Share
    place: Literal["first", "attention", "mlp", "last"]
    """Before the layers, in a part of them, behind them."""
    layers: range = range(0)
    """Where it is, counted from 0; empty outside the layers."""
    copies: int = 1
    """How many each of these layers has."""
    taken: int = 0
    """How many of them a token takes; 0 for what is no product."""
    by_heads: bool = False
    """Megatron interleaves its tensors by heads."""
    tied: bool = False
    """It is the same tensor as another one, which only a last pipeline stage of its own holds again."""
    trained: bool = True
    """It is a parameter; the others are FP32 buffers."""
    fp32: bool = False
    """It is a parameter in FP32 on both sides."""

    @property
    def size(self) -> int:
        """Elements of one."""
        return self.rows * self.columns

    @property
    def in_layers(self) -> bool:
        return self.place in ("attention", "mlp")

    @property
    def count(self) -> int:
        """Return how many the model has."""
        return self.copies * (len(self.layers) if self.in_layers else 1)


@dataclass(frozen=True)
class Shape:
    """A model in numbers."""

    sizes: ModelSizes
    families: tuple[Family, ...]
    adapters: tuple[TensorRow, ...] = ()
    """Rows of the adapters that are trained in place of the weights."""

    @cached_property
    def weights(self) -> tuple[WeightGroup, ...]:
        """All weights that a checkpoint has, family by family."""
        s = self.sizes
        groups = list(_groups(first_tensors(s), s, "first"))
        for family, layers in self.layers_of():
            groups += _groups(family.tensors(s, layers.start), s, family.part, layers)
        groups += _groups(last_tensors(s), s, "last")
        if s.tied:
            (embedding,) = _groups(first_tensors(s), s, "last", tied=True)
            groups.append(embedding)
        return tuple(groups)

    @cached_property
    def parameters(self) -> int:
        """Elements of all weights, a tied one counted once."""
        return sum(weight.size * weight.count for weight in self.weights if not weight.tied)

    @cached_property
    def active_parameters(self) -> int:
        """Elements of the products that one token takes, the output projection among them, the embedding not."""
        return sum(w.size * w.taken * (len(w.layers) if w.in_layers else 1) for w in self.weights)

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes of adapters in an engine: the pairs, and of matrices that one product fuses each B once more, in rows
        as wide as all of their ranks together (`numerics.ops.low_rank`)."""
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
        """Bytes of one token in the caches of all layers, of `each` bytes an element, in one of the tensor-parallel
        `ranks` of an engine."""
        return each * self._sum(lambda family: family.cached(self.sizes, ranks))

    def request_bytes(self, ranks: int = 1) -> int:
        """Bytes that a request holds in all layers beside the rows of its tokens, in one of the tensor-parallel `ranks`
        of an engine."""
        return self._sum(lambda family: family.held(self.sizes, ranks))

    def quantized_layers(self, weight: WeightGroup, spec: QuantSpec) -> range:
        """The layers whose weights of this kind `spec` quantizes."""
        if weight.kind is None or not spec.quantizes(weight.kind):
            return range(0)
        inner = range(spec.first_layers_bf16, self.sizes.layers - spec.last_layers_bf16)
        return overlap(weight.layers, inner)

    def attention_flops(self, context: float) -> float:
        """FLOPs of one query in all layers against so many keys, forward: queries times keys, weights times values, and
        what a recurrent layer takes for a token whatever came before."""
        recurrent = self._sum(lambda family: family.recurrent(self.sizes))
        return recurrent + 2.0 * context * self._sum(lambda family: family.scored(self.sizes))

    def training_flops(self, length: int, causal: bool = True) -> float:
        """FLOPs of one token in a sequence of `length`, forward and backward, without recomputation: 6 per active
        parameter, and three times the forward's attention. causal: half of the keys count."""
        return 6.0 * self.active_parameters + 3 * self.attention_flops(length / 2 if causal else length)

    def activations(self, layer: int, part: str | None = None) -> Activations:
        """Bytes that training keeps of a layer, or of one part of it, for the backward."""
        return self._activations[layer][part]

    @cached_property
    def _activations(self) -> list[dict[str | None, Activations]]:
        """The activations of each layer by part, None: of the whole layer. A planner asks a hundred thousand times."""

        def total(kept: list[Activations]) -> Activations:
            return Activations(*(sum(getattr(each, field.name) for each in kept) for field in fields(Activations)))

        parts: set[str | None] = {None, *(family.part for family in self.families)}
        found = []
        for layer in range(self.sizes.layers):
            within = [(f.part, f.activations(self.sizes)) for f in families_of_layer(self.families, self.sizes, layer)]
            found.append({part: total([kept for of, kept in within if part in (None, of)]) for part in parts})
        return found

    def _sum(self, of_family: Callable[[Family], int]) -> int:
        return sum(of_family(family) * len(layers) for family, layers in self.layers_of())

    def layers_of(self) -> Iterator[tuple[Family, range]]:
        """Each family, with each run of layers without a gap that have it."""
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
    """The parameters that hold these rows, alike experts counted."""
    fused: dict[str, list[TensorRow]] = {}
    for row in rows:
        if not row.expert:  # the first one stands for all
            fused.setdefault(row.megatron.parameter, []).append(row)
    for held in fused.values():
        row, expert = held[0], held[0].expert is not None
        product = row.product or tied
        yield WeightGroup(
            name=row.op,
            rows=sum(each.shape[0] for each in held),
            columns=math.prod(row.shape[1:]),
            pieces=tuple(each.shape[0] for each in held) if len(held) > 1 else (),
            kind=row.kind,
            share="experts" if expert else "replicated" if row.engine.split is None else "split",
            place=place,
            layers=layers,
            copies=sizes.experts if expert else 1,
            taken=(sizes.top_k if expert else 1) if product else 0,
            by_heads=row.megatron.layout == "heads",
            tied=tied,
            trained=not row.megatron.buffer,
            fp32=row.trained == torch.float32,
        )


def overlap(one: range, other: range) -> range:
    """Return what two runs of layers have in common."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))

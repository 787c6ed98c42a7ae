"""What a model weighs and computes, by closed formula from its sizes; each architecture says its own (`shape`).

No tensor is named and no table is made, so that architectures are calculated too which nothing here can train. Only
adapters are those of a model's table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import TensorRow
from fp8rl.numerics.spec import QuantSpec

Share = Literal["split", "experts", "replicated"]
"""How the ranks of a pipeline stage share a weight: `split` over tensor-parallel ranks; `experts`: whole ones, spread
over expert-parallel ranks; `replicated`: each has it."""
Place = Literal["first", "layers", "last"]
"""Before the layers, in them, behind them."""

BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class WeightGroup:
    """Weights of a model that are alike.

    Attributes:
        name: of the product or vector, e.g. `qkv`.
        rows, columns: N and K of a product x [T, K] @ W [N, K]^T; a vector has one column.
        pieces: rows of each tensor that the checkpoint has of it.
        kind: module kind by which a quantization spec decides; None: no spec quantizes it.
        place, layers: where they are; layers counted from 0, and empty outside `layers`.
        copies: in each such layer. taken: of them by a token; 0 for what is no product.
        tied: the same tensor as another one, which only a last pipeline stage of its own holds again.
        trained: whether it is a parameter; the others are FP32 buffers.
    """

    name: str
    rows: int
    columns: int
    pieces: tuple[int, ...] = ()
    kind: str | None = None
    share: Share
    place: Place = "layers"
    layers: range = range(0)
    copies: int = 1
    taken: int = 0
    tied: bool = False
    trained: bool = True

    @property
    def size(self) -> int:
        """Elements of one."""
        return self.rows * self.columns

    @property
    def count(self) -> int:
        """How many the model has."""
        return self.copies * (len(self.layers) if self.place == "layers" else 1)


@dataclass(frozen=True)
class Activations:
    """Bytes per token of a layer that a BF16 trainer keeps for the backward: of the attention with both norms and
    residuals, and of the MLP. fp8: what TransformerEngine's FP8 products change of them."""

    attention: float
    mlp: float
    fp8: float

    @property
    def bf16(self) -> float:
        return self.attention + self.mlp


@dataclass(frozen=True)
class Shape:
    """A model in numbers.

    Attributes:
        weights: everything that a checkpoint has, in the order of the forward.
        cached: elements that one token occupies in a layer's cache.
        value_dim: width of a head's value.
        adapters: rows of the adapters that are trained in place of the weights.
    """

    sizes: ModelSizes
    weights: tuple[WeightGroup, ...]
    cached: int
    value_dim: int
    adapters: tuple[TensorRow, ...] = ()

    @cached_property
    def parameters(self) -> int:
        """Elements of all weights, a tied one counted once."""
        return sum(weight.size * weight.count for weight in self.weights if not weight.tied)

    @cached_property
    def active_parameters(self) -> int:
        """Elements of the products that one token takes, the output projection among them, the embedding not."""
        return sum(weight.size * self._taken(weight) for weight in self.weights)

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

    def kv_bytes(self, each: int = BF16_BYTES) -> int:
        """Bytes of one token in the KV cache of all layers, of `each` bytes an element."""
        return self.cached * self.sizes.layers * each

    def quantized_layers(self, weight: WeightGroup, spec: QuantSpec) -> range:
        """The layers whose weights of this kind `spec` quantizes."""
        if weight.kind is None or not spec.quantizes(weight.kind):
            return range(0)
        inner = range(spec.first_layers_bf16, self.sizes.layers - spec.last_layers_bf16)
        return overlap(weight.layers, inner)

    def attention_flops(self, context: float) -> float:
        """FLOPs of one query in all layers against so many keys, forward: queries times keys, weights times values."""
        return 2.0 * context * self.sizes.heads * (self.sizes.head_dim + self.value_dim) * self.sizes.layers

    def training_flops(self, length: int, causal: bool = True) -> float:
        """FLOPs of one token in a sequence of `length`, forward and backward, without recomputation: 6 per active
        parameter, and three times the forward's attention. causal: half of the keys count."""
        return 6.0 * self.active_parameters + 3 * self.attention_flops(length / 2 if causal else length)

    def activations(self, layer: int) -> Activations:
        """What training keeps of a layer for the backward.

        With H hidden, D head, F expert width, k of E experts: 8H + 6D(h + kv) + k(4H + 6F) + 4E. An FP8 product keeps
        1.03 bytes of an element of its input in place of 2, and the output projection's input beside the attention's:
        less 0.97(H + k(H + F)), more 1.03hD. A dense MLP counts as one expert without a router, and so do shared
        experts; latent attention counts by the mean of its head sizes.
        """
        s = self.sizes
        head = (s.head_dim + self.value_dim) / 2
        mlps = [(s.top_k, s.expert_size), (1, s.shared_size)] if s.has_experts(layer) else [(1, s.ffn_size)]
        mlps = [(taken, width) for taken, width in mlps if width]
        router = 4 * s.experts if s.has_experts(layer) else 0
        inputs = s.hidden_size + sum(taken * (s.hidden_size + width) for taken, width in mlps)
        return Activations(
            attention=8 * s.hidden_size + 6 * head * (s.heads + s.kv_heads),
            mlp=router + sum(taken * (4 * s.hidden_size + 6 * width) for taken, width in mlps),
            fp8=1.03 * s.heads * head - 0.97 * inputs,
        )

    def _taken(self, weight: WeightGroup) -> int:
        return weight.taken * (len(weight.layers) if weight.place == "layers" else 1)


def decoder(
    sizes: ModelSizes,
    attention: Iterable[WeightGroup],
    *,
    cached: int,
    value_dim: int | None = None,
    expert_bias: bool = False,
) -> Shape:
    """The shape of a decoder whose layers are attention and SwiGLU MLPs or experts, each behind a norm.

    attention: the weights of it, in all layers. cached, value_dim: as in `Shape`; a value is as wide as a head
    unless it says otherwise. expert_bias: the router has a bias for each expert, which is no parameter (DeepSeek-V3).
    """
    weights = tuple(_decoder_weights(sizes, attention, expert_bias))
    return Shape(sizes, weights, cached, sizes.head_dim if value_dim is None else value_dim)


def _decoder_weights(s: ModelSizes, attention: Iterable[WeightGroup], expert_bias: bool) -> Iterator[WeightGroup]:
    every, dense, moe = range(s.layers), range(s.layers - s.moe_layers), range(s.layers - s.moe_layers, s.layers)
    yield WeightGroup(name="embedding", rows=s.vocab_size, columns=s.hidden_size, share="split", place="first")
    yield vector("input_norm", s.hidden_size, every)
    yield from attention
    yield vector("post_norm", s.hidden_size, every)
    yield from _mlp("mlp", s.hidden_size, s.ffn_size, "", "split", dense)
    if s.moe:
        yield product("router", s.experts, s.hidden_size, moe, share="replicated")
        if expert_bias:
            yield vector("expert_bias", s.experts, moe, trained=False)
        yield from _mlp("experts", s.hidden_size, s.expert_size, "experts.", "experts", moe, s.experts, s.top_k)
        if s.shared_size:
            yield from _mlp("shared", s.hidden_size, s.shared_size, "", "split", moe)
    yield WeightGroup(name="final_norm", rows=s.hidden_size, columns=1, share="replicated", place="last")
    yield WeightGroup(
        name="head", rows=s.vocab_size, columns=s.hidden_size, share="split", place="last", taken=1, tied=s.tied
    )


def overlap(one: range, other: range) -> range:
    """What two runs of layers have in common."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def vector(
    name: str,
    size: int,
    layers: range,
    trained: bool = True,
    share: Share = "replicated",
    pieces: tuple[int, ...] = (),
) -> WeightGroup:
    """A vector in each of these layers."""
    return WeightGroup(name=name, rows=size, columns=1, pieces=pieces, share=share, layers=layers, trained=trained)


def product(
    name: str,
    rows: int,
    columns: int,
    layers: range,
    *,
    kind: str | None = None,
    share: Share = "split",
    pieces: tuple[int, ...] = (),
) -> WeightGroup:
    """The weight of a product that every token takes, in each of these layers."""
    return WeightGroup(
        name=name, rows=rows, columns=columns, pieces=pieces, kind=kind, share=share, layers=layers, taken=1
    )


def _mlp(
    name: str, hidden: int, width: int, prefix: str, share: Share, layers: range, copies: int = 1, taken: int = 1
) -> Iterator[WeightGroup]:
    """Gate and up, and down, of an MLP or of the experts of a layer."""
    if not layers:
        return
    yield WeightGroup(
        name=f"{name}_gate_up",
        rows=2 * width,
        columns=hidden,
        pieces=(width, width),
        kind=f"{prefix}gate_proj",
        share=share,
        layers=layers,
        copies=copies,
        taken=taken,
    )
    yield WeightGroup(
        name=f"{name}_down",
        rows=hidden,
        columns=width,
        kind=f"{prefix}down_proj",
        share=share,
        layers=layers,
        copies=copies,
        taken=taken,
    )

"""Describes families of ops, the parts of a decoder's layer: the tensors, ops and costs of each family.

A family is a part of a layer, such as attention. One file here describes its tensors, its ops, its cache, its cost, and
how ranks share it. Engine and trainer each run the ops through a `Host` (`models.program`). In native mode the trainer
runs Megatron's modules instead (`trainer.modules.native`). An architecture lists its families; no table lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fp8rl.models.program import ADD_NORM, EMBED, LINEAR, LOGPROBS, TOKENS, Fusion, Op
from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import Location, TensorRow


@dataclass(frozen=True)
class Activations:
    """Bytes per token that a BF16 trainer keeps for the backward pass, for one part of a layer."""

    bf16: float
    fp8: float
    """Bytes that TransformerEngine's FP8 products add; negative where they save bytes."""
    core: float = 0.0
    """Bytes of `bf16` that are not kept if attention's core is recomputed."""
    gathered: float = 0.0
    """Further bytes, which context-parallel ranks gather in the backward pass."""


@dataclass(frozen=True)
class Widths:
    """Widths of weights that quantization blocks have to fill, by their keys in config.json."""

    whole: Mapping[str, int] = field(default_factory=dict)
    """The widths that every rank has whole."""
    split: Mapping[str, int] = field(default_factory=dict)
    """The widths that tensor-parallel ranks split."""


Ranks = Literal["context", "engine"]
"""`context`: the context-parallel ranks of a trainer. `engine`: the tensor-parallel ranks of an engine."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A part of a decoder's layer, described for all models that have it."""

    name: str
    """The name of its file."""
    part: Literal["attention", "mlp"]
    """The part of a layer. In attention, a token depends on other tokens; in an MLP, it does not."""
    kinds: tuple[tuple[str, ...], ...]
    """The family's module kinds that a quantization spec can name. The kinds that one product fuses share a tuple: a
    spec names all of them or none."""
    tensors: Callable[[ModelSizes, int], Iterator[TensorRow]]
    """Yields the rows of one layer, in the order of the forward pass, with the norm before the family."""
    ops: Callable[[ModelSizes], tuple[Op, ...]]
    """The ops of one layer."""
    activations: Callable[[ModelSizes], Activations]
    fusions: tuple[Fusion, ...] = ()
    """Ops that run as one in a lowered program, the longest fusions first."""
    widths: Callable[[ModelSizes], Widths] = lambda sizes: Widths()
    within: Callable[[ModelSizes, int], bool] = lambda sizes, layer: True
    """True if a layer, counted from 0, has the family."""
    cached: Callable[[ModelSizes, int], int] = lambda sizes, ranks: 0
    """Elements per token and layer in the cache of one engine rank. ranks: the engine's tensor-parallel ranks."""
    held: Callable[[ModelSizes, int], int] = lambda sizes, ranks: 0
    """Bytes per request and layer, whatever the request's length, on one engine rank. ranks: as for `cached`."""
    value: Callable[[ModelSizes], int] = lambda sizes: 0
    """Width of a head's value in an engine's decode attention; 0: the family attends to no keys."""
    scored: Callable[[ModelSizes], int] = lambda sizes: 0
    """Number of multiplications for one query token and one key token in one layer: q times k, weight times v."""
    recurrent: Callable[[ModelSizes], int] = lambda sizes: 0
    """FLOPs per token and layer that do not depend on the sequence's length, without products with weights."""
    divided: Callable[[ModelSizes], Mapping[str, int]] = lambda sizes: {}
    """Numbers that must be multiples of the number of tensor-parallel ranks, by their keys in config.json."""
    unshared: Callable[[ModelSizes], Mapping[Ranks, str]] = lambda sizes: {}
    """For each kind of ranks that cannot split the family: the reason, as the end of a sentence about a model."""
    kernels: tuple[tuple[int, int], str] | None = None
    """The compute capability that the family's exact kernels need, and why; None: no more than all exact kernels."""


@dataclass(frozen=True)
class PartNames:
    """The beginnings of the tensors' names in one part of a layer."""

    layer: int
    inside: str
    """The beginning in the checkpoint and in the engine, such as `model.layers.3.self_attn.`"""
    there: str
    """The beginning in Megatron, such as `decoder.layers.3.self_attention.`"""

    @classmethod
    def of(cls, layer: int, inside: str, there: str) -> PartNames:
        return cls(layer, f"model.layers.{layer}.{inside}", f"decoder.layers.{layer}.{there}")

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        op: str,
        megatron: str,
        engine: str | None = None,
        index: int | None = None,
        split: int | None = None,
        kv_heads: int | None = None,
        fused: bool = False,
        layout: Literal["rows", "heads"] = "rows",
        groups: int | None = None,
        buffer: bool = False,
        **more: Any,
    ) -> TensorRow:
        """Return the row of a tensor. engine: the parameter that holds it; None: `name`. index, split, kv_heads and
        fused are of the engine's :class:`models.tensors.Location`; layout, groups and buffer are of Megatron's."""
        return TensorRow(
            name=f"{self.inside}{name}",
            shape=shape,
            op=op,
            layer=self.layer,
            engine=Location(f"{self.inside}{engine or name}", index=index, split=split, kv_heads=kv_heads, fused=fused),
            megatron=Location(f"{self.there}{megatron}", layout=layout, groups=groups, buffer=buffer),
            **more,
        )

    def product(
        self, name: str, shape: tuple[int, int], *, megatron: str, engine: str | None = None, **more: Any
    ) -> TensorRow:
        """Return the row of a product's weight, as `tensor` does. All names are without `.weight`."""
        engine = f"{engine or name}.weight"
        return self.tensor(f"{name}.weight", shape, engine=engine, megatron=f"{megatron}.weight", product=True, **more)

    def norm(self, name: str, size: int, *, op: str, megatron: str, **more: Any) -> TensorRow:
        """Return the row of a norm's weight, which every rank of trainer and engine has whole. megatron: the whole name
        of its parameter."""
        return self.tensor(f"{name}.weight", (size,), op=op, megatron=megatron, **more)


def norm_before(op: Literal["input", "post"], sizes: ModelSizes, layer: int, megatron: str) -> TensorRow:
    """Return the row of the norm before a layer's attention (`input`) or after it. megatron: its name in the layer."""
    name = {"input": "input_layernorm", "post": "post_attention_layernorm"}[op]
    return PartNames.of(layer, "", "").norm(name, sizes.hidden_size, op=f"{op}_norm", megatron=megatron)


def attention_activations(sizes: ModelSizes, value_dim: int) -> Activations:
    """Return the activations of attention, with both norms of a layer and its residuals: 8H + 6D(heads + kv heads)
    bytes. H is the hidden size, D the mean width of a head's query and value. An FP8 product keeps 1.03 bytes of an
    element of its input in place of 2 (-0.97H). The output projection's input is kept twice (+1.03D * heads).

    If the core is recomputed, rotated queries and keys are too. Context-parallel ranks gather keys, values, queries and
    the gradient of the result in BF16, and two FP32 numbers for each query."""
    head, rows = (sizes.head_dim + value_dim) / 2, sizes.head_dim * (sizes.heads + sizes.kv_heads)
    return Activations(
        bf16=8 * sizes.hidden_size + 6 * head * (sizes.heads + sizes.kv_heads),
        fp8=1.03 * sizes.heads * head - 0.97 * sizes.hidden_size,
        core=2.0 * rows,
        gathered=float(4 * rows + 8 * sizes.heads),
    )


def mlp_activations(sizes: ModelSizes, *mlps: tuple[int, int], experts: int = 0) -> Activations:
    """Return the activations of MLPs: 4H + 6F bytes for each MLP (H: the hidden size), and 4 bytes for each of
    `experts`. FP8 products save 0.97(H + F) of each MLP. mlps: (number of such MLPs that a token takes, width F)."""
    hidden = sizes.hidden_size
    return Activations(
        bf16=4 * experts + sum(taken * (4 * hidden + 6 * width) for taken, width in mlps),
        fp8=-0.97 * sum(taken * (hidden + width) for taken, width in mlps),
    )


# Both ends of a decoder, which all architectures share: the embedding, the last norm, the head, log-probabilities.

FIRST_OPS = (Op("embed", EMBED, (TOKENS,), ("x",), "embedding"),)
LAST_OPS = (
    Op("final_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "decoder.final_layernorm"),
    Op("lm_head", LINEAR, ("x",), ("logits",), "output_layer"),
    Op("logprobs", LOGPROBS, ("logits",), ("logprobs",)),
)


def first_tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield TensorRow(
        name="model.embed_tokens.weight",
        shape=(sizes.vocab_size, sizes.hidden_size),
        op="embed",
        engine=Location("model.embed_tokens.weight", padded=True, split=0),
        megatron=Location("embedding.word_embeddings.weight"),
        copies=("output_layer.weight",) if sizes.tied else (),
    )


def last_tensors(sizes: ModelSizes) -> Iterator[TensorRow]:
    yield TensorRow(
        name="model.norm.weight",
        shape=(sizes.hidden_size,),
        op="final_norm",
        engine=Location("model.norm.weight"),
        megatron=Location("decoder.final_layernorm.weight"),
    )
    if not sizes.tied:
        yield TensorRow(
            name="lm_head.weight",
            shape=(sizes.vocab_size, sizes.hidden_size),
            op="lm_head",
            product=True,
            engine=Location("lm_head.weight", padded=True, split=0),
            megatron=Location("output_layer.weight"),
        )

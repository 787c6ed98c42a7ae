"""Families of ops: what the layers of decoders are put together from, and what this floor knows of each.

A family is a part of a layer, such as attention. One file here has its tensors, its ops, what it caches, what it costs
and how it is shared. The trainer has a file for it of the same name (`trainer.modules.families`), and so has the engine
(`rollout.engine.plugin.families`). An architecture lists its families; no table lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fp8rl.models.sizes import ModelSizes
from fp8rl.models.tensors import Location, TensorRow
from fp8rl.models.trace import ADD_NORM, EMBED, LINEAR, LOGPROBS, TOKENS, Op

Part = Literal["attention", "mlp"]


@dataclass(frozen=True)
class Activations:
    """Bytes per token that a BF16 trainer keeps of a part of a layer for the backward."""

    bf16: float
    fp8: float
    """What TransformerEngine's FP8 products change of it."""
    core: float = 0.0
    """What of it recomputation of attention's core does not keep."""
    gathered: float = 0.0
    """Bytes beside it that context-parallel ranks gather in its backward."""


@dataclass(frozen=True)
class Widths:
    """Widths of weights that quantization blocks have to fill, by their keys in config.json."""

    whole: Mapping[str, int] = field(default_factory=dict)
    """Those that every rank has whole."""
    split: Mapping[str, int] = field(default_factory=dict)
    """Those that tensor-parallel ranks split."""


Ranks = Literal["context", "engine"]
"""Context-parallel ranks of a trainer; tensor-parallel ones of an engine."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A part of a decoder's layer in every model that has it."""

    name: str
    """The name of its file."""
    part: Part
    """What it is in a layer: the tokens meet in attention, and each is by itself in an MLP."""
    kinds: tuple[tuple[str, ...], ...]
    """Module kinds by which a quantization spec decides about its products. Those that one product reads fused stand
    together: a spec names all of them or none."""
    tensors: Callable[[ModelSizes, int], Iterator[TensorRow]]
    """Rows of one layer, in the order of the forward, the norm before it among them."""
    ops: Callable[[ModelSizes], tuple[Op, ...]]
    """Ops of one layer."""
    activations: Callable[[ModelSizes], Activations]
    widths: Callable[[ModelSizes], Widths] = lambda sizes: Widths()
    within: Callable[[ModelSizes, int], bool] = lambda sizes, layer: True
    """True if a layer, counted from 0, has it."""
    cached: Callable[[ModelSizes, int], int] = lambda sizes, ranks: 0
    """Elements that a token takes in the cache of one of so many tensor-parallel ranks of an engine, in one layer."""
    held: Callable[[ModelSizes, int], int] = lambda sizes, ranks: 0
    """Bytes that a request holds in one of so many tensor-parallel ranks of an engine, in one layer, however long it
    is."""
    value: Callable[[ModelSizes], int] = lambda sizes: 0
    """Width of a head's value in an engine's decode attention; 0: it attends to no keys."""
    scored: Callable[[ModelSizes], int] = lambda sizes: 0
    """Multiplications of one query with one key and its value, in one layer."""
    recurrent: Callable[[ModelSizes], int] = lambda sizes: 0
    """FLOPs of a token that are no product of it with a weight, however long its sequence is, in one layer."""
    divided: Callable[[ModelSizes], Mapping[str, int]] = lambda sizes: {}
    """Numbers that tensor-parallel ranks have to divide, by their keys in config.json."""
    unshared: Callable[[ModelSizes], Mapping[Ranks, str]] = lambda sizes: {}
    """Why ranks cannot share it, said of a model, for those that cannot."""
    kernels: tuple[tuple[int, int], str] | None = None
    """The least compute capability of GPUs for its exact kernels, and why; None: that of all kernels."""
    megatron: Callable[[], Any] | None = None
    """Import its `trainer.modules.families.MegatronFamily`; None: it is FAMILY of the file there that has its name."""


def families_of_layer(families: Iterable[Family], sizes: ModelSizes, layer: int) -> list[Family]:
    """Return those of an architecture's families that a layer has, in the order of its forward."""
    return [family for family in families if family.within(sizes, layer)]


@dataclass(frozen=True)
class PartNames:
    """The names of a part of a layer on both sides, which call its tensors alike but for what comes before."""

    layer: int
    inside: str
    """`model.layers.3.self_attn.`, in the checkpoint, and as a rule in the engine."""
    there: str
    """`decoder.layers.3.self_attention.`, in Megatron."""
    served: str
    """In the engine, where it has another name than in the checkpoint."""

    @classmethod
    def of(cls, layer: int, inside: str, there: str, served: str | None = None) -> PartNames:
        before = f"model.layers.{layer}."
        in_engine = inside if served is None else served
        return cls(layer, f"{before}{inside}", f"decoder.layers.{layer}.{there}", f"{before}{in_engine}")

    def product(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        op: str,
        kind: str | None,
        megatron: str,
        engine: str | None = None,
        split: int | None = None,
        fused: bool = False,
        layout: Literal["rows", "heads"] = "rows",
        groups: int | None = None,
        **more: Any,
    ) -> TensorRow:
        """The row of a product's weight. engine: the parameter that holds it, `name` by itself; split, fused,
        layout, groups: as in :class:`models.tensors.Location`."""
        return TensorRow(
            name=f"{self.inside}{name}.weight",
            shape=shape,
            op=op,
            layer=self.layer,
            kind=kind,
            product=True,
            engine=Location(f"{self.served}{engine or name}.weight", split=split, fused=fused),
            megatron=Location(f"{self.there}{megatron}.weight", layout=layout, groups=groups),
            **more,
        )

    def norm(self, name: str, size: int, *, op: str, megatron: str) -> TensorRow:
        """The row of a norm's weight; megatron: its parameter, whole."""
        row = norm(f"{self.inside}{name}.weight", size, op, self.layer, f"{self.there}{megatron}")
        return replace(row, engine=Location(f"{self.served}{name}.weight"))


def norm(name: str, size: int, op: str, layer: int | None, megatron: str) -> TensorRow:
    """The row of a norm's weight, which both sides hold whole."""
    return TensorRow(name=name, shape=(size,), op=op, layer=layer, engine=Location(name), megatron=Location(megatron))


def attention_activations(sizes: ModelSizes, value_dim: int) -> Activations:
    """Attention with both norms of a layer and its residuals: with H hidden and D the mean width of a head's query and
    value, 8H + 6D(heads + kv heads). An FP8 product keeps 1.03 bytes of an element of its input in place of 2, and the
    output projection's input beside the attention's: less 0.97H, more 1.03D * heads.

    Rotated queries and keys are computed again with the core. Context-parallel ranks gather keys, values, queries and
    the gradient of the result in BF16, and two numbers of each query in FP32."""
    head, rows = (sizes.head_dim + value_dim) / 2, sizes.head_dim * (sizes.heads + sizes.kv_heads)
    return Activations(
        bf16=8 * sizes.hidden_size + 6 * head * (sizes.heads + sizes.kv_heads),
        fp8=1.03 * sizes.heads * head - 0.97 * sizes.hidden_size,
        core=2.0 * rows,
        gathered=float(4 * rows + 8 * sizes.heads),
    )


def mlp_activations(sizes: ModelSizes, *mlps: tuple[int, int], experts: int = 0) -> Activations:
    """MLPs of (how many a token takes, width): 4H + 6F each, of which FP8 products save 0.97(H + F), and 4 bytes for
    each of `experts`."""
    hidden = sizes.hidden_size
    return Activations(
        bf16=4 * experts + sum(taken * (4 * hidden + 6 * width) for taken, width in mlps),
        fp8=-0.97 * sum(taken * (hidden + width) for taken, width in mlps),
    )


# Both ends of a decoder, which all architectures share: the embedding, the last norm, the head, log-probabilities.

FIRST_OPS = (Op("embed", EMBED, (TOKENS,), ("x",), "model.embed_tokens", "embedding"),)
LAST_OPS = (
    Op("final_norm", ADD_NORM, ("x", "residual"), ("x", "residual"), "model.norm", "decoder.final_layernorm"),
    Op("lm_head", LINEAR, ("x",), ("logits",), "lm_head", "output_layer"),
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
    yield norm("model.norm.weight", sizes.hidden_size, "final_norm", None, "decoder.final_layernorm.weight")
    if not sizes.tied:
        yield TensorRow(
            name="lm_head.weight",
            shape=(sizes.vocab_size, sizes.hidden_size),
            op="lm_head",
            product=True,
            engine=Location("lm_head.weight", padded=True, split=0),
            megatron=Location("output_layer.weight"),
        )

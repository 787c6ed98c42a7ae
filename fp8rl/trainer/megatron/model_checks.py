"""Rules that a model keeps in a layout and a quantization, a row for each, of the trainer and of an engine.

The driver checks them before it starts a process; they do not need Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8rl.models.families import Ranks
from fp8rl.models.shape import Shape, overlap
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.errors import Rule, check_rules
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection, travels_in_fp8
from fp8rl.trainer.distributed.context_parallel import CHUNKS

BF16_SIDES = "both sides in BF16 (numerics.preset=bf16 numerics.trainer=bf16 numerics.rollout=bf16)"


def check_layout(shape: Shape, config: TrainerSection, spec: QuantSpec) -> None:
    """Check that the model divides over the trainer's ranks, its weights over the blocks of `spec`, and some are
    quantized.

    A fused weight (q|k|v per head group, gate|up) is quantized as a whole here and as separate tensors in a Hugging
    Face checkpoint and in the engine. All give the same blocks only if each piece is a whole number of blocks on every
    rank. Experts are never split by tp.

    Raises:
        UserError: a size does not divide.
    """
    check_rules(SPLIT_RULES, Split(shape, config.tp, spec, "trainer.tp"))
    check_rules(LAYOUT_RULES, TrainedModel(shape, config, spec))


def check_engine_layout(shape: Shape, tp: int, spec: QuantSpec, key: str = "rollout.tp") -> None:
    """Check that the model divides over the ranks of an engine; messages speak of them as `key`. Raises UserError."""
    check_rules((*SPLIT_RULES, *ENGINE_RULES), Split(shape, tp, spec, key))


def check_training(shape: Shape, config: TrainerSection, spec: QuantSpec) -> None:
    """Check that gradients and weights that are to travel in another format travel at all, and can, and that biases
    which are to be moved exist.

    Args:
        spec: what the trainer quantizes when it starts.

    Raises:
        UserError: nothing is sent in this layout, the weights that products take are not those that would arrive, or
            the experts have no biases.
    """
    check_rules(TRAINING_RULES, TrainedModel(shape, config, spec))


def check_rows(config: TrainerSection, mode: Mode, transformer_engine: bool, length: int | None = None) -> None:
    """Check that attention can take rows that lie end to end, and context-parallel ranks can share rows.

    length: tokens of the longest row, where it is known.

    Raises:
        UserError: attention is Megatron's own, or the longest row is no whole number of chunks.
    """
    check_rules(ROW_RULES, Rows(config, mode, transformer_engine, length))


@dataclass(frozen=True)
class Split:
    """A model over the tensor-parallel ranks of a side."""

    shape: Shape
    tp: int
    spec: QuantSpec
    key: str
    """The spec's name of tp."""

    @property
    def sizes(self) -> ModelSizes:
        return self.shape.sizes

    @property
    def in_bf16(self) -> int:
        """Layers that are not quantized although others are."""
        return self.spec.first_layers_bf16 + self.spec.last_layers_bf16

    @property
    def block(self) -> int:
        """The smallest number of elements that holds whole blocks of every role."""
        roles = [role for role in (self.spec.weight, self.spec.activation, self.spec.gradient) if role.quantized]
        return math.lcm(*(role.group for role in roles if role.granularity in ("block", "token_group")))

    @property
    def broken_piece(self) -> tuple[str, int] | None:
        """Name and size of the first piece of a fused weight that is no whole number of blocks on every rank."""
        pieces = {"hidden_size": self.sizes.hidden_size}
        split: dict[str, int] = {}
        quantized = range(self.spec.first_layers_bf16, self.sizes.layers - self.spec.last_layers_bf16)
        for family, layers in self.shape.layers_of():
            if overlap(layers, quantized):
                pieces |= family.widths(self.sizes).whole
                split |= family.widths(self.sizes).split
        cut = f" / {self.key} = {{}} / {self.tp}" if self.tp > 1 else ""
        pieces |= {name + cut.format(size): size // self.tp for name, size in split.items()}
        return next((piece for piece in pieces.items() if piece[1] % self.block), None)

    @property
    def undivided(self) -> tuple[str, int]:
        """Name and value of the first number of a family's that the ranks do not divide; 0 where they divide all."""
        numbers = (pair for family, _ in self.shape.layers_of() for pair in family.divided(self.sizes).items())
        return next((pair for pair in numbers if pair[1] % self.tp), ("", 0))

    @property
    def leading(self) -> int:
        """The number of layers in front that alone have the broken piece; 0: others have it, too."""
        if self.broken_piece is None:
            return 0
        for family, layers in self.shape.layers_of():
            widths, name = family.widths(self.sizes), self.broken_piece[0].partition(" / ")[0]
            if name in {**widths.whole, **widths.split} and layers.start == 0 and len(layers) < self.sizes.layers:
                return len(layers)
        return 0


def _divides(
    name: str,
    size: Callable[[Any], int],
    key: Callable[[Any], str] = lambda s: s.key,
    ranks: Callable[[Any], int] = lambda s: s.tp,
) -> Rule[Any]:
    return Rule(
        key,
        lambda s: size(s) % ranks(s),
        ranks,
        lambda s: f"a divisor of the model's {name} = {size(s)}",
        lambda s: f"Set {key(s)} to a divisor of {size(s)}.",
    )


def _unshared(shape: Shape, ranks: Ranks) -> str | None:
    """Say of a model why such ranks cannot share it; None: they can."""
    found = (family.unshared(shape.sizes).get(ranks) for family, _ in shape.layers_of())
    return next((why for why in found if why), None)


def _remedy_of_piece(split: Split) -> str:
    if not split.leading:
        whole = f"Lower {split.key}" if split.tp > 1 else "Fill it up with zeros (fp8rl convert MODEL OUT --pad)"
        return f"{whole}, or run {BF16_SIDES}."
    several = split.leading > 1
    return (
        f"It is the width of the dense first layer{'s' * several}: "
        f"numerics.first_layers_bf16={split.leading} leaves {'them' if several else 'it'} in BF16."
    )


SPLIT_RULES: tuple[Rule[Split], ...] = (
    _divides("num_attention_heads", lambda s: s.sizes.heads),
    _divides("num_key_value_heads", lambda s: s.sizes.kv_heads),
    _divides("groups of key-value heads that fill a quantization block", lambda s: s.sizes.kv_heads // s.sizes.joined),
    Rule(
        lambda s: s.key,
        lambda s: s.undivided[1],
        lambda s: s.tp,
        lambda s: f"a divisor of the model's {s.undivided[0]} = {s.undivided[1]}",
        lambda s: f"Set {s.key} to a divisor of {s.undivided[1]}.",
    ),
    _divides("vocab_size", lambda s: s.sizes.vocab_size),
    _divides("intermediate_size", lambda s: s.sizes.ffn_size),
    _divides("moe_intermediate_size * n_shared_experts", lambda s: s.sizes.shared_size),
    Rule(
        "numerics.first_layers_bf16 + numerics.last_layers_bf16",
        lambda s: s.spec.quantized and s.in_bf16 >= s.sizes.layers,
        lambda s: s.in_bf16,
        lambda s: f"less than the model's num_hidden_layers = {s.sizes.layers}, so that some layer is quantized",
        f"Lower them, or run {BF16_SIDES}.",
    ),
    Rule(
        "numerics.weight.granularity",
        lambda s: s.spec.quantized and s.spec.weight.granularity == "tensor" and s.spec.weight.fixed is None,
        "tensor",
        "block, token_group or channel",
        "A fused weight has one scale here and several in a checkpoint; choose a finer granularity, or a static range "
        "(numerics.weight.fixed).",
    ),
    Rule(
        lambda s: f"model config: {s.broken_piece and s.broken_piece[0]}",
        lambda s: s.spec.quantized and s.broken_piece,
        lambda s: s.broken_piece and s.broken_piece[1],
        lambda s: f"a multiple of {s.block}, the quantization block",
        _remedy_of_piece,
    ),
)

ENGINE_RULES: tuple[Rule[Split], ...] = (
    Rule(
        lambda s: s.key,
        lambda s: s.tp > 1 and _unshared(s.shape, "engine"),
        lambda s: s.tp,
        lambda s: f"1 for a model {_unshared(s.shape, 'engine')}",
        lambda s: f"Set {s.key}=1, and rollout.engines to use more GPUs.",
    ),
    _divides("num_experts", lambda s: s.sizes.experts),
)


@dataclass(frozen=True)
class TrainedModel:
    """A model in the layout of its trainer."""

    shape: Shape
    config: TrainerSection
    spec: QuantSpec

    @property
    def sizes(self) -> ModelSizes:
        return self.shape.sizes

    @property
    def alone(self) -> bool:
        """True if no two ranks train the same parameters. Experts are not split by tp."""
        return self.config.copies == 1 and not (self.sizes.moe and self.config.tp > self.config.ep)


def _sent_in(key: str, wire: Callable[[TrainerSection], str], default: str) -> Rule[TrainedModel]:
    return Rule(
        key,
        lambda t: t.alone and wire(t.config) != default,
        lambda t: f"{wire(t.config)} with trainer.dp={t.config.dp}",
        f"{default} where no two ranks train the same parameters, so that nothing is sent",
        f"Set {key}={default}, or trainer.dp=2 or more.",
    )


def _weights_in(spec: QuantSpec) -> str:
    weight = spec.weight
    form = f"weights in {weight.format}, {weight.granularity}, {weight.scale}, {weight.rounding}"
    return form if spec.quantized else "a BF16 trainer"


LAYOUT_RULES: tuple[Rule[TrainedModel], ...] = (
    Rule(
        "trainer.ep",
        lambda t: t.config.ep > 1 and not t.sizes.moe,
        lambda t: t.config.ep,
        "1 for a dense model",
        "Set trainer.ep=1, or choose a mixture of experts.",
    ),
    _divides("num_experts", lambda t: t.sizes.experts, lambda t: "trainer.ep", lambda t: t.config.ep),
    Rule(
        "trainer.ep",
        lambda t: t.config.stage_size % t.config.ep,
        lambda t: t.config.ep,
        lambda t: (
            f"a divisor of tp * dp * cp = {t.config.tp} * {t.config.dp} * {t.config.cp}, whose ranks share the experts"
        ),
        lambda t: f"Set trainer.dp={t.config.ep} or another multiple, or lower trainer.ep.",
    ),
    _divides("num_hidden_layers", lambda t: t.sizes.layers, lambda t: "trainer.pp", lambda t: t.config.pp),
    Rule(
        "trainer.cp",
        lambda t: t.config.cp > 1 and _unshared(t.shape, "context"),
        lambda t: t.config.cp,
        lambda t: f"1 for a model {_unshared(t.shape, 'context')}",
        "Set trainer.cp=1.",
    ),
)

TRAINING_RULES: tuple[Rule[TrainedModel], ...] = (
    _sent_in("trainer.gradient_wire", lambda c: c.gradient_wire, "fp32"),
    _sent_in("trainer.weight_gather", lambda c: c.weight_gather, "bf16"),
    Rule(
        "trainer.weight_gather",
        lambda t: t.config.weight_gather != "bf16" and not (t.spec.quantized and travels_in_fp8(t.spec.weight)),
        lambda t: f"{t.config.weight_gather} with {_weights_in(t.spec)}",
        "weights that the trainer quantizes to e4m3, block, pow2, nearest; others would differ from those of the "
        "forward",
        "Set trainer.weight_gather=bf16, or numerics.preset=fp8_block_pow2 and numerics.trainer=fp8.",
    ),
    Rule(
        "trainer.router_bias_rate",
        lambda t: t.config.router_bias_rate and all(weight.trained for weight in t.shape.weights),
        lambda t: t.config.router_bias_rate,
        "0 for a model whose experts have no biases",
        "Set trainer.router_bias_rate=0, or choose a model with a sigmoid router, such as GLM-4.5.",
    ),
)


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch as attention takes them."""

    config: TrainerSection
    mode: Mode
    transformer_engine: bool
    length: int | None

    @property
    def chunks(self) -> int:
        """Parts that a row is cut into, two for a context-parallel rank."""
        return CHUNKS * self.config.cp


ROW_RULES: tuple[Rule[Rows], ...] = (
    Rule(
        "trainer.packing",
        lambda r: r.config.packing and r.mode == "native" and not r.transformer_engine,
        "true with numerics.mode=native and without TransformerEngine",
        "false: native mode then uses Megatron's own attention, which takes only padded rows",
        "Set trainer.packing=false, or numerics.mode=exact.",
    ),
    Rule(
        "trainer.prefix_sharing",
        lambda r: r.config.prefix_sharing and r.mode != "exact",
        lambda r: f"true with numerics.mode={r.mode}",
        "false: a shared token's bits are those of each of its rows in exact mode alone",
        "Set trainer.prefix_sharing=false, or numerics.mode=exact.",
    ),
    Rule(
        "trainer.prefix_sharing",
        lambda r: r.config.prefix_sharing and r.config.cp > 1,
        lambda r: f"true with trainer.cp={r.config.cp}",
        "false: context-parallel ranks share the tokens of rows that lie apart",
        "Set trainer.prefix_sharing=false, or trainer.cp=1.",
    ),
    Rule(
        "trainer.cp",
        lambda r: r.config.cp > 1 and r.mode != "exact",
        lambda r: f"{r.config.cp} with numerics.mode={r.mode}",
        "1: the attention of native mode takes whole rows",
        "Set trainer.cp=1, or numerics.mode=exact.",
    ),
    Rule(
        "trainer.cp",
        lambda r: r.config.cp > 1 and r.config.packing,
        lambda r: f"{r.config.cp} with trainer.packing=true",
        "1: ranks share the tokens of padded rows",
        "Set trainer.packing=false, or trainer.cp=1.",
    ),
    Rule(
        "rollout.context_length",
        lambda r: r.config.cp > 1 and r.length is not None and r.length % r.chunks,
        lambda r: r.length,
        lambda r: (
            f"a multiple of {r.chunks}: trainer.cp={r.config.cp} cuts each row into {r.chunks} chunks, two for a rank"
        ),
        lambda r: f"Set rollout.context_length={(r.length or 0) // r.chunks * r.chunks or r.chunks}, or trainer.cp=1.",
    ),
)

"""Checks that a model fits the layout and the quantization of the trainer and of the engines.

The driver makes these checks before it starts a process. They do not need Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fp8rl.models.families import Ranks
from fp8rl.models.shape import Shape, overlap
from fp8rl.numerics.config import Mode
from fp8rl.numerics.core.errors import UserError, refusing, user_error
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection, travels_in_fp8

BF16_SIDES = "both sides in BF16 (numerics.preset=bf16 numerics.trainer=bf16 numerics.rollout=bf16)"


@refusing
def check_layout(shape: Shape, config: TrainerSection, spec: QuantSpec) -> Iterator[UserError]:
    """Check that the trainer's ranks can split the model, that the blocks of `spec` divide its weights, and that FP8
    is used in at least one layer.

    The trainer quantizes a fused weight (q|k|v per head group, gate|up) as a whole. A Hugging Face checkpoint and the
    engine quantize each matrix in it. Both give the same blocks only if each matrix is a whole number of blocks on
    every rank. Experts are never split by tp.

    Raises UserError: a size of the model does not fit.
    """
    yield from split_refusals(shape, config.tp, spec, "trainer.tp")
    sizes, ep = shape.sizes, config.ep
    if ep > 1 and not sizes.moe:
        remedy = "Set trainer.ep=1, or choose a mixture of experts."
        yield user_error("trainer.ep", ep, "1 for a dense model", remedy)
    if sizes.experts % ep:
        yield _undivided("trainer.ep", ep, "num_experts", sizes.experts)
    if config.stage_size % ep:
        product = f"{config.tp} * {config.dp} * {config.cp}"
        expected = f"a divisor of tp * dp * cp = {product}, whose ranks share the experts"
        remedy = f"Set trainer.dp={ep} or another multiple, or lower trainer.ep."
        yield user_error("trainer.ep", ep, expected, remedy)
    if sizes.layers % config.pp:
        yield _undivided("trainer.pp", config.pp, "num_hidden_layers", sizes.layers)
    if config.cp > 1 and (why := _unshared(shape, "context")):
        yield user_error("trainer.cp", config.cp, f"1 for a model {why}", "Set trainer.cp=1.")


@refusing
def check_engine_layout(
    shape: Shape, tp: int, spec: QuantSpec, mode: Mode, key: str = "rollout.tp"
) -> Iterator[UserError]:
    """Check that an engine's ranks can split the model. Raises UserError. key: the spec's key of tp, for messages."""
    # If there are more ranks than key-value heads, each rank has a copy of one. This has run in exact mode only. Heads
    # that share a block, and heads of a family that does not say which rows they have, are not copied.
    kv_heads, named = shape.sizes.kv_heads, any(weight.kv_rows for weight in shape.weights)
    copied = mode == "exact" and named and shape.sizes.joined == 1
    copies = tp // kv_heads if copied and tp % kv_heads == 0 else 1
    yield from split_refusals(shape, tp, spec, key, copies)
    if tp > 1 and (why := _unshared(shape, "engine")):
        yield user_error(key, tp, f"1 for a model {why}", f"Set {key}=1, and rollout.engines to use more GPUs.")
    if shape.sizes.experts % tp:
        yield _undivided(key, tp, "num_experts", shape.sizes.experts)


@refusing
def check_training(shape: Shape, config: TrainerSection, spec: QuantSpec) -> Iterator[UserError]:
    """Check `trainer.gradient_wire`, `weight_gather` and `router_bias_rate`. A format other than the default needs at
    least two ranks that train the same parameters, and must fit `spec`. A bias rate needs a router with biases.

    spec: the spec of the trainer's products at the start of the run. Raises UserError.
    """
    # Experts are not split by tp.
    alone = config.copies == 1 and not (shape.sizes.moe and config.tp > config.ep)
    for key, wire, default in (
        ("trainer.gradient_wire", config.gradient_wire, "fp32"),
        ("trainer.weight_gather", config.weight_gather, "bf16"),
    ):
        if alone and wire != default:
            expected = f"{default} where no two ranks train the same parameters, because nothing is sent"
            remedy = f"Set {key}={default}, or trainer.dp=2 or more."
            yield user_error(key, f"{wire} with trainer.dp={config.dp}", expected, remedy)
    if config.weight_gather != "bf16" and not (spec.quantized and travels_in_fp8(spec.weight)):
        expected = (
            "weights that the trainer quantizes to e4m3, block, pow2, nearest, because only these can be sent in FP8 "
            "without a change of log-probabilities"
        )
        remedy = "Set trainer.weight_gather=bf16, or numerics.preset=fp8_block_pow2 and numerics.trainer=fp8."
        weight = spec.weight
        form = f"weights in {weight.format}, {weight.granularity}, {weight.scale}, {weight.rounding}"
        found = f"{config.weight_gather} with {form if spec.quantized else 'a BF16 trainer'}"
        yield user_error("trainer.weight_gather", found, expected, remedy)
    if config.router_bias_rate and all(weight.trained for weight in shape.weights):
        expected = "0 for a model whose experts have no biases"
        remedy = "Set trainer.router_bias_rate=0, or choose a model with a sigmoid router, such as GLM-4.5."
        yield user_error("trainer.router_bias_rate", config.router_bias_rate, expected, remedy)


@refusing
def check_rows(config: TrainerSection, mode: Mode, transformer_engine: bool) -> Iterator[UserError]:
    """Check that the mode supports the packing, prefix sharing and context parallelism of the config. Raises
    UserError."""
    cp = config.cp
    if config.packing and mode == "native" and not transformer_engine:
        expected = "false, because without TransformerEngine Megatron's attention takes only padded rows"
        remedy = "Set trainer.packing=false, or numerics.mode=exact."
        found = "true with numerics.mode=native and without TransformerEngine"
        yield user_error("trainer.packing", found, expected, remedy)
    if config.prefix_sharing and mode != "exact":
        expected = "false, because only in exact mode a shared token has the same bits in each of its rows"
        remedy = "Set trainer.prefix_sharing=false, or numerics.mode=exact."
        yield user_error("trainer.prefix_sharing", f"true with numerics.mode={mode}", expected, remedy)
    if config.prefix_sharing and cp > 1:
        expected = "false, because context-parallel ranks split padded rows, and do not support shared prefixes"
        remedy = "Set trainer.prefix_sharing=false, or trainer.cp=1."
        yield user_error("trainer.prefix_sharing", f"true with trainer.cp={cp}", expected, remedy)
    if cp > 1 and mode != "exact":
        expected = "1, because the attention of native mode takes whole rows"
        remedy = "Set trainer.cp=1, or numerics.mode=exact."
        yield user_error("trainer.cp", f"{cp} with numerics.mode={mode}", expected, remedy)
    if cp > 1 and config.packing:
        found, remedy = f"{cp} with trainer.packing=true", "Set trainer.packing=false, or trainer.cp=1."
        yield user_error("trainer.cp", found, "1, because ranks can split only padded rows", remedy)


def split_refusals(shape: Shape, tp: int, spec: QuantSpec, key: str, copies: int = 1) -> Iterator[UserError]:
    """Yield the reasons why `tp` ranks of the trainer or an engine cannot split a model.

    key: the spec's key of tp. copies: the number of ranks that have the same key-value heads.
    """
    sizes = shape.sizes
    for name, size in (
        ("num_attention_heads", sizes.heads),
        ("num_key_value_heads", sizes.kv_heads * copies),
        ("groups of key-value heads that fill a quantization block", sizes.kv_heads * copies // sizes.joined),
        *(pair for family, _ in shape.layers_of() for pair in family.divided(sizes).items()),
        ("vocab_size", sizes.vocab_size),
        ("intermediate_size", sizes.ffn_size),
        ("moe_intermediate_size * n_shared_experts", sizes.shared_size),
    ):
        if size % tp:
            yield _undivided(key, tp, name, size)
    if not spec.quantized:
        return
    in_bf16 = spec.first_layers_bf16 + spec.last_layers_bf16
    if in_bf16 >= sizes.layers:
        expected = f"less than the model's num_hidden_layers = {sizes.layers}, so that some layer is quantized"
        key = "numerics.first_layers_bf16 + numerics.last_layers_bf16"
        yield user_error(key, in_bf16, expected, f"Lower them, or run {BF16_SIDES}.")
    if spec.weight.granularity == "tensor" and spec.weight.fixed is None:
        remedy = (
            "A fused weight would have one scale in the trainer and several in a checkpoint. Choose a finer "
            "granularity, or a static range (numerics.weight.fixed)."
        )
        yield user_error("numerics.weight.granularity", "tensor", "block, token_group or channel", remedy)
    roles = [role for role in (spec.weight, spec.activation, spec.gradient) if role.quantized]
    block = math.lcm(*(role.group for role in roles if role.granularity in ("block", "token_group")))
    for name, size in _pieces(shape, tp, spec, key).items():
        if size % block:
            remedy = _remedy_of_piece(shape, tp, key, name)
            yield user_error(f"model config: {name}", size, f"a multiple of {block}, the quantization block", remedy)


def _undivided(key: str, ranks: int, name: str, size: int) -> UserError:
    remedy = f"Set {key} to a divisor of {size}."
    return user_error(key, ranks, f"a divisor of the model's {name} = {size}", remedy)


def _pieces(shape: Shape, tp: int, spec: QuantSpec, key: str) -> dict[str, int]:
    """Return the sizes of the pieces of fused weights that a rank has in quantized layers, by name."""
    pieces = {"hidden_size": shape.sizes.hidden_size}
    split: dict[str, int] = {}
    quantized = range(spec.first_layers_bf16, shape.sizes.layers - spec.last_layers_bf16)
    for family, layers in shape.layers_of():
        if overlap(layers, quantized):
            pieces |= family.widths(shape.sizes).whole
            split |= family.widths(shape.sizes).split
    cut = f" / {key} = {{}} / {tp}" if tp > 1 else ""
    return pieces | {name + cut.format(size): size // tp for name, size in split.items()}


def _remedy_of_piece(shape: Shape, tp: int, key: str, piece: str) -> str:
    name = piece.partition(" / ")[0]
    for family, layers in shape.layers_of():
        widths = family.widths(shape.sizes)
        if name in {**widths.whole, **widths.split} and layers.start == 0 and len(layers) < shape.sizes.layers:
            several = len(layers) > 1
            return (
                f"It is the width of the dense first layer{'s' * several}: numerics.first_layers_bf16={len(layers)} "
                f"leaves {'them' if several else 'it'} in BF16."
            )
    whole = f"Lower {key}" if tp > 1 else "Fill it up with zeros (fp8rl convert MODEL OUT --pad)"
    return f"{whole}, or run {BF16_SIDES}."


def _unshared(shape: Shape, ranks: Ranks) -> str | None:
    """Return why these ranks cannot split the model. None if they can."""
    found = (family.unshared(shape.sizes).get(ranks) for family, _ in shape.layers_of())
    return next((why for why in found if why), None)

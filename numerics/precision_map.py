"""The precision map: each class of tensors of a training step and of an engine, its planned format, and why.

The first twelve rows are those of a map published for DeepSeek-V3 (docs/precision.md has ours as a table); the router,
what travels inside a layer, and the engine follow. Where this project plans another format than that map, the reason
says so. An audit (`fp8rl audit`) compares the plan with what a live trainer and engine are found to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numerics.config import NumericsConfig
from numerics.holdings import format_of

ROWS = (
    "token embedding and output head",
    "RMSNorm",
    "RMSNorm gain",
    "projections, MLP and experts",
    "attention scores",
    "softmax",
    "residual stream",
    "gradients",
    "master weights",
    "Adam's moments",
    "cross-entropy",
    "gradient norm and clipping",
    "router",
    "between ranks",
    "engine",
)
DOCUMENTED = ROWS[:12]
"""Those that the published map has."""


@dataclass(frozen=True, kw_only=True)
class TensorClass:
    """One class of tensors and its plan.

    A format is `fp32`, `bf16`, `e4m3` or `e5m2`; several that will do stand with a bar between them. In braces stands
    what a spec says: `{weight}`, `{activation}`, `{gradient}` of the trainer's products, `{served}` of the engine's
    weights, `{wire}` and `{gather}` between data-parallel ranks; `{operand}` and `{dequantized}` are the narrowest
    formats that hold what the codes of either side's weights stand for.

    Attributes:
        key: by which audits name it. row: of the map. tensors: which they are, in words.
        exact, native: the format in each mode. document: that of the published map; empty where it says nothing.
        why: the reason for the format, and what another would do.
        remedy: where to look if another is found.
    """

    key: str
    row: str
    tensors: str
    exact: str
    native: str
    document: str = ""
    why: str
    remedy: str


@dataclass(frozen=True)
class Planned:
    """A class of tensors under one run's numerics. formats: those that will do."""

    tensor_class: TensorClass
    formats: tuple[str, ...]


def precision_map(
    numerics: NumericsConfig, *, gradient_wire: str = "fp32", weight_gather: str = "bf16"
) -> dict[str, Planned]:
    """What the numerics of a run, and the wires between its data-parallel ranks, plan for each class, by key."""
    spec, served = numerics.trainer_spec, numerics.rollout_spec.weight
    # A backward in BF16 takes gradients as they are.
    gradient = spec.gradient.format if numerics.trainer == "fp8" else "bf16"
    names = {
        "weight": spec.weight.format,
        "activation": spec.activation.format,
        "gradient": gradient,
        "served": served.format,
        "wire": gradient_wire,
        "gather": weight_gather,
        "operand": format_of(spec.weight.dequantized_dtype),
        "dequantized": format_of(served.dequantized_dtype),
    }
    said = {each: str(getattr(each, numerics.mode)).format(**names).split("|") for each in CLASSES}
    return {each.key: Planned(each, tuple(dict.fromkeys(formats))) for each, formats in said.items()}


def unquantized(planned: Planned) -> Planned:
    """The plan of the same tensors where a layer or a module kind is left in BF16."""
    return replace(planned, formats=("bf16",))


_MODULES = "A module of another precision is in place: look at trainer/modules, and reinstall this distribution."
_OPTIMIZER = (
    "Look at how trainer/distributed/optimizer.py makes the optimizer, and at what has replaced its tensors since."
)
_SPEC = "Compare the numerics section with what was set since: numerics.preset, numerics.scope, Trainer.set_numerics."
_ENGINE = "Start the engine from this spec, with the arguments of rollout/server/arguments.py."


def _both(key: str, row: str, tensors: str, planned: str, *, document: str = "", why: str, remedy: str) -> TensorClass:
    """A class whose format is the same in both modes."""
    return TensorClass(
        key=key, row=row, tensors=tensors, exact=planned, native=planned, document=document, why=why, remedy=remedy
    )


CLASSES: tuple[TensorClass, ...] = (
    _both(
        "embedding.weight",
        ROWS[0],
        "weight of the token embedding, as the forward reads it",
        "bf16",
        document="bf16",
        why="A token that is seen once must still leave a gradient; FP8 blocks lose rare tokens beside frequent ones.",
        remedy=_MODULES,
    ),
    _both(
        "embedding.output",
        ROWS[0],
        "what is looked up",
        "bf16",
        document="bf16",
        why="It is the beginning of the residual stream.",
        remedy=_MODULES,
    ),
    _both(
        "head.weight",
        ROWS[0],
        "weight of the output head, as the forward reads it",
        "bf16",
        document="bf16",
        why="As of the embedding, to which it may be tied.",
        remedy=_MODULES,
    ),
    _both(
        "head.operands",
        ROWS[0],
        "both operands of the output head's products, forward and backward",
        "bf16",
        document="bf16",
        why="Its logits go straight into the cross-entropy: what FP8 would round there is a log-probability.",
        remedy=_MODULES,
    ),
    _both(
        "head.logits",
        ROWS[0],
        "logits",
        "bf16",
        document="bf16",
        why="Both sides round them once, and take the log-softmax of them in FP32.",
        remedy=_MODULES,
    ),
    _both(
        "norm.reduction",
        ROWS[1],
        "operand of the means and sums of RMSNorm, forward and backward",
        "fp32",
        document="fp32",
        why="A mean of squares leaves the range of FP8 and is borderline in BF16.",
        remedy=_MODULES,
    ),
    _both(
        "norm.output",
        ROWS[1],
        "what leaves RMSNorm",
        "bf16",
        document="bf16",
        why="It is rounded once, and is what products quantize.",
        remedy=_MODULES,
    ),
    _both(
        "gain.weight",
        ROWS[2],
        "gain of RMSNorm, as the forward reads it",
        "bf16",
        document="bf16",
        why="The shadow of an FP32 master, like every weight; a vector, so that FP8 would save nothing.",
        remedy=_MODULES,
    ),
    _both(
        "gain.master",
        ROWS[2],
        "gain of RMSNorm, as the optimizer updates it",
        "fp32",
        document="fp32",
        why="Gains stand near 1, where half a BF16 step is 0.002: smaller updates would never land.",
        remedy=_OPTIMIZER,
    ),
    _both(
        "product.shadow",
        ROWS[3],
        "weights of projections, MLP and experts, as the optimizer leaves them",
        "bf16|{weight}",
        why="BF16, which a forward quantizes once per update; FP8 where TransformerEngine holds its parameters so.",
        remedy=_MODULES,
    ),
    _both(
        "product.cached",
        ROWS[3],
        "their codes of this update, or what stands for them, kept for all products until the next",
        "{weight}|{operand}",
        why="FP8 where products take FP8; on a CPU the narrowest format that holds what the codes stand for.",
        remedy=_SPEC,
    ),
    _both(
        "product.activation",
        ROWS[3],
        "activations in products of the forward, and where the gradient of the weight takes them",
        "{activation}",
        document="e4m3",
        why="Products are most of the arithmetic, and an operand is read once and thrown away.",
        remedy=_SPEC,
    ),
    _both(
        "product.weight",
        ROWS[3],
        "weights in products, forward and backward",
        "{weight}",
        document="e4m3",
        why="The codes that the engine serves: one rounding of the master's BF16 shadow, with a scale per block.",
        remedy=_SPEC,
    ),
    _both(
        "product.gradient",
        ROWS[3],
        "gradients in products of the backward",
        "{gradient}",
        why="E4M3 with a scale per 128 elements has the range that gradients need; E5M2 gives a bit of precision away "
        "for range that the scales provide already. The published map has no row for it.",
        remedy=_SPEC,
    ),
    _both(
        "product.output",
        ROWS[3],
        "what leaves a projection or an MLP",
        "bf16",
        document="bf16",
        why="FP8 is a matter of the inside of a product: what the next op sees is BF16.",
        remedy=_MODULES,
    ),
    _both(
        "experts.activation",
        ROWS[3],
        "tokens in the grouped products of experts",
        "{activation}",
        document="e4m3",
        why="As in projections: a token's codes do not depend on the others that its expert has.",
        remedy=_SPEC,
    ),
    _both(
        "experts.weight",
        ROWS[3],
        "experts' weights in grouped products",
        "{weight}",
        document="e4m3",
        why="As of projections, with blocks that begin anew in each expert.",
        remedy=_SPEC,
    ),
    _both(
        "experts.gradient",
        ROWS[3],
        "gradients in the grouped products of experts",
        "{gradient}",
        why="As in projections; along the tokens, groups begin anew in each expert.",
        remedy=_SPEC,
    ),
    _both(
        "experts.output",
        ROWS[3],
        "what leaves a layer of experts",
        "bf16",
        document="bf16",
        why="A token's experts are added up before it is rounded (exact), or after (native).",
        remedy=_MODULES,
    ),
    TensorClass(
        key="scores.output",
        row=ROWS[4],
        tensors="products of queries and keys",
        exact="fp32",
        native="bf16",
        document="bf16",
        why="Exact mode keeps them in FP32, where the published map has BF16: its attention merges splits of keys, and "
        "rounds once, at its end. Megatron's own attention rounds them to BF16.",
        remedy=_MODULES,
    ),
    _both(
        "softmax.reduction",
        ROWS[5],
        "operand of exponentials, maxima and sums in the attention's softmax",
        "fp32",
        document="fp32",
        why="A gap of 15 between logits leaves a tail of 3e-7, which FP8 loses and BF16 distorts.",
        remedy=_MODULES,
    ),
    TensorClass(
        key="softmax.output",
        row=ROWS[5],
        tensors="attention weights, as they multiply the values",
        exact="fp32",
        native="bf16",
        document="bf16",
        why="Exact mode rounds none of them, for the same reason as scores; Megatron rounds them to BF16.",
        remedy=_MODULES,
    ),
    _both(
        "attention.output",
        ROWS[5],
        "what leaves the attention",
        "bf16",
        document="bf16",
        why="Rounded once, after the sum over all keys.",
        remedy=_MODULES,
    ),
    _both(
        "residual",
        ROWS[6],
        "the residual stream, as it leaves a layer",
        "bf16",
        document="bf16",
        why="What every layer adds to it stays in it to the end: in FP8 each of them would round all that came before.",
        remedy=_MODULES,
    ),
    _both(
        "gradient.stream",
        ROWS[7],
        "the gradient of the residual stream",
        "bf16",
        document="bf16",
        why="As of every activation: BF16 outside products.",
        remedy=_MODULES,
    ),
    _both(
        "gradient.weight",
        ROWS[7],
        "the gradient of a weight, of one micro-batch",
        "bf16",
        document="bf16",
        why="Products round it once, and it is added up in FP32 at once.",
        remedy=_MODULES,
    ),
    _both(
        "gradient.buffer",
        ROWS[7],
        "what gradients are added up in, over micro-batches",
        "fp32",
        document="bf16",
        why="The published map keeps BF16. Here, as in Megatron, the buffers are FP32: in BF16 the 257th of equal "
        "micro-batches would change nothing.",
        remedy=_OPTIMIZER,
    ),
    _both(
        "gradient.wire",
        ROWS[7],
        "gradients between data-parallel ranks",
        "{wire}",
        document="e4m3",
        why="The published map sends them in FP8 and averages in BF16. Here they travel in FP32 unless the spec says "
        "otherwise, and are added up in FP32 in any case.",
        remedy=_OPTIMIZER,
    ),
    _both(
        "master",
        ROWS[8],
        "weights that the optimizer updates",
        "fp32",
        document="fp32",
        why="An update survives only if it is half a step of the format or more: at a rate of 1e-6 nearly none is in "
        "BF16, and the loss stops falling without a sign.",
        remedy=_OPTIMIZER,
    ),
    _both(
        "moment",
        ROWS[9],
        "Adam's first and second moments",
        "fp32",
        document="fp32",
        why="The second moment decays by 1 - beta2 a step, which few bits round away, and spans the square of the "
        "gradients' range.",
        remedy=_OPTIMIZER,
    ),
    _both(
        "loss.reduction",
        ROWS[10],
        "operand of the log-softmax and of the sums of the loss, forward and backward",
        "fp32",
        document="fp32",
        why="One scalar comes out of it, and all gradients go back through it.",
        remedy="Look at ops.token_logprobs and at the algorithm's objective.",
    ),
    _both(
        "clipping.norm",
        ROWS[11],
        "operand of the norm of all gradients, also between ranks",
        "fp32",
        document="fp32",
        why="Squares of every gradient are summed: BF16 loses the small ones, and their range overflows FP8.",
        remedy=_OPTIMIZER,
    ),
    _both(
        "router.weight",
        ROWS[12],
        "weight of the router, as the forward reads it",
        "bf16",
        why="The published map has no row for the router; the DeepSeek-V3 report keeps it in high precision. It is too "
        "small to gain from FP8, and a rounded logit sends a token to other experts.",
        remedy=_MODULES,
    ),
    _both(
        "router.operands",
        ROWS[12],
        "both operands of the router's products, forward and backward",
        "bf16",
        why="As for its weight.",
        remedy=_MODULES,
    ),
    _both(
        "router.logits",
        ROWS[12],
        "logits of the router",
        "bf16",
        why="Rounded once, on both sides alike.",
        remedy=_MODULES,
    ),
    _both(
        "router.softmax",
        ROWS[12],
        "operand of the router's softmax and of the sum that it is renormalised by",
        "fp32",
        why="Probabilities of experts that are nearly equal must not become equal.",
        remedy=_MODULES,
    ),
    TensorClass(
        key="router.probabilities",
        row=ROWS[12],
        tensors="probabilities that leave the router",
        exact="fp32",
        native="bf16",
        why="Exact mode and SGLang keep FP32; Megatron rounds them to BF16.",
        remedy=_MODULES,
    ),
    TensorClass(
        key="router.gradient",
        row=ROWS[12],
        tensors="operand of the sum that is the gradient of a probability",
        exact="fp32",
        native="bf16",
        why="Experts' outputs are weighted in FP32 in exact mode; in native mode both stand in BF16 already.",
        remedy=_MODULES,
    ),
    _both(
        "wire.weights",
        ROWS[13],
        "weights that data-parallel ranks gather after an update",
        "bf16|{gather}",
        why="The shadows: half the bytes of the masters, and the bits that every rank's forward reads; where the spec "
        "says so, the codes that FP8 products would make of them.",
        remedy=_OPTIMIZER,
    ),
    _both(
        "wire.layer",
        ROWS[13],
        "what ranks exchange inside a layer: parts of a sequence, tokens of experts, partial sums",
        "bf16|fp32",
        why="Activations travel as they are; partial sums of tensor parallelism and probabilities in FP32.",
        remedy=_MODULES,
    ),
    _both(
        "engine.weight",
        ROWS[14],
        "weights of projections, MLP and experts that the engine serves",
        "{served}",
        why="The codes of the trainer's forward, verified by digest after each sync.",
        remedy=_ENGINE,
    ),
    _both(
        "engine.scale",
        ROWS[14],
        "their scales",
        "fp32",
        why="Powers of two or not, a scale is stored as FP32, as checkpoints have it.",
        remedy=_ENGINE,
    ),
    _both(
        "engine.leftover",
        ROWS[14],
        "every other weight of the engine: embedding, head, norms, router",
        "bf16",
        why="The rows of the trainer's map above hold for the engine as well.",
        remedy=_ENGINE,
    ),
    _both(
        "engine.derived",
        ROWS[14],
        "what stands in memory for the codes where there are no FP8 products",
        "{dequantized}",
        why="On a CPU a product multiplies what the codes stand for; the format holds that exactly.",
        remedy=_ENGINE,
    ),
    _both(
        "engine.kv_cache",
        ROWS[14],
        "keys and values of tokens that were computed",
        "bf16",
        why="The trainer's attention sees keys and values in BF16: with an FP8 cache no log-probability is equal.",
        remedy="Start the engine without --kv-cache-dtype.",
    ),
)

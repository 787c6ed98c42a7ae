"""Has the precision map: the planned format of each class of tensors in a training step and an engine, and the reason.

The first twelve rows come from a map published for DeepSeek-V3. Rows for the router, adapters, data that ranks
exchange inside a layer, and the engine follow. docs/exactness.md has the map as a table, and some reasons at length.
`fp8rl doctor SPEC` compares the plan with what a live trainer and engine are found to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fp8rl.numerics import kv
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import format_of


@dataclass(frozen=True, kw_only=True)
class TensorClass:
    """One class of tensors and its plan.

    A format is `fp32`, `bf16`, `e4m3` or `e5m2`; a bar separates allowed formats. Braces stand for a format of the run:
    `{weight}`, `{activation}`, `{gradient}` of the trainer's products, `{served}` of the engine's weights, `{wire}` and
    `{gather}` between data-parallel ranks, `{kv}` of keys and values; `{operand}` and `{dequantized}` are the narrowest
    formats that hold the dequantized weights of either side.
    """

    key: str
    """The name of the class in reports."""
    row: str
    tensors: str
    """The tensors, in words."""
    exact: str
    native: str
    document: str
    """The format of the published map; empty where it says nothing."""
    why: str
    remedy: str
    """What to do if another format is found."""


def precision_map(
    numerics: NumericsConfig,
    *,
    gradient_wire: str = "fp32",
    weight_gather: str = "bf16",
    own: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, tuple[str, ...]]:
    """Return a run's plan: for each class, by key, the allowed formats.

    gradient_wire, weight_gather: the formats between data-parallel ranks. own: by key, formats of the model's ops that
    differ from the map.
    """
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
        "kv": format_of(numerics.kv_format.dtype),
        "operand": format_of(spec.weight.dequantized_dtype),
        "dequantized": format_of(served.dequantized_dtype),
    }
    planned = {}
    for row in CLASSES:
        formats = own.get(row.key, getattr(row, numerics.mode)).format(**names).split("|")
        planned[row.key] = tuple(dict.fromkeys(formats))
    return planned


_MODULES = "A module of another precision is in place: look at fp8rl/trainer/modules, and reinstall this distribution."
_OPTIMIZER = (
    "Look at how fp8rl/trainer/distributed/optimizer.py makes the optimizer, and what has replaced its tensors since."
)
_SPEC = "Compare the numerics section with what was set since: numerics.preset, numerics.scope, Trainer.set_numerics."
_ENGINE = "Start the engine from this spec, with the arguments of fp8rl/rollout/engine/server/arguments.py."
_LOSS = "Look at ops.token_logprobs and at the algorithm's objective."


def _row(
    row: str, remedy: str, *classes: tuple[str, str, str, str, str], **other: dict[str, str]
) -> tuple[TensorClass, ...]:
    """Return the classes of tensors in one row of the map. classes: (key, tensors, format, published format, why).
    other: by key of a class, fields that differ, such as its format in native mode."""
    made = []
    for key, tensors, planned, published, why in classes:
        formats = {"exact": planned, "native": planned, "remedy": remedy} | other.get(key.replace(".", "_"), {})
        made.append(TensorClass(key=key, row=row, tensors=tensors, document=published, why=why, **formats))
    return tuple(made)


CLASSES: tuple[TensorClass, ...] = (
    *_row(
        "token embedding and output head",
        _MODULES,
        ("embedding.weight", "weight of the token embedding, as the forward reads it",
         "bf16", "bf16", "In a shared FP8 block, frequent tokens would round rare ones away."),
        ("embedding.output", "output of the token embedding",
         "bf16", "bf16", "It begins the residual stream."),
        ("head.weight", "weight of the output head, as the forward reads it",
         "bf16", "bf16", "It may be tied to the embedding."),
        ("head.operands", "both operands of the output head's products, forward and backward",
         "bf16", "bf16", "FP8 here would round log-probabilities."),
        ("head.logits", "logits",
         "bf16", "bf16", "Both sides round them once."),
    ),
    *_row(
        "RMSNorm",
        _MODULES,
        ("norm.reduction", "operand of the means and sums of RMSNorm, forward and backward",
         "fp32", "fp32", "A mean of squares leaves FP8's range."),
        ("norm.output", "output of RMSNorm",
         "bf16", "bf16", "Rounded once; products quantize it."),
    ),
    *_row(
        "RMSNorm gain",
        _MODULES,
        ("gain.weight", "gain of RMSNorm, as the forward reads it",
         "bf16", "bf16", "A vector: FP8 would save nothing."),
        ("gain.master", "gain of RMSNorm, as the optimizer updates it",
         "fp32", "fp32", "Near 1, BF16 would round away updates below 0.002."),
        gain_master={"remedy": _OPTIMIZER},
    ),
    *_row(
        "projections, MLP and experts",
        _SPEC,
        ("product.shadow", "weights of projections, MLP and experts, as the optimizer leaves them",
         "bf16|{weight}", "", "BF16, quantized once per update; FP8 if TransformerEngine holds its parameters in FP8."),
        ("product.cached", "codes of these weights, or a tensor of the codes' values, kept until the next update",
         "{weight}|{operand}", "", "FP8 if products take FP8; on a CPU a format that holds the codes' values."),
        ("product.activation", "activations in products of the forward, and of the weights' gradients",
         "{activation}", "e4m3", "Products are most of the arithmetic."),
        ("product.weight", "weights in products, forward and backward",
         "{weight}", "e4m3", "The codes that the engine serves."),
        ("product.gradient", "gradients in products of the backward",
         "{gradient}", "", "Scales per 128 elements give E4M3 the range that gradients need."),
        ("product.output", "output of a projection or an MLP",
         "bf16", "bf16", "FP8 stays inside a product."),
        ("experts.activation", "tokens in the grouped products of experts",
         "{activation}", "e4m3", "A token's codes do not depend on other tokens of its expert."),
        ("experts.weight", "experts' weights in grouped products",
         "{weight}", "e4m3", "Each expert has its own blocks."),
        ("experts.gradient", "gradients in the grouped products of experts",
         "{gradient}", "", "Each expert has its own groups along the tokens."),
        ("experts.output", "output of a layer of experts",
         "bf16", "bf16", "A token's experts are added before rounding in exact mode, after rounding in native mode."),
        product_shadow={"remedy": _MODULES},
        product_output={"remedy": _MODULES},
        experts_output={"remedy": _MODULES},
    ),
    *_row(
        "attention scores",
        _MODULES,
        ("scores.output", "products of queries and keys",
         "", "bf16", "Exact mode merges splits of keys in FP32; Megatron rounds to BF16."),
        scores_output={"exact": "fp32", "native": "bf16"},
    ),
    *_row(
        "softmax",
        _MODULES,
        ("softmax.reduction", "operand of exponentials, maxima and sums in the attention's softmax",
         "fp32", "fp32", "A gap of 15 leaves a tail of 3e-7."),
        ("softmax.output", "attention weights in their product with the values",
         "", "bf16", "The definition keeps FP32; tensor cores multiply BF16, as Megatron does."),
        ("attention.output", "output of the attention",
         "bf16", "bf16", "Rounded once, after the sum over all keys."),
        softmax_output={"exact": "fp32", "native": "bf16"},
    ),
    *_row(
        "residual stream",
        _MODULES,
        ("residual", "the residual stream after a layer",
         "bf16", "bf16", "In FP8 each layer would round the sum of all earlier layers again."),
    ),
    *_row(
        "gradients",
        _MODULES,
        ("gradient.stream", "the gradient of the residual stream",
         "bf16", "bf16", "BF16 outside products, like activations."),
        ("gradient.weight", "the gradient of a weight in one micro-batch",
         "bf16", "bf16", "Rounded once, then added up in FP32."),
        ("gradient.buffer", "the buffer in which gradients are added up over micro-batches",
         "fp32", "bf16", "In BF16 the 257th of equal micro-batches would change nothing."),
        ("gradient.wire", "gradients between data-parallel ranks",
         "{wire}", "e4m3", "FP32 unless the spec says otherwise; added up in FP32 in any case."),
        gradient_buffer={"remedy": _OPTIMIZER},
        gradient_wire={"remedy": _OPTIMIZER},
    ),
    *_row(
        "master weights",
        _OPTIMIZER,
        ("master", "weights that the optimizer updates",
         "fp32", "fp32", "BF16 would round small updates away."),
    ),
    *_row(
        "Adam's moments",
        _OPTIMIZER,
        ("moment", "Adam's first and second moments",
         "fp32", "fp32", "With few bits, rounding removes the decay of 1 - beta2."),
    ),
    *_row(
        "cross-entropy",
        _LOSS,
        ("loss.reduction", "operand of the log-softmax and of the sums of the loss, forward and backward",
         "fp32", "fp32", "All gradients depend on it."),
    ),
    *_row(
        "gradient norm and clipping",
        _OPTIMIZER,
        ("clipping.norm", "operand of the norm of all gradients, also between ranks",
         "fp32", "fp32", "Squares of small gradients must count."),
    ),
    *_row(
        "router",
        _MODULES,
        ("router.weight", "weight of the router, as the forward reads it",
         "bf16", "", "A rounded logit sends a token to other experts."),
        ("router.operands", "both operands of the router's products, forward and backward",
         "bf16", "", "A rounded logit sends a token to other experts."),
        ("router.logits", "logits of the router",
         "bf16", "", "Rounded once, on both sides alike."),
        ("router.softmax", "operand of the router's softmax, and of the sum for its renormalisation",
         "fp32", "", "Nearly equal experts must not become equal."),
        ("router.probabilities", "probabilities that the router returns",
         "", "", "Exact mode and SGLang keep FP32; Megatron rounds to BF16."),
        router_probabilities={"exact": "fp32", "native": "bf16"},
    ),
    *_row(
        "adapters",
        _MODULES,
        ("adapter.operands", "operands of an adapter's products, forward and backward",
         "bf16", "", "They are small, and FP8 would round updates away."),
        ("adapter.merged", "A and B, when B A is added to a weight",
         "fp64", "", "The sum does not depend on its order, nor on how ranks share the weight."),
    ),
    *_row(
        "between ranks",
        _OPTIMIZER,
        ("wire.weights", "weights that data-parallel ranks gather after an update",
         "bf16|{gather}", "", "The bits that every rank's forward reads, or the codes of these bits."),
        ("wire.layer", "what ranks exchange inside a layer: parts of a sequence, tokens of experts, partial sums",
         "bf16|fp32", "", "Activations as they are; partial sums and probabilities in FP32."),
        wire_layer={"remedy": _MODULES},
    ),
    *_row(
        "engine",
        _ENGINE,
        ("engine.weight", "weights of projections, MLP and experts that the engine serves",
         "{served}", "", "The codes of the trainer's forward, verified by digest."),
        ("engine.scale", "scales of these weights",
         "fp32", "", "Stored as FP32 whatever their values, as in checkpoints."),
        ("engine.leftover", "every other weight of the engine: embedding, head, norms, router",
         "bf16", "", "As in the trainer."),
        ("engine.derived", "the tensor of the codes' values, if there are no FP8 products",
         "{dequantized}", "", "It holds the codes' values exactly."),
        ("engine.kv_cache", "keys and values in the cache",
         "{kv}", "", "The trainer's attention reads the same numbers."),
        ("engine.state", "states of linear attention",
         "fp32", "", "A state is a sum over all earlier tokens, in FP32 as in the trainer."),
        engine_kv_cache={"remedy": kv.REMEDY},
    ),
)  # fmt: skip

DOCUMENTED = tuple(dict.fromkeys(tensors.row for tensors in CLASSES))[:12]
"""The rows of the published map."""

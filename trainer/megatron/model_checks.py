"""Whether a model can be trained in a layout and a quantization.

The driver calls these before it starts a process; they do not need Megatron.
"""

from __future__ import annotations

import math

from fp8rl.models.shape import overlap
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.config import Mode
from fp8rl.numerics.errors import user_error
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import CHUNKS
from fp8rl.trainer.distributed.weight_gather import travels_in_fp8


def check_layout(sizes: ModelSizes, config: TrainerSection, spec: QuantSpec) -> None:
    """Check that the model divides over the ranks, its weights over the quantization blocks, and some are quantized.

    A fused weight (q|k|v per head group, gate|up) is quantized as a whole here and as separate tensors in a Hugging
    Face checkpoint and in the engine. All give the same blocks only if each piece is a whole number of blocks on every
    rank. Experts are never split by tp.

    Args:
        spec: what is quantized.

    Raises:
        UserError: a size does not divide.
    """
    tp = config.tp
    check_split(sizes, tp, spec, "trainer.tp")
    if config.ep > 1 and not sizes.moe:
        raise user_error(
            "trainer.ep",
            found=config.ep,
            expected="1 for a dense model",
            remedy="Set trainer.ep=1, or choose a mixture of experts.",
        )
    if sizes.moe:
        _require_divisor("trainer.ep", config.ep, "num_experts", sizes.experts)
    if config.stage_size % config.ep:
        raise user_error(
            "trainer.ep",
            found=config.ep,
            expected=f"a divisor of tp * dp * cp = {tp} * {config.dp} * {config.cp}, whose ranks share the experts",
            remedy=f"Set trainer.dp={config.ep} or another multiple, or lower trainer.ep.",
        )
    _require_divisor("trainer.pp", config.pp, "num_hidden_layers", sizes.layers)
    if config.cp > 1 and sizes.latent is not None:
        raise user_error(
            "trainer.cp",
            found=config.cp,
            expected="1 for a model with latent attention, whose ranks cannot share a row yet",
            remedy="Set trainer.cp=1.",
        )


def check_wires(sizes: ModelSizes, config: TrainerSection, spec: QuantSpec) -> None:
    """Check that gradients and weights that are to be sent in another format are sent at all, and can be.

    Args:
        spec: what the trainer quantizes when it starts.

    Raises:
        UserError: nothing is sent in this layout, or the weights that products take are not those that would arrive.
    """
    wires = {
        "trainer.gradient_wire": (config.gradient_wire, "fp32"),
        "trainer.weight_gather": (config.weight_gather, "bf16"),
    }
    alone = config.copies == 1 and not (sizes.moe and config.tp > config.ep)  # experts are not split by tp
    for key, (wire, default) in wires.items():
        if alone and wire != default:
            raise user_error(
                key,
                found=f"{wire} with trainer.dp={config.dp}",
                expected=f"{default} where no two ranks train the same parameters, and nothing is sent",
                remedy=f"Set {key}={default}, or trainer.dp=2 or more.",
            )
    if config.weight_gather != "bf16" and not (spec.quantized and travels_in_fp8(spec.weight)):
        weight = spec.weight
        form = f"{weight.format}, {weight.granularity}, {weight.scale}, {weight.rounding}"
        raise user_error(
            "trainer.weight_gather",
            found=f"{config.weight_gather} with " + (f"weights in {form}" if spec.quantized else "a BF16 trainer"),
            expected="weights that the trainer quantizes to e4m3, block, pow2, nearest; others would not arrive as the "
            "forward's own",
            remedy="Set trainer.weight_gather=bf16, or numerics.preset=fp8_block_pow2 and numerics.trainer=fp8.",
        )


def check_router_bias(sizes: ModelSizes, config: TrainerSection) -> None:
    """Check that the model's experts have biases, if these are to be moved. Raises `UserError`."""
    if config.router_bias_rate and sizes.sigmoid_router is None:
        raise user_error(
            "trainer.router_bias_rate",
            found=config.router_bias_rate,
            expected="0 for a model whose experts have no biases",
            remedy="Set trainer.router_bias_rate=0, or choose a model with a sigmoid router, such as GLM-4.5.",
        )


def check_packing(packing: bool, mode: Mode, transformer_engine: bool) -> None:
    """Check that attention can take rows that lie end to end: ours can, and TransformerEngine's.

    Raises:
        UserError: it is Megatron's own.
    """
    if packing and mode == "native" and not transformer_engine:
        raise user_error(
            "trainer.packing",
            found="true with numerics.mode=native and without TransformerEngine",
            expected="false: Megatron's own attention, which native mode has there, takes rows that are padded",
            remedy="Set trainer.packing=false, or numerics.mode=exact.",
        )


def check_sharing(config: TrainerSection, mode: Mode, length: int | None = None) -> None:
    """Check that context-parallel ranks can share rows.

    length: tokens of the longest row, where it is known.

    Raises:
        UserError: attention is not ours, rows lie end to end, or the longest row is no whole number of chunks.
    """
    if config.cp == 1:
        return
    found, chunks = config.cp, CHUNKS * config.cp
    if mode != "exact":
        raise user_error(
            "trainer.cp",
            found=f"{found} with numerics.mode={mode}",
            expected="1: the attention of native mode takes whole rows",
            remedy="Set trainer.cp=1, or numerics.mode=exact.",
        )
    if config.packing:
        raise user_error(
            "trainer.cp",
            found=f"{found} with trainer.packing=true",
            expected="1: ranks share the tokens of rows that are padded",
            remedy="Set trainer.packing=false, or trainer.cp=1.",
        )
    if length is not None and length % chunks:
        raise user_error(
            "rollout.context_length",
            found=length,
            expected=f"a multiple of {chunks}: trainer.cp={found} cuts each row into {chunks} chunks, two for a rank",
            remedy=f"Set rollout.context_length={length // chunks * chunks or chunks}, or trainer.cp=1.",
        )


def check_split(sizes: ModelSizes, tp: int, spec: QuantSpec, key: str) -> None:
    """Check that heads, widths and vocabulary divide over the tensor-parallel ranks of a side, in whole blocks.

    key: what tp is called in the spec. Raises UserError.
    """
    split = {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "vocab_size": sizes.vocab_size}
    if sizes.ffn_size:
        split["intermediate_size"] = sizes.ffn_size
    if sizes.shared_size:
        split["moe_intermediate_size * n_shared_experts"] = sizes.shared_size
    for name, size in split.items():
        _require_divisor(key, tp, name, size)
    _check_quantization(sizes, tp, spec, key)


def check_engine_layout(sizes: ModelSizes, tp: int, spec: QuantSpec, key: str = "rollout.tp") -> None:
    """Check that the model divides over the ranks of an engine; messages speak of them as `key`. Raises UserError."""
    check_split(sizes, tp, spec, key)
    if tp > 1 and sizes.head_norms == "together":
        raise user_error(
            key,
            found=tp,
            expected="1 for a model whose norms of queries and keys are over all heads: SGLang does not share them",
            remedy=f"Set {key}=1, and rollout.engines to use more GPUs.",
        )
    if sizes.moe:
        _require_divisor(key, tp, "num_experts", sizes.experts)


def _check_quantization(sizes: ModelSizes, tp: int, spec: QuantSpec, key: str) -> None:
    if not spec.quantized:
        return
    exceptions = spec.first_layers_bf16 + spec.last_layers_bf16
    if exceptions >= sizes.layers:
        raise user_error(
            "numerics.first_layers_bf16 + numerics.last_layers_bf16",
            found=exceptions,
            expected=f"less than the model's num_hidden_layers = {sizes.layers}, so that some layer is quantized",
            remedy="Lower them, or run both sides in BF16 "
            "(numerics.preset=bf16 numerics.trainer=bf16 numerics.rollout=bf16).",
        )
    if spec.weight.granularity == "tensor" and spec.weight.fixed is None:
        raise user_error(
            "numerics.weight.granularity",
            found="tensor",
            expected="block, token_group or channel",
            remedy="A fused weight has one scale here and several in a checkpoint; choose a finer granularity, "
            "or a static range (numerics.weight.fixed).",
        )
    block = _block(spec)
    pieces = {
        "hidden_size": sizes.hidden_size,
        "moe_intermediate_size": sizes.expert_size,
    }
    pieces |= {"head_dim": sizes.head_dim} if sizes.latent is None else _latent_pieces(sizes, tp, key)
    dense = range(sizes.layers - sizes.moe_layers)
    if overlap(dense, range(spec.first_layers_bf16, sizes.layers - spec.last_layers_bf16)):
        pieces |= _shares("intermediate_size", sizes.ffn_size, tp, key)
    pieces |= _shares("moe_intermediate_size * n_shared_experts", sizes.shared_size, tp, key)
    for name, size in pieces.items():
        if size % block:
            remedy = (
                f"Choose a model with aligned dimensions, lower {key}, or run both sides in BF16 "
                "(numerics.preset=bf16 numerics.trainer=bf16 numerics.rollout=bf16)."
            )
            if sizes.moe and name.startswith("intermediate_size"):
                first = f"numerics.first_layers_bf16={len(dense)} leaves {'it' if len(dense) == 1 else 'them'} in BF16"
                remedy = f"It is the width of the dense first layer{'s' * (len(dense) > 1)}: {first}."
            raise user_error(
                f"model config: {name}",
                found=size,
                expected=f"a multiple of {block}, the quantization block",
                remedy=remedy,
            )


def _latent_pieces(sizes: ModelSizes, tp: int, key: str) -> dict[str, int]:
    """What has to be whole blocks in latent attention; the rows of kv_a_proj_with_mqa need not be."""
    latent, heads = sizes.latent, sizes.heads
    assert latent is not None
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        **_shares("num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)", heads * sizes.head_dim, tp, key),
        **_shares(
            "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
            heads * (sizes.plain_dim + latent.value_dim),
            tp,
            key,
        ),
        **_shares("num_attention_heads * v_head_dim", heads * latent.value_dim, tp, key),
    }


def _shares(name: str, size: int, tp: int, key: str) -> dict[str, int]:
    """What a rank has of a width, by a name that says how it comes about."""
    return {f"{name} / {key} = {size} / {tp}" if tp > 1 else name: size // tp}


def _block(spec: QuantSpec) -> int:
    """The smallest number of elements that holds whole blocks of every role."""
    roles = (spec.weight, spec.activation, spec.gradient)
    return math.lcm(*(role.group for role in roles if role.quantized and role.granularity in ("block", "token_group")))


def _require_divisor(key: str, parts: int, name: str, size: int) -> None:
    if size % parts:
        raise user_error(
            key,
            found=parts,
            expected=f"a divisor of the model's {name} = {size}",
            remedy=f"Set {key} to a divisor of {size}.",
        )

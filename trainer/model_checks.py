"""Whether a model can be trained in a layout, a quantization and a numerics mode.

The driver calls these before it starts a process; they do not need Megatron.
"""

from __future__ import annotations

import math

from numerics.config import Mode
from numerics.errors import user_error
from numerics.spec import QuantSpec
from trainer.config import TrainerConfig
from trainer.hf_config import ModelShape


def check_layout(shape: ModelShape, config: TrainerConfig, spec: QuantSpec) -> None:
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
    split = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab_size}
    if not shape.moe:
        split["intermediate_size"] = shape.ffn_size
    for name, size in split.items():
        _require_divisor("trainer.tp", tp, name, size)
    if config.ep > 1 and not shape.moe:
        raise user_error(
            "trainer.ep",
            found=config.ep,
            expected="1 for a dense model",
            remedy="Set trainer.ep=1, or choose a mixture of experts.",
        )
    if shape.moe:
        _require_divisor("trainer.ep", config.ep, "num_experts", shape.experts)
    if (tp * config.dp) % config.ep:
        raise user_error(
            "trainer.ep",
            found=config.ep,
            expected=f"a divisor of tp * dp = {tp} * {config.dp}, whose ranks the experts are spread over",
            remedy=f"Set trainer.dp={config.ep} or another multiple, or lower trainer.ep.",
        )
    _require_divisor("trainer.pp", config.pp, "num_hidden_layers", shape.layers)
    _check_quantization(shape, tp, spec)


def check_mode(shape: ModelShape, mode: Mode) -> None:
    """Check that the numerics mode defines this architecture.

    Raises:
        UserError: it does not.
    """
    if mode == "native" and shape.top_k == 1 and shape.renormalize:
        raise user_error(
            "numerics.mode",
            found="native for a model with num_experts_per_tok = 1 and norm_topk_prob = true",
            expected="exact: Megatron's router has no probability of 1 for a single expert",
            remedy="Set numerics.mode=exact, or choose a model with more experts per token.",
        )


def _check_quantization(shape: ModelShape, tp: int, spec: QuantSpec) -> None:
    if not spec.quantized:
        return
    exceptions = spec.first_layers_bf16 + spec.last_layers_bf16
    if exceptions >= shape.layers:
        raise user_error(
            "numerics.first_layers_bf16 + numerics.last_layers_bf16",
            found=exceptions,
            expected=f"less than the model's num_hidden_layers = {shape.layers}, so that some layer is quantized",
            remedy="Lower them, or run both sides in BF16 "
            "(numerics.preset=bf16 numerics.trainer=bf16 numerics.rollout=bf16).",
        )
    if spec.weight.granularity == "tensor":
        raise user_error(
            "numerics.weight.granularity",
            found="tensor",
            expected="block, token_group or channel",
            remedy="A fused weight has one scale here and several in a checkpoint; choose a finer granularity.",
        )
    block = _block(spec)
    parts = 1 if shape.moe else tp
    ffn = "moe_intermediate_size" if shape.moe else "intermediate_size"
    if parts > 1:
        ffn += f" / trainer.tp = {shape.ffn_size} / {parts}"
    pieces = {"hidden_size": shape.hidden_size, "head_dim": shape.head_dim, ffn: shape.ffn_size // parts}
    for name, size in pieces.items():
        if size % block:
            raise user_error(
                f"model config: {name}",
                found=size,
                expected=f"a multiple of {block}, the quantization block",
                remedy="Choose a model with aligned dimensions, lower trainer.tp, or run both sides in BF16 "
                "(numerics.preset=bf16 numerics.trainer=bf16 numerics.rollout=bf16).",
            )


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

"""From a Hugging Face Qwen3 or Qwen3-MoE `config.json` to Megatron's TransformerConfig."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from numerics.errors import user_error
from numerics.spec import QuantSpec
from trainer.config import TrainerConfig

MODEL_TYPES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a Qwen3 architecture that the trainer needs.

    Attributes:
        moe: a Qwen3-MoE model, every layer with routed experts; otherwise every layer has a dense MLP.
        ffn_size: width of the dense MLP, or of one expert.
        experts, top_k: 0 for a dense model.
        renormalize: the top-k router probabilities are scaled to sum to one.
        tied: the embedding is also the output projection.
    """

    model_type: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    experts: int = 0
    top_k: int = 0
    renormalize: bool = True

    @property
    def moe(self) -> bool:
        return self.experts > 0


def read_shape(model_path: Path) -> ModelShape:
    """Read `config.json` in `model_path`.

    Raises:
        UserError: no readable config, another architecture, or a variant of it that the shared ops do not define.
    """
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise user_error(
            "model.path",
            found=str(model_path),
            expected="a Hugging Face model directory with config.json",
            remedy="Point it at a Qwen3 or Qwen3-MoE model directory.",
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise user_error(
            str(path), found=str(error), expected="a JSON object", remedy="Download the model's config.json again."
        ) from error
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise user_error(
            f"{path}: model_type",
            found=model_type,
            expected=" or ".join(MODEL_TYPES),
            remedy="Use a model of a supported architecture.",
        )
    _refuse_variants(path, config)
    rope = config.get("rope_parameters") or {}
    moe = model_type == "qwen3_moe"
    return ModelShape(
        model_type=model_type,
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        ffn_size=config["moe_intermediate_size" if moe else "intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        max_positions=config["max_position_embeddings"],
        tied=bool(config.get("tie_word_embeddings", False)),
        # transformers 5 writes the second name.
        experts=config.get("num_experts") or config["num_local_experts"] if moe else 0,
        top_k=config["num_experts_per_tok"] if moe else 0,
        renormalize=bool(config.get("norm_topk_prob", False)) if moe else True,
    )


def check_layout(shape: ModelShape, config: TrainerConfig, spec: QuantSpec) -> None:
    """Check that the model divides over the ranks and its fused weights over the quantization blocks.

    A fused weight (q|k|v per head group, gate|up) is quantized as a whole here and as separate tensors in a Hugging
    Face checkpoint. Both give the same blocks only if each piece is a whole number of blocks on every rank.

    Args:
        spec: what the trainer quantizes.

    Raises:
        UserError: a size does not divide.
    """
    tp = config.tp
    for name, size in (
        ("num_attention_heads", shape.heads),
        ("num_key_value_heads", shape.kv_heads),
        ("vocab_size", shape.vocab_size),
    ):
        _expect_multiple(name, size, tp, f"trainer.tp={tp}")
    if not shape.moe:
        _expect_multiple("intermediate_size", shape.ffn_size, tp, f"trainer.tp={tp}")
    if config.ep > 1:
        _expect_multiple("num_experts", shape.experts, config.ep, f"trainer.ep={config.ep}")
        if not shape.moe:
            raise user_error(
                "trainer.ep", found=config.ep, expected="1 for a dense model", remedy="Set trainer.ep to 1."
            )
    if (config.tp * config.dp) % config.ep:
        raise user_error(
            "trainer.ep",
            found=config.ep,
            expected=f"a divisor of tp * dp = {config.tp * config.dp}, whose ranks it shares",
            remedy="Raise trainer.dp or lower trainer.ep.",
        )
    if config.pp > 1:
        _expect_multiple("num_hidden_layers", shape.layers, config.pp, f"trainer.pp={config.pp}")
    block = _block_rows(spec)
    if block > 1:
        _expect_multiple("head_dim", shape.head_dim, block, f"the {block}-row quantization blocks")
        ffn_parts = 1 if shape.moe else tp
        name = "moe_intermediate_size" if shape.moe else "intermediate_size"
        why = f"the {block}-row quantization blocks on {ffn_parts} ranks"
        _expect_multiple(name, shape.ffn_size, block * ffn_parts, why)


def transformer_config(shape: ModelShape, config: TrainerConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's config. Fusions that need CUDA kernels are off and gradients are sums over all ranks."""
    moe: dict[str, Any] = {}
    if shape.moe:
        moe = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.top_k,
            "moe_ffn_hidden_size": shape.ffn_size,
            "moe_grouped_gemm": True,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_score_function": "softmax",
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=config.tp > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        **moe,
    )


def _refuse_variants(path: Path, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layers = config.get("num_hidden_layers", 0)
    required: tuple[tuple[str, Any, Any], ...] = (
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", config.get("attention_bias", False), False),
        ("use_sliding_window", config.get("use_sliding_window", False), False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
        ("decoder_sparse_step", config.get("decoder_sparse_step", 1), 1),
        ("mlp_only_layers", list(config.get("mlp_only_layers") or []), []),
    )
    for key, found, expected in required:
        if found != expected:
            raise user_error(
                f"{path}: {key}",
                found=found,
                expected=repr(expected),
                remedy="Use a model without this variant; the shared ops do not define it.",
            )
    if layers < 1:
        raise user_error(
            f"{path}: num_hidden_layers", found=layers, expected="at least 1", remedy="Check the model's config.json."
        )


def _block_rows(spec: QuantSpec) -> int:
    """Rows of a weight that share a scale; 1 if each row has its own."""
    if not spec.quantized or spec.weight.granularity in ("channel", "token_group"):
        return 1
    if spec.weight.granularity == "tensor":
        raise user_error(
            "numerics: weight.granularity",
            found="tensor",
            expected="block, token_group or channel",
            remedy="A fused weight has one scale here and several in the engine; choose a finer granularity.",
        )
    return spec.weight.group


def _expect_multiple(name: str, size: int, divisor: int, why: str) -> None:
    if size % divisor:
        raise user_error(
            f"model config: {name}",
            found=size,
            expected=f"a multiple of {divisor} ({why})",
            remedy="Choose another parallel layout, quantization preset or model.",
        )

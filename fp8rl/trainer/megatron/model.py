"""Builds Megatron's GPTModel and TransformerConfig for a model and a layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from fp8rl.models import Model
from fp8rl.numerics import ops
from fp8rl.numerics.config import Mode
from fp8rl.numerics.ops.linear import multiplies_bf16
from fp8rl.numerics.ops.rope import frequencies
from fp8rl.trainer.config import Recompute, TrainerSection
from fp8rl.trainer.megatron import patches, te_runtime
from fp8rl.trainer.megatron.lowering import Lowering
from fp8rl.trainer.modules import exact, native
from fp8rl.trainer.modules.native import Layer, fields_of_layer, megatron_families
from fp8rl.trainer.modules.precision import LayerPrecision, Precision
from fp8rl.trainer.modules.program import ProgramLayer
from fp8rl.trainer.modules.weights import tag_split


def build_model(
    definition: Model,
    config: TrainerSection,
    precision: Precision,
    lowering: Lowering,
    max_sequence_length: int,
    dtype: torch.dtype = torch.bfloat16,
) -> GPTModel:
    """Build this rank's part of the model, with uninitialised weights. Raises UserError: TransformerEngine would
    quantize otherwise than `lowering` says, or a family of ops in the model has no modules for this mode."""
    mode, sizes = precision.numerics.mode, definition.sizes
    megatron_config = transformer_config(definition, config, dtype, mode, lowering)
    if lowering.recipe is not None:
        te_runtime.check(lowering, get_fp8_recipe(megatron_config))
    # Megatron names the device of every weight but the routers' (moe/router.py:53).
    with torch.device(torch.cuda.current_device()):
        model = GPTModel(
            megatron_config,
            _block(megatron_config, definition, precision, config.recompute, lowering.transformer_engine),
            vocab_size=sizes.vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=False,
            share_embeddings_and_output_weights=sizes.tied,
            position_embedding_type="none" if mode == "exact" else "rope",
            rotary_percent=sizes.rotary_dim / sizes.head_dim,
            rotary_base=sizes.rope_theta,
        )
    model.joined = sizes.joined  # which a checkpoint says
    if sizes.rope_scaling is not None and (rotation := getattr(model, "rotary_pos_emb", None)) is not None:
        # Megatron's own scaling is Llama 3's for one length of the context.
        scaled = frequencies(sizes.rope_theta, sizes.rotary_dim, sizes.rope_scaling)
        rotation.inv_freq = scaled.to(rotation.inv_freq)
    # GPTModel names the classes of both ends itself, and leaves tags to an initialisation that is skipped.
    if model.pre_process:
        patches.become(model.embedding.word_embeddings, Embedding).tied = sizes.tied
        tag_split(model.embedding.word_embeddings.weight, 0)
    if model.post_process:
        if model.output_layer.weight is not None:
            tag_split(model.output_layer.weight, 0)
        if mode == "exact" or not multiplies_bf16(next(model.parameters()).device.type):
            patches.become(model.output_layer, exact.PlainColumnLinear)
    return model


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]},
    "layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(
    definition: Model, config: TrainerSection, dtype: torch.dtype, mode: Mode, lowering: Lowering
) -> TransformerConfig:
    """Return Megatron's config for a model. Gradients are summed over ranks, not averaged. Only `lowering` turns on
    fused CUDA kernels. In exact mode it does not describe the modules in a layer, which runs the model's program."""
    config_type: type[TransformerConfig] = TransformerConfig
    sizes = definition.sizes
    if mode == "exact":
        # Of layers that run a program it describes the experts. Checkpoints have a key for each layer if layers differ.
        kinds = {tuple(family.name for family in found) for found in definition.families}
        layers: dict[str, Any] = {"hetereogenous_dist_checkpoint": len(kinds) > 1}
        if sizes.moe:
            layers |= {
                "num_moe_experts": sizes.experts,
                "moe_router_topk": sizes.top_k,
                "moe_ffn_hidden_size": sizes.expert_size,
                "moe_router_pre_softmax": True,  # without it Megatron refuses one expert a token
            }
        if config.recompute == "layer":
            layers |= _RECOMPUTE["layer"]
    else:
        families = megatron_families(definition)
        config_type = next((family.config_type for family in families if family.config_type), config_type)
        layers = {key: value for family in families for key, value in family.config(sizes).items()}
        layers |= _RECOMPUTE[config.recompute]
    general: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.kv_heads,
        "kv_channels": sizes.head_dim,
        "ffn_hidden_size": sizes.ffn_size or sizes.expert_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": sizes.norm_eps,
        "layernorm_zero_centered_gamma": sizes.zero_centered_norms,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "perform_initialization": False,
        "tensor_model_parallel_size": config.tp,
        "pipeline_model_parallel_size": config.pp,
        "context_parallel_size": config.cp,
        "expert_model_parallel_size": config.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": config.tp > 1,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # with rows of several lengths also where there are no experts
        "calculate_per_token_loss": True,
    }
    return config_type(**general | dict(lowering.config) | layers)


def _block(
    config: TransformerConfig, definition: Model, precision: Precision, recompute: Recompute, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Return the decoder block of this pipeline stage, with TransformerEngine's parameter names."""
    first = get_transformer_layer_offset(config)
    precisions = [LayerPrecision(precision, first + index) for index in range(get_num_layers_to_build(config))]
    if precision.numerics.mode == "exact":
        programs = [{"definition": definition, "precision": one, "recompute": recompute} for one in precisions]
        specs = [ModuleSpec(module=ProgramLayer, params=program) for program in programs]
        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=exact.RMSNorm)
    modules = native.transformer_engine_modules if transformer_engine else native.layer_modules
    layers = [Layer(definition, modules(one), one) for one in precisions]
    specs = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                **fields_of_layer(layer), self_attn_bda=get_bias_dropout_add, mlp_bda=get_bias_dropout_add
            ),
        )
        for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=layers[-1].modules.norm)


class Embedding(VocabParallelEmbedding):
    """The token embedding. It sums a token's gradients in FP32.

    torch's CPU kernel sums BF16 gradients in BF16, which loses most of the gradient of a frequent token.

    Attributes:
        tied: whether the head has the same weight.
    """

    tied = False

    def forward(self, input_: Tensor) -> Tensor:
        """[B, S] -> [B, S, H], or [S / tp, B, H] with sequence parallelism"""
        with torch.no_grad():
            looked_up = super().forward(input_)
        return _EmbeddingGradient.apply(looked_up, self.weight, input_, self)


class _EmbeddingGradient(torch.autograd.Function):
    """Returns the embeddings unchanged. In the backward pass it adds their gradient to Megatron's FP32 sum, if any.

    For a tied weight, autograd first adds the gradients of embedding and head, and then passes on the sum.
    """

    @staticmethod
    def forward(ctx: Any, looked_up: Tensor, weight: Tensor, tokens: Tensor, layer: Embedding) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.layer = layer
        ctx.weight = weight
        return looked_up.view_as(looked_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        (tokens,) = ctx.saved_tensors
        layer, weight = ctx.layer, ctx.weight
        if layer.reduce_scatter_embeddings:
            grad = gather_from_sequence_parallel_region(grad, tensor_parallel_output_grad=False, group=layer.tp_group)
            tokens = tokens.t()
        total = None if layer.tied else getattr(weight, "main_grad", None)
        into = torch.zeros_like(weight) if total is None else total
        tokens = tokens.reshape(-1) - layer.vocab_start_index
        ops.add_by_token(into, grad.reshape(-1, grad.shape[-1]).to(weight.dtype), tokens)
        return None, into if total is None else None, None, None

"""Build the stock GPTModel of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from fp8rl.models import Model
from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.config import TrainerConfig
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import patches, te_runtime
from fp8rl.trainer.megatron.config import transformer_config
from fp8rl.trainer.megatron.lowering import Lowering
from fp8rl.trainer.megatron.mapping import MAPPINGS, USUAL, MegatronMapping
from fp8rl.trainer.modules import exact, native
from fp8rl.trainer.modules.embedding import Embedding
from fp8rl.trainer.modules.layer import Layer, LayerModules
from fp8rl.trainer.modules.precision import LayerPrecision, Precision
from fp8rl.trainer.modules.weights import tag_split


def build_model(
    definition: Model,
    config: TrainerConfig,
    layout: Layout,
    precision: Precision,
    lowering: Lowering,
    max_sequence_length: int,
    dtype: torch.dtype = torch.bfloat16,
) -> GPTModel:
    """This rank's part of the model, with uninitialised weights.

    Raises:
        UserError: TransformerEngine would not quantize as `lowering` says.
    """
    mode, sizes, mapping = precision.numerics.mode, definition.sizes, MAPPINGS.get(definition.architecture.name, USUAL)
    modules_of = partial(exact.layer_modules, sizes) if mode == "exact" else native.layer_modules(sizes, lowering)
    megatron_config = transformer_config(sizes, mapping, config, dtype, mode, lowering)
    te_runtime.check(lowering, megatron_config)
    # Megatron names the device of every weight but the routers' (moe/router.py:53).
    with torch.device(torch.cuda.current_device()):
        model = GPTModel(
            megatron_config,
            _block(megatron_config, sizes, mapping, precision, modules_of),
            vocab_size=sizes.vocab_size,
            max_sequence_length=max_sequence_length,
            pre_process=layout.first_stage,
            post_process=layout.last_stage,
            parallel_output=False,
            share_embeddings_and_output_weights=sizes.tied,
            position_embedding_type="none" if mode == "exact" else "rope",
            rotary_percent=sizes.rotary_dim / sizes.head_dim,
            rotary_base=sizes.rope_theta,
        )
    _finish_ends(model)
    if mode == "exact":
        exact.use_shared_output(model)
    return model


def _block(
    config: TransformerConfig,
    sizes: ModelSizes,
    mapping: MegatronMapping,
    precision: Precision,
    modules_of: Callable[[LayerPrecision], LayerModules],
) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage, with TransformerEngine's parameter names."""
    first = get_transformer_layer_offset(config)
    own = [precision.of_layer(first + index) for index in range(get_num_layers_to_build(config))]
    layers = [Layer(sizes, modules_of(each), each) for each in own]
    specs = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                **mapping.attention(layer),
                **mapping.mlp(layer, mapping.router),
                self_attn_bda=get_bias_dropout_add,
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=layers[-1].modules.norm)


def _finish_ends(model: GPTModel) -> None:
    """GPTModel names the class of its embedding itself, and leaves tags to an initialisation that is skipped."""
    if model.pre_process:
        patches.become(model.embedding.word_embeddings, Embedding)
        tag_split(model.embedding.word_embeddings.weight, 0)
    if model.post_process and model.output_layer.weight is not None:
        tag_split(model.output_layer.weight, 0)

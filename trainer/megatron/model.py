"""Build the stock GPTModel of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
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
from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import patches, te_runtime
from fp8rl.trainer.megatron.config import MAPPINGS, USUAL, MegatronMapping, transformer_config
from fp8rl.trainer.megatron.lowering import Lowering
from fp8rl.trainer.modules import exact, native
from fp8rl.trainer.modules.layer import Layer, LayerModules
from fp8rl.trainer.modules.precision import LayerPrecision, Precision
from fp8rl.trainer.modules.weights import tag_split


def build_model(
    definition: Model,
    config: TrainerSection,
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


# The token embedding of both modes.


class Embedding(VocabParallelEmbedding):
    """The token embedding, with its gradient summed in FP32.

    torch's CPU kernel sums a token's BF16 gradients in BF16, which loses most of a frequent token's gradient.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """[B, S] -> [B, S, H], or [S / tp, B, H] with sequence parallelism"""
        with torch.no_grad():
            looked_up = super().forward(input_)
        return _EmbeddingGradient.apply(looked_up, self.weight, input_, self)


class _EmbeddingGradient(torch.autograd.Function):
    """Passes the embeddings through and gives their gradient to the weight."""

    @staticmethod
    def forward(ctx: Any, looked_up: Tensor, weight: Tensor, tokens: Tensor, layer: Embedding) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.layer = layer
        ctx.weight = weight
        return looked_up.view_as(looked_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        layer, weight = ctx.layer, ctx.weight
        if layer.reduce_scatter_embeddings:
            grad = gather_from_sequence_parallel_region(grad, tensor_parallel_output_grad=False, group=layer.tp_group)
            tokens = tokens.t()
        tokens, grad = tokens.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if layer.tp_group.size() > 1:
            mine = (tokens >= layer.vocab_start_index) & (tokens < layer.vocab_end_index)
            tokens, grad = tokens[mine] - layer.vocab_start_index, grad[mine]
        total = _sum_by_index(grad, tokens, len(weight))
        return None, total.to(weight.dtype), None, None


def _sum_by_index(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """The sum of the rows of each index, in their order, in FP32: [T, H] -> [count, H]. Atomics would have no order."""
    ordered = rows[index.argsort(stable=True)].float()
    counts = index.bincount(minlength=count)
    return torch.segment_reduce(ordered, "sum", lengths=counts, axis=0, initial=0.0, unsafe=True)

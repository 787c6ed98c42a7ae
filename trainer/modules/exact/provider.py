"""Which module stands where in a layer when every op is the shared one."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics import ops
from fp8rl.trainer.megatron.patches import become
from fp8rl.trainer.modules.exact.attention import CoreAttention
from fp8rl.trainer.modules.exact.experts import Experts, MoE
from fp8rl.trainer.modules.exact.latent import LatentAttention, LatentCore
from fp8rl.trainer.modules.exact.linear import ColumnLinear, NormColumnLinear, OutputLinear, RowLinear
from fp8rl.trainer.modules.exact.norm import RMSNorm
from fp8rl.trainer.modules.exact.router import BiasedRouter, Router
from fp8rl.trainer.modules.layer import LatentModules, LayerModules, asking
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import StackedWeights


def layer_modules(sizes: ModelSizes, precision: LayerPrecision) -> LayerModules:
    """The modules of a layer; the model is built without position embeddings, as CoreAttention rotates."""
    experts = ModuleSpec(
        module=Experts,
        params={"precision": precision},
        submodules=MLPSubmodules(linear_fc1=StackedWeights, linear_fc2=StackedWeights),
    )
    return LayerModules(
        norm=RMSNorm,
        norm_column_linear=asking(precision, NormColumnLinear),
        column_linear=asking(precision, ColumnLinear),
        row_linear=asking(precision, RowLinear),
        core_attention=ModuleSpec(
            module=CoreAttention, params={"rope_theta": sizes.rope_theta, "rotary_dim": sizes.rotary_dim}
        ),
        activation=SwiGLU,
        router=_router(sizes),
        experts=experts,
        moe=MoE,
        latent=LatentModules(
            attention=ModuleSpec(module=LatentAttention, params={"precision": precision}),
            narrow=ColumnParallelLinear,
            core=ModuleSpec(module=LatentCore, params={"sizes": sizes}),
        ),
    )


def _router(sizes: ModelSizes) -> ModuleSpec:
    if sizes.sigmoid_router is None:
        return ModuleSpec(module=Router, params={"renormalize": sizes.renormalize})
    return ModuleSpec(module=BiasedRouter, params={"renormalize": sizes.renormalize, "chooses": sizes.sigmoid_router})


def use_shared_output(model: GPTModel) -> None:
    """Put the shared product at the end of the model."""
    if model.post_process:
        become(model.output_layer, OutputLinear)


class SwiGLU(MegatronModule):
    """`ops.swiglu` as a module, which Megatron's MLP asks for its part of a checkpoint."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """[..., 2F] -> [..., F]"""
        return ops.swiglu(gate_up)

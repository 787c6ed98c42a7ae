"""Modules of a layer when every op is the shared one."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from fp8rl.models.sizes import ModelSizes, SigmoidRouter
from fp8rl.numerics import ops
from fp8rl.trainer.megatron.patches import become
from fp8rl.trainer.modules.exact.attention import CoreAttention
from fp8rl.trainer.modules.exact.experts import Experts, MoE
from fp8rl.trainer.modules.exact.latent import LatentAttention, LatentCore
from fp8rl.trainer.modules.exact.linear import ColumnLinear, NormColumnLinear, OutputLinear, RowLinear
from fp8rl.trainer.modules.layer import LatentModules, LayerModules, asking
from fp8rl.trainer.modules.precision import LayerPrecision
from fp8rl.trainer.modules.weights import StackedWeights, norm_weight

# RMSNorm as Megatron's layer_norm module.


class RMSNorm(nn.Module):
    """`ops.rms_norm` over the last axis."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        return ops.rms_norm(x, self.weight, self.eps)


# The top-k router.


class Router(TopKRouter):
    """Logits by `ops.linear`, top-k by `ops.route`, handed to the stock dispatcher as dense tensors."""

    def __init__(
        self,
        *,
        renormalize: bool,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.renormalize = renormalize

    def gating(self, input: Tensor) -> Tensor:
        """[S, B, H] -> logits [S, B, E]"""
        return ops.linear(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [S, B, E] -> probabilities fp32 [S * B, E], zero off the chosen experts, and their bool map."""
        flat = logits.reshape(-1, logits.shape[-1])
        probs, chosen = self._route(flat)
        dense = torch.zeros(flat.shape, dtype=probs.dtype, device=probs.device).scatter(1, chosen, probs)
        routing_map = torch.zeros(flat.shape, dtype=torch.bool, device=probs.device).scatter(1, chosen, True)
        return dense, routing_map

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> probabilities and experts [T, k]"""
        return ops.route(logits, self.topk, self.renormalize, self._choose)

    def _choose(self, probs: Tensor, top_k: int) -> Tensor:
        return self.router_replay.get_replay_topk(probs, top_k, default_compute_topk=_top)[1]

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[S, B, H] -> what :meth:`routing` returns."""
        return self.routing(self.gating(input), padding_mask)


class BiasedRouter(Router):
    """Logits in FP32, not rounded, and top-k by `ops.route_sigmoid`, with a bias for each expert."""

    def __init__(self, *, chooses: SigmoidRouter, **settings: Any) -> None:
        super().__init__(**settings)
        self.chooses = chooses

    def gating(self, input: Tensor) -> Tensor:
        """[S, B, H] -> logits FP32 [S, B, E]"""
        return ops.linear_partial(input, self.weight)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        how = self.chooses
        return ops.route_sigmoid(
            logits, self.expert_bias, self.topk, how.groups, how.kept_groups, self.renormalize, how.factor, self._choose
        )


def _top(probs: Tensor, top_k: int, *groups: None) -> tuple[Tensor, Tensor]:
    experts = ops.top_experts(probs, top_k)
    return probs.gather(1, experts), experts


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

"""Components of the layers of a Megatron model, and the parts that most architectures have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from fp8rl.models.sizes import ModelSizes
from fp8rl.trainer.modules.precision import LayerPrecision

# A norm over all heads of a token together, in one numerics mode as in the other.


class HeadsNorm(nn.Module):
    """Norms queries or keys over the width of all heads (OLMoE), where Megatron would norm each head.

    The ranks of tensor parallelism gather their heads for it, so that the bits do not depend on the layout. Each has
    the whole weight and the gradient of its own heads' part, which Megatron adds up over them.

    norm: the class of a norm over the last axis. heads: of the whole model. hidden_size: of one head.
    """

    def __init__(
        self, *, norm: type[nn.Module], heads: int, config: TransformerConfig, hidden_size: int, eps: float
    ) -> None:
        super().__init__()
        self.norm = build_module(norm, config=config, hidden_size=heads * hidden_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, heads of this rank, D] -> the same"""
        group = get_tensor_model_parallel_group()
        whole = self.norm(all_gather_last_dim_from_tensor_parallel_region(x.flatten(2), group))
        return whole.chunk(group.size(), -1)[group.rank()].unflatten(-1, x.shape[2:])


Fields = Mapping[str, Any]
"""Some fields of Megatron's TransformerLayerSubmodules."""


@dataclass(frozen=True)
class LatentModules:
    """Replacements of Megatron's MLASelfAttention, the class of its narrow products, and its core."""

    attention: ModuleSpec
    narrow: type[nn.Module]
    core: ModuleSpec | type[nn.Module]


@dataclass(frozen=True)
class LayerModules:
    """Modules that differ between the modes.

    Attributes:
        norm_column_linear, column_linear, row_linear: for a module kind; see `asking`.
        activation: of a dense MLP; None for the SwiGLU inside Megatron's MLP.
        router, experts, moe: of routed experts; `moe` holds the other two.
        latent: latent attention, its narrow products, and what stands in it as the core.
    """

    norm: type[nn.Module]
    norm_column_linear: Callable[[str], ModuleSpec]
    column_linear: Callable[[str], ModuleSpec]
    row_linear: Callable[[str], ModuleSpec]
    core_attention: ModuleSpec | type[nn.Module]
    activation: type[nn.Module] | None
    router: ModuleSpec
    experts: ModuleSpec
    moe: type[MoELayer]
    latent: LatentModules


@dataclass(frozen=True)
class Layer:
    """A layer that is to be built. modules: of the numerics mode."""

    sizes: ModelSizes
    modules: LayerModules
    precision: LayerPrecision

    @property
    def has_experts(self) -> bool:
        return self.sizes.has_experts(self.precision.layer)


Router = Callable[[Layer], ModuleSpec]


def asking(precision: LayerPrecision, module: type[nn.Module]) -> Callable[[str], ModuleSpec]:
    """`module` for any module kind, which takes `precision` and its `kind` as keywords and asks whether to quantize."""
    return lambda kind: ModuleSpec(module=module, params={"precision": precision, "kind": kind})


def attention_spec(layer: Layer, module: type[SelfAttention] = SelfAttention, **submodules: Any) -> ModuleSpec:
    """Grouped queries, normed as the model's sizes say, and the norm before them inside linear_qkv, as
    TransformerEngine has it; module, submodules: others in place of these."""
    modules = layer.modules
    usual = {
        "linear_qkv": modules.norm_column_linear("q_proj"),
        "core_attention": modules.core_attention,
        "linear_proj": modules.row_linear("o_proj"),
        "q_layernorm": _head_norm(layer, layer.sizes.heads),
        "k_layernorm": _head_norm(layer, layer.sizes.kv_heads),
    }
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(**usual | submodules),
    )


def _head_norm(layer: Layer, heads: int) -> ModuleSpec | type[nn.Module] | None:
    """The norm of queries or keys, of so many heads."""
    norm = layer.modules.norm
    match layer.sizes.head_norms:
        case None:
            return None
        case "each":
            return norm
        case "together":
            return ModuleSpec(module=HeadsNorm, params={"norm": norm, "heads": heads})


def attention(layer: Layer) -> Fields:
    if layer.sizes.latent is not None:
        return {"input_layernorm": layer.modules.norm, "self_attention": _latent_attention(layer.modules)}
    return {"self_attention": attention_spec(layer)}


def _latent_attention(modules: LayerModules) -> ModuleSpec:
    """Latent attention with the norms of both narrow rows inside the products out of them."""
    latent = modules.latent
    return ModuleSpec(
        module=latent.attention.module,
        params={"attn_mask_type": AttnMaskType.causal, **latent.attention.params},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=modules.column_linear("q_b_proj"),
            linear_q_down_proj=latent.narrow,
            linear_q_up_proj=modules.norm_column_linear("q_b_proj"),
            linear_kv_down_proj=latent.narrow,
            linear_kv_up_proj=modules.norm_column_linear("kv_b_proj"),
            core_attention=latent.core,
            linear_proj=modules.row_linear("o_proj"),
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )


def router(layer: Layer) -> ModuleSpec:
    return layer.modules.router


def mlp(layer: Layer, router: Router) -> Fields:
    """Routed experts, with shared ones beside them, behind a norm where the layer has them, else a dense MLP with its
    norm inside linear_fc1."""
    modules = layer.modules
    if layer.has_experts:
        shared = _shared_experts(modules) if layer.sizes.shared_size else None
        submodules = MoESubmodules(router=router(layer), experts=modules.experts, shared_experts=shared)
        return {"pre_mlp_layernorm": modules.norm, "mlp": ModuleSpec(module=modules.moe, submodules=submodules)}
    dense = MLPSubmodules(
        linear_fc1=modules.norm_column_linear("gate_proj"),
        linear_fc2=modules.row_linear("down_proj"),
        activation_func=modules.activation,
    )
    return {"mlp": ModuleSpec(module=MLP, params={"ffn_hidden_size": layer.sizes.ffn_size}, submodules=dense)}


def _shared_experts(modules: LayerModules) -> ModuleSpec:
    """The MLP of the experts that every token takes, together."""
    return ModuleSpec(
        module=SharedExpertMLP,
        submodules=MLPSubmodules(
            linear_fc1=modules.column_linear("gate_proj"),
            linear_fc2=modules.row_linear("down_proj"),
            activation_func=modules.activation,
        ),
    )

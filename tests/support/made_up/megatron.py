"""The made-up family in Megatron: attention whose heads are gated, with a norm behind its projection."""

from typing import Any

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from fp8rl.numerics import ops
from fp8rl.trainer.modules.exact import RMSNorm
from fp8rl.trainer.modules.families import Fields, Layer, MegatronFamily, MegatronSide, attention, output
from tests.support.made_up.definition import GATED, gate_heads


class Gates(nn.Module):
    """One gate for each head of a token, in BF16."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.num_attention_heads, config.hidden_size, dtype=config.params_dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight)


class GatedCore(attention.CoreAttention):
    gates: Tensor

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        each = query.shape[-2] // key.shape[-2]
        key, value = (x.repeat_interleave(each, -2) for x in (key, value))
        return gate_heads(super().forward(query, key, value, *args, **kwargs), self.gates)


class GatedAttention(SelfAttention):
    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.gates = Gates(config)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.core_attention.gates = self.gates(self.linear_qkv.normalized(hidden_states))
        return super().forward(hidden_states, *args, **kwargs)


class ProjectionThenNorm(nn.Module):
    def __init__(self, *args: Any, projection: ModuleSpec, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__()
        self.proj = build_module(projection, *args, config=config, **kwargs)
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.norm(self.proj(x)[0]), None


def gated(layer: Layer) -> Fields:
    core = ModuleSpec(module=GatedCore, params={"rope_theta": layer.sizes.rope_theta, "precision": layer.precision})
    projection = ModuleSpec(module=ProjectionThenNorm, params={"projection": layer.modules.row_linear("o_proj")})
    return {"self_attention": attention.attention_spec(layer, core, GatedAttention, linear_proj=projection)}


FAMILY = MegatronFamily(
    sides={**attention.FAMILY.sides, GATED: MegatronSide(output)}, layer={"exact": gated},
    config=attention.FAMILY.config,
)  # fmt: skip

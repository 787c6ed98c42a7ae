"""The dense MLP in Megatron, with the norm before it inside linear_fc1."""

from __future__ import annotations

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from fp8rl.trainer.modules.families import Fields, Layer, MegatronFamily


def _dense(layer: Layer) -> Fields:
    modules = layer.modules
    submodules = MLPSubmodules(
        linear_fc1=modules.norm_column_linear("gate_proj"), linear_fc2=modules.row_linear("down_proj")
    )
    return {"mlp": ModuleSpec(module=MLP, params={"ffn_hidden_size": layer.sizes.ffn_size}, submodules=submodules)}


FAMILY = MegatronFamily(layer=_dense)

"""The dense MLP in Megatron, with the norm before it inside linear_fc1."""

from __future__ import annotations

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import MLP, MLPSubmodules

from fp8rl.models.families.mlp import SWIGLU
from fp8rl.trainer.modules.families import Fields, Layer, MegatronFamily, MegatronSide, rows_of


def _dense(layer: Layer) -> Fields:
    modules = layer.modules
    submodules = MLPSubmodules(
        linear_fc1=modules.norm_column_linear("gate_proj"),
        linear_fc2=modules.row_linear("down_proj"),
        activation_func=modules.activation,
    )
    return {"mlp": ModuleSpec(module=MLP, params={"ffn_hidden_size": layer.sizes.ffn_size}, submodules=submodules)}


FAMILY = MegatronFamily(
    sides={SWIGLU: MegatronSide(lambda call: (rows_of(call[1][0]),))},  # the input of the product behind it
    layer={"exact": _dense, "megatron": _dense, "transformer_engine": _dense},
)

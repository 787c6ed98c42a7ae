import pytest

from numerics.names import place_of
from numerics.spec import MODULE_KINDS


def test_every_layer_and_kind_is_found_by_its_exact_name():
    layer = "model.layers.11."
    names = {
        **{f"{layer}self_attn.{p}_proj.weight": f"{p}_proj" for p in "qkvo"},
        **{f"{layer}mlp.{p}_proj.weight": f"{p}_proj" for p in ("gate", "up", "down")},
        **{f"{layer}mlp.experts.63.{p}_proj.weight": f"experts.{p}_proj" for p in ("gate", "up", "down")},
    }
    assert {name: place_of(name) for name in names} == {name: (11, kind) for name, kind in names.items()}
    assert set(names.values()) == set(MODULE_KINDS)


@pytest.mark.parametrize(
    "name",
    (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate.weight",  # the router, which substring matching takes for gate_proj
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "xmodel.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
    ),
)
def test_everything_else_is_no_kind(name):
    assert place_of(name) is None

"""Which matrices adapters stand beside, under which names, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8rl.models.adapters import AdapterSection, adapter_rows, check_adapter
from fp8rl.models.architecture import Model, architectures
from fp8rl.numerics.core.errors import UserError
from tests.support.definitions import SIZES, tiny_models

MOE = Model(architectures()["Qwen3MoeForCausalLM"], SIZES)
LATENT = tiny_models()["DeepseekV3ForCausalLM"]
LAYER = "model.layers.1."


def names(**config: object) -> list[str]:
    return [row.name for row in adapter_rows(MOE.tensors.rows.values(), AdapterSection(**config))]


def test_every_product_but_router_and_head_has_an_adapter_that_stands_where_its_weight_does() -> None:
    adapted = MOE.adapted(AdapterSection(rank=4)).tensors
    rows = {row.name: row for row in adapted.rows.values() if row.adapts}
    assert {row.adapts for row in rows.values()} == {row.name for row in MOE.tensors.rows.values() if row.kind}
    assert len(rows) == 2 * SIZES.layers * (4 + 3 * SIZES.experts)
    query = MOE.tensors[f"{LAYER}self_attn.q_proj.weight"]
    a, b = (rows[f"{LAYER}self_attn.q_proj.lora_{letter}.weight"] for letter in "AB")
    assert (a.shape, b.shape) == ((4, query.shape[1]), (query.shape[0], 4))
    assert b.megatron == replace(query.megatron, parameter=query.megatron.parameter.replace("weight", "lora_b"))
    assert (a.engine.split, b.engine.split) == (None, query.engine.split)
    assert len(adapted.in_megatron[b.megatron.parameter]) == 3, "of queries, keys and values"
    output = rows[f"{LAYER}self_attn.o_proj.lora_A.weight"], rows[f"{LAYER}self_attn.o_proj.lora_B.weight"]
    assert [row.engine.split for row in output] == [1, None]
    expert = rows[f"{LAYER}mlp.experts.3.up_proj.lora_A.weight"]
    assert (expert.expert, expert.engine.index) == (3, 3)
    assert (expert.megatron.parameter[-7:], expert.engine.parameter[-10:]) == ("lora_a3", "w13_lora_a")


def test_every_product_of_latent_attention_has_an_adapter_also_where_the_engine_fuses_two() -> None:
    check_adapter(LATENT.tensors.rows.values(), AdapterSection(rank=4))
    adapted = LATENT.adapted(AdapterSection(rank=4)).tensors
    rows = {row.name.removeprefix(f"{LAYER}self_attn."): row for row in adapted.rows.values() if row.adapts}
    products = {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"}
    assert {name.split(".")[0] for name in rows if not name.startswith("model.")} == products
    fused = f"{LAYER}self_attn.fused_qkv_a_proj_with_mqa.lora_"
    for letter in "AB":
        pair = adapted.in_engine[f"{fused}{letter.lower()}"][None]
        assert [row.name.split(".")[-3] for row in pair] == ["q_a_proj", "kv_a_proj_with_mqa"]
        assert not any(row.engine.fused or row.engine.split is not None for row in pair), "each rank has them whole"
    assert [rows[f"kv_b_proj.lora_{letter}.weight"].engine.split for letter in "AB"] == [None, 0], "B by heads"


def test_experts_share_one_adapter_or_have_none() -> None:
    shared, none = names(experts="shared"), names(experts="none")
    assert f"{LAYER}mlp.experts.gate_proj.lora_A.weight" in shared
    assert len(shared) == 2 * SIZES.layers * (4 + 3) and len(none) == 2 * SIZES.layers * 4
    some = names(targets=("q_proj", "down_proj"), experts="shared")
    assert {name.split(".")[-3] for name in some} == {"q_proj", "down_proj"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"targets": ("q_proj", "gate")}, "found 'gate', expected names of the model's matrices: q_proj"),
        ({"targets": ("up_proj",), "experts": "none"}, "by which no matrix has an adapter"),
        ({"rank": 10_000}, "adapter.rank: found 10000, expected at most "),
    ],
)
def test_what_the_model_cannot_have_is_refused_in_one_message(config: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(" ", " .?")):
        check_adapter(MOE.tensors.rows.values(), AdapterSection(**config))

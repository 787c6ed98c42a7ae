"""An adapter_config.json is taken where every key in it is known and says plain LoRA."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8rl.models import read_model
from fp8rl.models.checkpoint.peft import CONFIG, TENSORS, PeftConfig, read_config, read_peft_config
from fp8rl.numerics.core.errors import UserError
from tests.support.models import write_model

NONE = """alora_invocation_tokens arrow_config auto_mapping corda_config eva_config exclude_modules kasa_config
layer_replication layers_pattern layers_to_transform lora_ga_config megatron_config modules_to_save monteclora_config
revision target_parameters trainable_token_indices use_bdlora velora_config""".split()
FALSE = "ensure_weight_tying fan_in_fan_out lora_bias use_dora use_qalora use_rslora".split()
PLAIN: dict[str, Any] = dict.fromkeys(NONE) | dict.fromkeys(FALSE, False)
PLAIN |= {"alpha_pattern": {}, "loftq_config": {}, "rank_pattern": {}, "qalora_group_size": 16, "inference_mode": True}
PLAIN |= {"base_model_name_or_path": "Qwen/Qwen2.5-0.5B", "bias": "none", "init_lora_weights": True, "lora_alpha": 8}
PLAIN |= {"lora_dropout": 0.05, "megatron_core": "megatron.core", "peft_type": "LORA", "peft_version": "0.21.2", "r": 4}
PLAIN |= {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
"""What PEFT 0.21.2 writes of `LoraConfig(task_type="CAUSAL_LM", target_modules=...)`."""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(**changes: Any) -> Path:
        (tmp_path / CONFIG).write_text(json.dumps(PLAIN | changes))
        return tmp_path

    return written


def test_every_key_that_peft_has_is_known() -> None:
    peft = pytest.importorskip("peft", reason="needs peft, which nothing else here does")
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= PeftConfig.model_fields.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"init_lora_weights": name} for name in (False, "gaussian", "Gaussian", "orthogonal", "eva", "mica")),
        {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
        {"eva_config": {"rho": 1.0}, "corda_config": {}, "lora_ga_config": None},
        {"target_modules": "all-linear", "exclude_modules": ["lm_head"]},
        {"lora_alpha": 11.5, "rank_pattern": None, "modules_to_save": [], "trainable_token_indices": {}},
        {"layers_to_transform": []},  # PEFT reads it as all layers
        {"use_dora": None, "a_key_of_later": None},
    ],
)
def test_values_that_leave_it_plain_lora_are_taken(changes: dict[str, Any], write: Write) -> None:
    read = read_peft_config(write(**changes), "adapter.start")
    assert (read.r, read.lora_alpha) == (4, float(changes.get("lora_alpha", 8)))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion.*merge_and_unload"),
        ({"init_lora_weights": "pissa_niter_16"}, "weight_conversion.\\.$"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "merge_and_unload"),
        ({"loftq_config": {"loftq_bits": 4}}, "changes the base weights.*merge_and_unload.*remove the key"),
        ({"corda_config": {"corda_method": "ipm"}}, "weight_conversion.*If PEFT has converted it already, remove"),
        ({"r": "four"}, "a positive integer.*Restore"),
        ({"alora_invocation_tokens": [1, 2]}, "train a plain LoRA adapter"),
        ({"arrow_config": {}}, "train a plain LoRA adapter"),  # PEFT reads it as its defaults
        ({"bias": "all"}, "merge_and_unload"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "merge_and_unload"),
        ({"layers_pattern": "blocks"}, "merge_and_unload"),
        ({"use_something_of_later": False}, "Else remove it"),
        ({"peft_type": "IA3"}, "Train a LoRA adapter"),
        ({"peft_type": None}, "no peft_type.*Restore"),
        ({"task_type": "SEQ_CLS"}, "causal language model"),
        ({"r": 0}, "Restore"),
        ({"lora_alpha": None}, "no lora_alpha.*Restore"),
        ({"lora_alpha": 0}, "Restore"),
        ({"lora_alpha": math.nan}, "Restore"),
        ({"target_modules": [["q_proj"]]}, "Restore"),
    ],
)
def test_what_is_not_plain_lora_is_refused_with_its_key_and_a_remedy(
    changes: dict[str, Any], remedy: str, write: Write
) -> None:
    with pytest.raises(UserError, match=remedy) as caught:
        read_peft_config(write(**changes), "adapter.start")
    named = next(iter(changes))
    assert f"{named}=" in str(caught.value) or f"no {named} " in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_no_switch_of_peft_is_let_pass_that_is_not_off(write: Write) -> None:
    passed = set()
    for key in (*NONE, *FALSE, "alpha_pattern", "loftq_config", "rank_pattern"):
        try:
            read_peft_config(write(**{key: {"x": 1}}), "adapter.start")
            passed.add(key)
        except UserError:
            pass
    assert passed == {"auto_mapping", "eva_config"}, "which say how it was trained"


@pytest.mark.parametrize("text", ["[]", "{", "\xff", '{"r": ' + "9" * 400 + "}", '{"r": ' + "9" * 5000 + "}"])
def test_a_file_that_is_no_object_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=CONFIG):
        read_peft_config(tmp_path, "adapter.start")


@pytest.mark.parametrize(
    ("changes", "kept", "message"),
    [
        ({}, "", None),
        ({"layers_to_transform": [0, 1], "use_rslora": True}, "", None),
        ({"layers_to_transform": 0}, "layers.0.", "none of model.layers.1.self_attn.q_proj.*merge_and_unload"),
        ({"target_modules": r".*layers\.0\..*q_proj"}, "layers.0.self_attn.q", "none of model.layers.1.*merge_and"),
        ({"layers_to_transform": [1]}, "", "adapters of model.layers.0.*all that PEFT loads"),
        ({"target_modules": ["q_proj"]}, "", "adapters of model.layers.0.self_attn.v_proj"),
        ({"exclude_modules": ["v_proj"]}, "", "adapters of model.layers.0.self_attn.v_proj"),
        ({"r": 100000}, "", r"expected \[100000, "),
    ],
)
def test_tensors_and_description_must_name_the_same_matrices(
    changes: dict[str, Any], kept: str, message: str | None, write: Write
) -> None:
    path = write(**changes)
    model = read_model(write_model(path / "model", moe=False))
    tensors = {}
    for row in model.tensors.rows.values():
        name = f"base_model.model.{row.name.removesuffix('.weight')}"
        if kept in name and name.endswith(("q_proj", "v_proj")):
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, row.shape[1])
            tensors[f"{name}.lora_B.weight"] = torch.randn(row.shape[0], 4)
    save_file(tensors, path / TENSORS)
    if message is None:
        read = read_config(path, model, "adapter.start")
        assert read.targets == ("q_proj", "v_proj") and read.scale == (4.0 if "use_rslora" in changes else 2.0)
        return
    with pytest.raises(UserError, match=message):
        read_config(path, model, "adapter.start")

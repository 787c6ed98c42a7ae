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

PLAIN: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
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
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion.*merge_and_unload"),
        ({"init_lora_weights": "OLoRA"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "pissa_niter_16"}, "weight_conversion.\\.$"),
        ({"init_lora_weights": "corda"}, "weight_conversion.\\.$"),
        ({"init_lora_weights": "lora_ga"}, "weight_conversion.\\.$"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "merge_and_unload"),
        ({"loftq_config": {"loftq_bits": 4}}, "changes the weights below.*merge_and_unload.*remove the key"),
        ({"corda_config": {"corda_method": "ipm"}}, "weight_conversion.*If PEFT has converted it already, remove"),
        ({"lora_ga_config": {"scale": "stable"}}, "weight_conversion.*If PEFT has converted it already, remove"),
        ({"corda_config": "x"}, "changes the weights below"),
        ({"init_lora_weights": "of_2027"}, "merge_and_unload"),
        ({"init_lora_weights": 1}, "expected true, false"),
        ({"init_lora_weights": {"name": "pissa"}}, "merge_and_unload"),
        ({"use_dora": True}, "merge_and_unload"),
        ({"use_dora": "yes"}, "merge_and_unload"),
        ({"r": "four"}, "a positive integer.*Restore"),
        ({"use_qalora": True}, "train a plain LoRA adapter"),
        ({"alora_invocation_tokens": [1, 2]}, "train a plain LoRA adapter"),
        ({"arrow_config": {"top_k": 2}}, "train a plain LoRA adapter"),
        ({"arrow_config": {}}, "train a plain LoRA adapter"),  # PEFT reads it as its defaults
        ({"layer_replication": [[0, 2], [1, 2]]}, "train a plain LoRA adapter"),
        ({"kasa_config": {}}, "merge_and_unload"),
        ({"velora_config": {}}, "merge_and_unload"),
        ({"monteclora_config": {}}, "merge_and_unload"),
        ({"use_bdlora": {"nblocks": 2}}, "merge_and_unload"),
        ({"megatron_config": {"tp": 2}}, "merge_and_unload"),
        ({"rank_pattern": {"q_proj": 8}}, "merge_and_unload"),
        ({"alpha_pattern": {"q_proj": 8}}, "merge_and_unload"),
        ({"fan_in_fan_out": True}, "merge_and_unload"),
        ({"bias": "all"}, "merge_and_unload"),
        ({"bias": "lora_only"}, "merge_and_unload"),
        ({"lora_bias": True}, "merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, "merge_and_unload"),
        ({"trainable_token_indices": {"embed_tokens": [0]}}, "merge_and_unload"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "merge_and_unload"),
        ({"layers_pattern": "blocks"}, "merge_and_unload"),
        ({"use_something_of_later": False}, "Else remove it"),
        ({"peft_type": "IA3"}, "Train a LoRA adapter"),
        ({"peft_type": None}, "no peft_type.*Restore"),
        ({"task_type": "SEQ_CLS"}, "causal language model"),
        ({"r": None}, "no r .*Restore"),
        ({"r": 0}, "Restore"),
        ({"r": True}, "Restore"),
        ({"r": 4.5}, "Restore"),
        ({"lora_alpha": None}, "no lora_alpha.*Restore"),
        ({"lora_alpha": "8"}, "Restore"),
        ({"lora_alpha": 0}, "Restore"),
        ({"lora_alpha": -8}, "Restore"),
        ({"lora_alpha": math.nan}, "Restore"),
        ({"lora_alpha": math.inf}, "Restore"),
        ({"target_modules": [["q_proj"]]}, "Restore"),
        ({"target_modules": {"q_proj": 1}}, "Restore"),
        ({"layers_to_transform": ["0"]}, "Restore"),
        ({"lora_alpha": True}, "Restore"),
        ({"lora_dropout": "none"}, "Restore"),
        ({"base_model_name_or_path": 7}, "Restore"),
        ({"eva_config": "x"}, "Restore"),
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


@pytest.mark.parametrize(
    "text", ["[]", "7", "null", "{", "", "\xff", '{"r": ' + "9" * 400 + "}", '{"r": ' + "9" * 5000 + "}"]
)
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
        (
            {"target_modules": r".*layers\.0\..*q_proj"},
            "layers.0.self_attn.q",
            "none of model.layers.1.*merge_and_unload",
        ),
        ({"layers_to_transform": [1]}, "", "adapters of model.layers.0.*all that PEFT loads"),
        ({"target_modules": ["q_proj"]}, "", "adapters of model.layers.0.self_attn.v_proj"),
        ({"target_modules": ["proj"]}, "", "adapters of model.layers.0.self_attn.q_proj"),
        ({"exclude_modules": ["v_proj"]}, "", "adapters of model.layers.0.self_attn.v_proj"),
        ({"r": 8}, "", r"q_proj.lora_A.weight of shape \[4, "),
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

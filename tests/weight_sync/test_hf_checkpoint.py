"""The directory that an engine starts from: loadable, described by its config, whole or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.quantizers.quantizers_utils import should_convert_module

from fp8rl.models import Model, read_model
from fp8rl.models.architecture import architectures
from fp8rl.models.checkpoint import writing
from fp8rl.models.checkpoint.reading import weight_files
from fp8rl.models.tiny import TinyModel, write_tiny_model
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.served import convert_checkpoint, quantization_config, served_tensors, write_served_checkpoint
from tests.support.definitions import SIZES
from tests.support.paths import CONFIGS

POW2 = QuantSpec.preset("fp8_block_pow2")
LAYERS = 1


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    write_tiny_model(path, TinyModel(layers=LAYERS, experts=4))
    return path


def contents(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory, found as loaders do."""
    return {name: tensor for file in weight_files(path, "served") for name, tensor in load_file(file).items()}


def assert_holds(path: Path, source: Path, spec: QuantSpec) -> None:
    expected = dict(served_tensors(load_file(source / "model.safetensors").items(), spec, read_model(source)))
    found = contents(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("preset", ["fp8_block_pow2", "fp8_block_fp32", "bf16"])
def test_a_converted_model_is_complete(source: Path, tmp_path: Path, preset: str) -> None:
    spec = QuantSpec.preset(preset)
    convert_checkpoint(source, tmp_path / "served", spec)
    assert_holds(tmp_path / "served", source, spec)
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    quantization = config.pop("quantization_config", None)
    assert config == json.loads((source / "config.json").read_text())
    block = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.0.mlp.gate", "lm_head"],
    }
    by_preset = {"fp8_block_pow2": block | {"scale_fmt": "ue8m0"}, "fp8_block_fp32": block, "bf16": None}
    assert quantization == by_preset[preset]
    asked = "12+3="
    assert AutoTokenizer.from_pretrained(tmp_path / "served")(asked) == AutoTokenizer.from_pretrained(source)(asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"first_layers_bf16": 2, "last_layers_bf16": 1}, {"scope": ["q_proj", "k_proj", "v_proj", "o_proj"]}],
)
def test_loaders_take_what_is_quantized_for_quantized(changes: dict[str, Any]) -> None:
    """By SGLang's and transformers' own reading of the config, for every product of an MoE of twelve layers."""
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    spec, model = POW2.override(changes), Model(architectures()["Qwen3MoeForCausalLM"], replace(SIZES, layers=12))
    kept = quantization_config(spec, model)["modules_to_not_convert"]
    served = dict(served_tensors(((n, torch.zeros(row.shape)) for n, row in model.tensors.rows.items()), spec, model))
    products = [row.name for row in model.tensors.rows.values() if row.product]
    for name in products:
        module, quantized = name.removesuffix(".weight"), name + "_scale_inv" in served
        # SGLang and transformers hold a layer's experts in one module.
        whole = module if ".experts." not in module else module.partition(".experts.")[0] + ".experts"
        assert is_layer_skipped(whole, kept) is not quantized, module
        assert should_convert_module(whole, kept) is quantized, module


def test_the_engine_takes_a_pair_that_it_fuses_for_what_its_tensors_are() -> None:
    """SGLang's GLM-4.7-Flash looks for its own module's name alone, its DeepSeek-V3 for those of the tensors."""
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    model = read_model(CONFIGS / "glm_4_7_flash")
    kept = quantization_config(POW2.override({"first_layers_bf16": 1}), model)["modules_to_not_convert"]
    pair = "fused_qkv_a_proj_with_mqa"
    for mapping in ({}, {pair: ["q_a_proj", "kv_a_proj_with_mqa"]}):
        skipped = [is_layer_skipped(f"model.layers.{layer}.self_attn.{pair}", kept, mapping) for layer in (0, 1)]
        assert skipped == [True, False]


def test_several_shards(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_SHARD_BYTES", 64 << 10)
    convert_checkpoint(source, tmp_path / "served", POW2)
    assert len(list((tmp_path / "served").glob("*.safetensors"))) > 3
    assert_holds(tmp_path / "served", source, POW2)


def test_a_quantized_source_directory_loses_its_old_description(source: Path, tmp_path: Path) -> None:
    """Shards, index and quantization_config of the source do not leak into the new directory."""
    quantized = tmp_path / "quantized"
    convert_checkpoint(source, quantized, POW2)
    for file in source.glob("*.safetensors"):
        (quantized / "model-99999.safetensors").write_bytes(file.read_bytes())
    write_served_checkpoint([("norm", torch.ones(2))], quantized, tmp_path / "served", QuantSpec.preset("bf16"))
    assert contents(tmp_path / "served").keys() == {"norm"}
    assert "quantization_config" not in json.loads((tmp_path / "served" / "config.json").read_text())


def test_tensors_that_share_memory_are_written_each_for_itself(source: Path, tmp_path: Path) -> None:
    """The trainer's unquantized q, k and v are views of one parameter."""
    fused = torch.randn(6, 4).bfloat16()
    parts = dict(zip("qkv", fused.split([3, 2, 1]), strict=True))
    write_served_checkpoint(parts.items(), source, tmp_path / "served", QuantSpec.preset("bf16"))
    found = contents(tmp_path / "served")
    assert all(torch.equal(found[name], part) for name, part in parts.items())


@pytest.mark.parametrize("earlier", [False, True])
def test_a_failure_midway_leaves_what_was_there(source: Path, tmp_path: Path, earlier: bool) -> None:
    path = tmp_path / "served"
    if earlier:
        convert_checkpoint(source, path, POW2)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        write_served_checkpoint(failing(), source, path, POW2)
    assert [entry.name for entry in tmp_path.iterdir()] == (["served"] if earlier else [])
    if earlier:
        assert_holds(path, source, POW2)


def test_a_new_checkpoint_takes_the_place_of_the_old_one(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "served"
    convert_checkpoint(source, path, POW2)
    (path / "model-00077.safetensors").write_bytes(b"left over")
    convert_checkpoint(source, path, POW2)
    assert_holds(path, source, POW2)
    assert not (path / "model-00077.safetensors").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["served"]

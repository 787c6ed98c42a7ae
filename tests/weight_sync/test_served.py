"""What an engine serves: exact tensors, the directory that it starts from, whole or not there, and their bytes."""

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

from fp8rl.models import Model, read_model, read_shape
from fp8rl.models.architecture import architectures
from fp8rl.models.checkpoint import writing
from fp8rl.models.checkpoint.reading import weight_files
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.core.memory import DeviceMemory
from fp8rl.numerics.quantize import quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.weight_sync.buckets import Packer
from fp8rl.weight_sync.served import (
    convert_checkpoint,
    quantization_config,
    served_bytes,
    served_tensors,
    write_served_checkpoint,
)
from tests.support.definitions import SIZES, every_tensor
from tests.support.models import write_family
from tests.support.paths import CONFIGS, EXAMPLES
from tests.support.tiny_model import TinyModel, write_tiny_model

POW2, BF16 = QuantSpec.preset("fp8_block_pow2"), QuantSpec.preset("bf16")
LAYER = "model.layers.3."
MODEL = every_tensor(layers=5)
# name -> shape, and the blocks of 128 x 128 that it has if it is quantized
WEIGHTS = {
    "model.embed_tokens.weight": ((64, 256), None),
    LAYER + "input_layernorm.weight": ((256,), None),
    LAYER + "self_attn.q_proj.weight": ((512, 256), (4, 2)),
    LAYER + "self_attn.k_proj.weight": ((200, 256), (2, 2)),
    LAYER + "self_attn.v_proj.weight": ((128, 300), (1, 3)),
    LAYER + "self_attn.o_proj.weight": ((256, 512), (2, 4)),
    LAYER + "self_attn.q_norm.weight": ((128,), None),
    LAYER + "mlp.gate.weight": ((128, 256), None),  # the router: "gate" is not "gate_proj"
    LAYER + "mlp.experts.11.gate_proj.weight": ((128, 256), (1, 2)),
    LAYER + "mlp.experts.11.up_proj.weight": ((128, 256), (1, 2)),
    LAYER + "mlp.experts.11.down_proj.weight": ((256, 128), (2, 1)),
    "model.layers.4.mlp.gate_proj.weight": ((384, 256), (3, 2)),
    "model.layers.4.mlp.up_proj.weight": ((384, 256), (3, 2)),
    "model.layers.4.mlp.down_proj.weight": ((256, 384), (2, 3)),
    "model.norm.weight": ((256,), None),
    "lm_head.weight": ((64, 256), None),
}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, (shape, _) in WEIGHTS.items()}


@pytest.mark.parametrize("preset", ["fp8_block_pow2", "fp8_block_fp32", "ironwood", "bf16"])
def test_bytes_are_the_quantizers(weights: dict[str, torch.Tensor], preset: str) -> None:
    spec, expected = QuantSpec.preset(preset), []
    served = dict(served_tensors(weights.items(), spec, MODEL))
    packer = Packer(1 << 20, DeviceMemory)
    sent = dict(served_tensors(weights.items(), spec, MODEL, packer.allocate))  # quantized into a bucket
    assert sent.keys() == served.keys()
    assert all(torch.equal(sent[name].view(torch.uint8), served[name].view(torch.uint8)) for name in served)
    for name, (shape, blocks) in WEIGHTS.items():
        quantized = blocks is not None and preset != "bf16"
        expected.append((name, shape, torch.float8_e4m3fn if quantized else torch.bfloat16))
        if not quantized:
            assert served[name] is weights[name]
            continue
        scales, ours = served[name + "_scale_inv"], quantize(weights[name], spec.weight)
        expected.append((name + "_scale_inv", blocks, torch.float32))
        if preset == "ironwood":  # a range that is fixed: a scale of one half in every block
            assert (scales == 0.5).all()
            assert torch.equal(served[name].float(), (weights[name].float() * 2).to(torch.float8_e4m3fn).float())
            continue
        assert torch.equal(served[name].view(torch.uint8), ours.data.view(torch.uint8))
        assert torch.equal(scales, ours.scale_inv)
        largest = weights[name][:128, :128].float().abs().max()
        held = (served[name][:128, :128].float() * scales[0, 0]).abs().max()
        assert held == pytest.approx(largest, rel=2**-4)  # E4M3 keeps three bits behind the leading one
    assert [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in served.items()] == expected


@pytest.mark.parametrize(
    ("changes", "in_fp8"),
    [
        ({"scope": ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]}, LAYER + "mlp.experts.11."),
        ({"first_layers_bf16": 3}, "model.layers."),
        ({"first_layers_bf16": 4}, "model.layers.4."),
        ({"last_layers_bf16": 1}, LAYER),
    ],
)
def test_exceptions_are_served_plain(weights: dict[str, torch.Tensor], changes: dict[str, Any], in_fp8: str) -> None:
    """Layers 3 and 4 of a model of five."""
    served = dict(served_tensors(weights.items(), POW2.override(changes), MODEL))
    quantized = {name for name in served if name + "_scale_inv" in served}
    assert quantized == {name for name, (_, blocks) in WEIGHTS.items() if blocks and name.startswith(in_fp8)}
    assert all(served[name] is weights[name] for name in weights.keys() - quantized)


@pytest.mark.parametrize("preset", ["fp8_block_pow2", "fp8_block_fp32"])
def test_what_the_trainer_quantized_is_served_as_it_is(preset: str) -> None:
    spec = QuantSpec.preset(preset)
    name = LAYER + "self_attn.o_proj.weight"
    mine = quantize(torch.randn(256, 256), spec.weight)
    served = dict(served_tensors([(name, mine)], spec, MODEL))
    assert served[name] is mine.data and served[name + "_scale_inv"] is mine.scale_inv
    (unquantized,) = dict(served_tensors([(name, mine)], BF16, MODEL)).values()
    scales = mine.scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(unquantized, (mine.data.float() * scales).bfloat16())
    other = QuantSpec.preset({"fp8_block_pow2": "fp8_block_fp32", "fp8_block_fp32": "fp8_block_pow2"}[preset])
    with pytest.raises(UserError, match=f"{name}: found codes of"):
        list(served_tensors([(name, mine)], other, MODEL))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    write_tiny_model(path, TinyModel(layers=1, experts=4))
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
    asked, *said = (AutoTokenizer.from_pretrained(path)("12+3=") for path in (tmp_path / "served", source))
    assert said == [asked]


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
    # SGLang's GLM-4.7-Flash looks for its own module's name alone, its DeepSeek-V3 for those of the fused tensors.
    kept = quantization_config(POW2.override({"first_layers_bf16": 1}), read_model(CONFIGS / "glm_4_7_flash"))
    pair = "fused_qkv_a_proj_with_mqa"
    for mapping in ({}, {pair: ["q_a_proj", "kv_a_proj_with_mqa"]}):
        for layer, skipped in ((0, True), (1, False)):
            module = f"model.layers.{layer}.self_attn.{pair}"
            assert is_layer_skipped(module, kept["modules_to_not_convert"], mapping) is skipped


def test_an_indexer_is_in_what_is_converted_for_other_servers_alone(tmp_path: Path) -> None:
    """As it was, and named as not quantized; our engines compute nothing with it."""
    source = write_family(tmp_path / "model", TinyModel(hidden=256, heads=2, family="glm_moe_dsa"))
    stored = {name: each for name, each in load_file(source / "model.safetensors").items() if ".indexer." in name}
    written = {}
    for whole in (False, True):
        convert_checkpoint(source, tmp_path / f"{whole}", POW2, whole=whole)
        written[whole] = load_file(tmp_path / f"{whole}/model.safetensors")
    assert stored and written[True].keys() - written[False].keys() == stored.keys()
    assert all(torch.equal(written[True][name], each) for name, each in stored.items())
    kept = quantization_config(POW2, read_model(source))["modules_to_not_convert"]
    assert not should_convert_module("model.layers.0.self_attn.indexer.wk", kept)
    assert should_convert_module("model.layers.0.self_attn.q_b_proj", kept)


def test_tensors_that_share_memory_are_written_each_for_itself_into_several_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's unquantized q, k and v are views of one parameter. What described the source does not stay."""
    monkeypatch.setattr(writing, "_SHARD_BYTES", 64 << 10)
    convert_checkpoint(source, tmp_path / "quantized", POW2)
    assert len(list((tmp_path / "quantized").glob("*.safetensors"))) > 3
    assert_holds(tmp_path / "quantized", source, POW2)
    parts = dict(zip("qkv", torch.randn(6, 4).bfloat16().split([3, 2, 1]), strict=True))
    write_served_checkpoint(parts.items(), tmp_path / "quantized", tmp_path / "served", BF16)
    found = contents(tmp_path / "served")
    assert found.keys() == parts.keys() and all(torch.equal(found[name], part) for name, part in parts.items())
    assert "quantization_config" not in json.loads((tmp_path / "served" / "config.json").read_text())


def test_a_failure_midway_leaves_what_was_there_and_a_new_one_takes_its_place(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "served"

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        raise OSError("no space left on device")

    for there in ([], ["served"]):
        with pytest.raises(OSError, match="no space left"):
            write_served_checkpoint(failing(), source, path, POW2)
        assert [entry.name for entry in tmp_path.iterdir()] == there
        convert_checkpoint(source, path, POW2)
        assert_holds(path, source, POW2)
        assert not (path / "model-00077.safetensors").exists()
        (path / "model-00077.safetensors").write_bytes(b"left over")


def test_bytes_worked_by_hand_and_as_the_review_found_them() -> None:
    """The demo's two layers of 13 x 3 blocks of 128 x 128 less the norms, the router and both ends."""
    quantized = 2 * (128 * 512 + 256 * 128 + 8 * 3 * 128 * 128)
    shape = read_shape(EXAMPLES / "models/tiny_qwen3_moe")
    assert served_bytes(shape, BF16) == 2 * shape.parameters
    assert served_bytes(shape, POW2) == 2 * (shape.parameters - quantized) + quantized + 4 * quantized // 128**2
    qwen, deepseek = (read_shape(CONFIGS / name) for name in ("qwen3_30b_a3b", "deepseek_v3"))
    assert served_bytes(qwen, POW2) / 2**30 == pytest.approx(29.0, abs=0.05)
    # Ranks of an engine share all but norms and routers.
    replicated = sum(2 * w.size * w.count for w in qwen.weights if w.share == "replicated")
    assert 4 * served_bytes(qwen, POW2, 4) == served_bytes(qwen, POW2) + 3 * replicated
    # Eight ranks have each of the four key-value heads of 48 layers twice: 512 rows of keys, and of values.
    copied = 48 * 2 * (512 * 2048 + 4 * 512 * 2048 // 128**2)
    assert 8 * served_bytes(qwen, POW2, 8) == served_bytes(qwen, POW2) + 7 * replicated + copied
    all_bf16, one = (POW2.override({"first_layers_bf16": layers}) for layers in (61, 60))
    assert served_bytes(deepseek, all_bf16) == 2 * deepseek.parameters
    (kv_a,) = (weight for weight in deepseek.weights if weight.kind == "kv_a_proj")
    # 576 rows are four and a half blocks: five rows of scales.
    last = [w for w in deepseek.weights if w.kind and 60 in w.layers]
    scales = sum(w.copies * sum(-(-n // 128) for n in w.pieces or (w.rows,)) * -(-w.columns // 128) for w in last)
    assert -(-kv_a.rows // 128) == 5
    saved = sum(w.size * w.copies for w in last) - 4 * scales
    assert served_bytes(deepseek, all_bf16) - served_bytes(deepseek, one) == saved

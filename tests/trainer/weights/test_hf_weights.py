"""Weights that TransformerEngine holds in FP8, to and from Hugging Face tensors, with its class stood in for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8rl.models import read_model
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.quantize import QuantizedTensor, fake_quantize, quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.weights.hf_weights import HFWeights
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.blockwise import BlockwiseWeight
from tests.support.models import LAYERS, LENGTH
from tests.support.ranks import run_on_ranks
from tests.support.trainers import MakeTrainer

PRESETS = ("fp8_block_pow2", "fp8_block_fp32")
SETTINGS = {"lr": 1e-3, "warmup_steps": 0}
LAYOUTS = {"tp2ep2": {"tp": 2, "ep": 2}, "ep2": {"ep": 2, "dp": 2}}


def native_trainer(path: Path, layout: Layout, config: TrainerSection) -> Any:
    from fp8rl.trainer.trainer import Trainer

    numerics = NumericsConfig(mode="native", spec=QuantSpec.preset("fp8_block_pow2"))
    return Trainer(path, config, numerics, layout, seed=0, total_steps=1, max_sequence_length=LENGTH)


def hold_in_fp8(model: torch.nn.Module, preset: str, layers: range) -> None:
    """Put stand-ins in place of the matrices of these layers, as TransformerEngine's modules would have made them."""
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            inside = any(f"decoder.layers.{layer}." in prefix for layer in layers)
            if inside and parameter.dim() == 2 and "router" not in prefix:
                weight = BlockwiseWeight(parameter.detach(), preset)
                for tag in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                    setattr(weight, tag, getattr(parameter, tag))
                module._parameters[name] = weight


def assert_served_as_held(exported: dict[str, Any], path: Path, preset: str, layers: range) -> None:
    """The bytes of our quantizer on the HF tensors in these layers, and the HF tensors themselves elsewhere."""
    spec, stored = QuantSpec.preset(preset).weight, load_file(path / "model.safetensors")
    table = read_model(path).tensors
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        row, found = table[name], exported[name]
        if row.kind is None or row.layer not in layers:
            assert torch.equal(found, tensor), name
            continue
        expected = quantize(tensor, spec)
        assert isinstance(found, QuantizedTensor) and found.spec == spec
        assert found.data.dtype == expected.data.dtype
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8)), name
        assert torch.equal(found.scale_inv, expected.scale_inv), name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("kind", "layers"), [("moe", range(LAYERS)), ("moe", range(1, LAYERS)), ("dense", range(1))])
def test_codes_and_scales_are_exported_as_they_are(
    preset: str, kind: str, layers: range, moe_path: Path, dense_path: Path, layout: Layout
) -> None:
    path = moe_path if kind == "moe" else dense_path
    trainer = native_trainer(path, layout, TrainerSection(**SETTINGS))
    hold_in_fp8(trainer.model, preset, layers)
    spec = QuantSpec.preset(preset).weight
    weights = HFWeights(path, trainer.definition, spec, trainer.cache, layout)
    assert_served_as_held(dict(weights.share(trainer.model)), path, preset, layers)


def test_products_take_and_engines_are_sent_the_weight_that_the_cache_says_is_served(
    moe_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an adapter would have it: other values than the parameter's."""
    trainer = native_trainer(moe_path, layout, TrainerSection(**SETTINGS))
    stored, spec = load_file(moe_path / "model.safetensors"), trainer.numerics.spec.weight
    monkeypatch.setattr(trainer.cache, "served", lambda weight: -weight.detach())
    exported = dict(trainer.export_weights())
    assert all(torch.equal(exported[name], -tensor) for name, tensor in stored.items())
    weight = trainer.model.decoder.layers[0].mlp.experts.linear_fc2.weight0
    expected = fake_quantize(-weight.detach(), spec)
    assert torch.equal(trainer.cache.operand(weight, spec), expected)
    assert torch.equal(trainer.cache.group_operand([weight], spec).view_as(expected), expected)


@dataclass(frozen=True)
class Export:
    """What the ranks of one layout do."""

    path: Path

    def __call__(self, layout: Layout, config: TrainerSection) -> dict[str, Any]:
        trainer = native_trainer(self.path, layout, config)
        hold_in_fp8(trainer.model, "fp8_block_pow2", range(LAYERS))
        return dict(trainer.export_weights())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_and_scales_are_gathered_from_all_ranks(name: str, moe_path: Path, tmp_path: Path) -> None:
    ranks = run_on_ranks(TrainerSection(**SETTINGS, **LAYOUTS[name]), tmp_path, Export(moe_path))
    assert_served_as_held(
        {name: tensor for rank in ranks for name, tensor in rank.items()}, moe_path, "fp8_block_pow2", range(LAYERS)
    )


def test_loading_quantizes_and_leaves_the_masters_their_precision(moe_path: Path, layout: Layout) -> None:
    trainer = native_trainer(moe_path, layout, TrainerSection(**SETTINGS))
    bf16 = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    hold_in_fp8(trainer.model, "fp8_block_pow2", range(LAYERS))
    held = {name: p for name, p in trainer.model.named_parameters() if te_runtime.is_quantized(p)}
    assert len(held) == LAYERS * (2 + 2 * 8)
    for parameter in trainer.model.parameters():
        if te_runtime.is_quantized(parameter):
            parameter.quantize_(torch.ones_like(parameter))
        else:
            parameter.data.zero_()
    trainer.weights.load(trainer.model)
    assert_served_as_held(dict(trainer.export_weights()), moe_path, "fp8_block_pow2", range(LAYERS))
    for name, parameter in held.items():
        assert torch.equal(parameter.get_high_precision_init_val(), bf16[name])


def test_a_written_directory_is_dequantized(moe_path: Path, tmp_path: Path, layout: Layout) -> None:
    trainer = native_trainer(moe_path, layout, TrainerSection(**SETTINGS))
    hold_in_fp8(trainer.model, "fp8_block_pow2", range(LAYERS))
    trainer.export_hf(tmp_path / "out")
    stored, written = load_file(moe_path / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {name: t.dtype for name, t in written.items()} == {name: t.dtype for name, t in stored.items()}
    spec, table = QuantSpec.preset("fp8_block_pow2").weight, read_model(moe_path).tensors
    for name, tensor in stored.items():
        expected = quantize(tensor, spec).dequantize() if table[name].kind else tensor
        assert torch.equal(written[name], expected)


def test_a_trainer_starts_from_published_fp8_and_writes_bf16(
    moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    """Its engine's first weights, too, are those of the dequantized directory."""
    spec, published = QuantSpec.preset("fp8_block_pow2"), tmp_path / "published"
    convert_checkpoint(moe_path, published, spec)
    trainer = make_trainer(published, "fp8")
    plain = {
        name: quantize(tensor, spec.weight).dequantize(torch.bfloat16)
        if read_model(moe_path).tensors[name].kind
        else tensor
        for name, tensor in load_file(moe_path / "model.safetensors").items()
    }
    trainer.export_hf(tmp_path / "written")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == plain.keys() and all(torch.equal(written[name], plain[name]) for name in plain)
    assert "quantization_config" not in json.loads((tmp_path / "written" / "config.json").read_text())
    convert_checkpoint(published, tmp_path / "served", spec)
    held = load_file(published / "model.safetensors")
    assert all(
        torch.equal(held[name], tensor) for name, tensor in load_file(tmp_path / "served" / "model.safetensors").items()
    )

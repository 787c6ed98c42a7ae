"""Weights to and from Hugging Face tensors: as TransformerEngine holds them, with a class in its place, and as those of
a base in the engine's layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8rl.models import read_model
from fp8rl.numerics.quantize import QuantizedTensor, quantize
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import te_runtime
from fp8rl.trainer.modules.weights import matrices, named_weights
from fp8rl.trainer.weights.hf_weights import HFWeights
from fp8rl.weight_sync.served import convert_checkpoint
from tests.support.blockwise import BlockwiseWeight
from tests.support.models import LAYERS
from tests.support.ranks import run_on_ranks
from tests.support.trainers import POW2, MakeTrainer, Models, trainer_on

PRESETS = ("fp8_block_pow2", "fp8_block_fp32")
SETTINGS = {"lr": 1e-3, "warmup_steps": 0}
LAYOUTS = {"tp2ep2": {"tp": 2, "ep": 2}, "ep2": {"ep": 2, "dp": 2}}


def native_trainer(path: Path, layout: Layout, config: TrainerSection, held: range | None = None) -> Any:
    """A trainer of native mode. held: layers whose matrices are in FP8."""
    trainer = trainer_on(layout, config, path, numerics={"mode": "native", "k_splits": 1})
    if held is not None:
        hold_in_fp8(trainer.model, "fp8_block_pow2", held)
    return trainer


def hold_in_fp8(model: torch.nn.Module, preset: str, layers: range) -> None:
    """Put stand-ins in place of the matrices of these layers, as TransformerEngine's modules would have made them."""
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            inside = any(f"decoder.layers.{layer}." in prefix for layer in layers)
            if inside and parameter.dim() > 1 and "router" not in prefix:
                for each, matrix in matrices(name, module._parameters.pop(name)):
                    module._parameters[each] = weight = BlockwiseWeight(matrix.detach(), preset)
                    for tag in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                        setattr(weight, tag, getattr(parameter, tag))


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
        assert isinstance(found, QuantizedTensor) and found.spec == spec and found.data.dtype == expected.data.dtype
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8)), name
        assert torch.equal(found.scale_inv, expected.scale_inv), name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("kind", "layers"), [("moe", range(LAYERS)), ("moe", range(1, LAYERS)), ("dense", range(1))])
def test_codes_are_exported_as_they_are(preset: str, kind: str, layers: range, models: Models, layout: Layout) -> None:
    trainer = native_trainer(models[kind], layout, TrainerSection(**SETTINGS))
    hold_in_fp8(trainer.model, preset, layers)
    spec = QuantSpec.preset(preset).weight
    weights = HFWeights(models[kind], trainer.definition, spec, trainer.cache, layout)
    assert_served_as_held(dict(weights.share(trainer.model)), models[kind], preset, layers)


def export_of(path: Path, layout: Layout, config: TrainerSection) -> dict[str, Any]:
    trainer = native_trainer(path, layout, config, range(LAYERS))
    return dict(trainer.weights.share(trainer.model))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_and_scales_are_gathered_from_all_ranks(name: str, moe_path: Path, tmp_path: Path) -> None:
    ranks = run_on_ranks(TrainerSection(**SETTINGS, **LAYOUTS[name]), tmp_path, partial(export_of, moe_path))
    whole = {name: tensor for rank in ranks for name, tensor in rank.items()}
    assert_served_as_held(whole, moe_path, "fp8_block_pow2", range(LAYERS))


def test_loading_quantizes_and_leaves_the_masters_their_precision(moe_path: Path, layout: Layout) -> None:
    trainer = native_trainer(moe_path, layout, TrainerSection(**SETTINGS))
    bf16 = {name: weight.detach().clone() for name, weight in named_weights(trainer.model)}
    hold_in_fp8(trainer.model, "fp8_block_pow2", range(LAYERS))
    held = {name: p for name, p in trainer.model.named_parameters() if te_runtime.is_quantized(p)}
    assert len(held) == LAYERS * (2 + 2 * 8)
    for parameter in trainer.model.parameters():
        if te_runtime.is_quantized(parameter):
            parameter.quantize_(torch.ones_like(parameter))
        else:
            parameter.data.zero_()
    trainer.weights.load(trainer.model)
    assert_served_as_held(dict(trainer.weights.share(trainer.model)), moe_path, "fp8_block_pow2", range(LAYERS))
    for name, parameter in held.items():
        assert torch.equal(parameter.get_high_precision_init_val(), bf16[name])


def dequantized(path: Path) -> dict[str, torch.Tensor]:
    stored, table, spec = load_file(path / "model.safetensors"), read_model(path).tensors, POW2.weight
    return {name: quantize(x, spec).dequantize(torch.bfloat16) if table[name].kind else x for name, x in stored.items()}


def assert_written(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    written = load_file(folder / "model.safetensors")
    assert {name: x.dtype for name, x in written.items()} == {name: x.dtype for name, x in expected.items()}
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_written_directory_is_dequantized(moe_path: Path, tmp_path: Path, layout: Layout) -> None:
    native_trainer(moe_path, layout, TrainerSection(**SETTINGS), range(LAYERS)).export_hf(tmp_path / "out")
    assert_written(tmp_path / "out", dequantized(moe_path))


def test_a_trainer_reads_published_fp8(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    published = tmp_path / "published"
    convert_checkpoint(moe_path, published, POW2)
    make_trainer(published, "fp8").export_hf(tmp_path / "written")
    assert_written(tmp_path / "written", dequantized(moe_path))
    assert "quantization_config" not in json.loads((tmp_path / "written" / "config.json").read_text())
    convert_checkpoint(published, tmp_path / "served", POW2)
    held, served = (load_file(path / "model.safetensors") for path in (published, tmp_path / "served"))
    assert all(torch.equal(held[name], tensor) for name, tensor in served.items())

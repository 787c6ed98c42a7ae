"""Architectures beside Qwen3, from a tiny model each: transformers' logits, every tensor there and back, both modes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models import read_model, read_shape
from models.tiny import TinyModel, write_tiny_model
from tests.support.batches import random_batch
from tests.support.trainers import MakeTrainer

FAMILIES = {
    "qwen2": TinyModel(hidden=256, heads=4, kv_heads=2, intermediate=256, family="qwen2"),
    "qwen2-tied": TinyModel(hidden=256, heads=4, kv_heads=2, intermediate=256, family="qwen2", tied=True),
}
each_family = pytest.mark.parametrize("name", FAMILIES)


def write(path: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """With weights that matter, norms that are not one and biases that are not zero."""
    write_tiny_model(path, FAMILIES[name])
    draw = torch.Generator().manual_seed(0)
    tensors = load_file(path / "model.safetensors")
    for tensor_name, tensor in tensors.items():
        spread, middle = (0.08, 0.0) if tensor.dim() > 1 else (0.2, float("norm" in tensor_name))
        tensors[tensor_name] = (middle + spread * torch.randn(tensor.shape, generator=draw)).to(dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@each_family
def test_fp32_logits_equal_transformers(name: str, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    path = write(tmp_path / "model", name, torch.float32)
    trainer = make_trainer(path, dtype=torch.float32)
    tokens = torch.randint(0, 128, (3, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = trainer.model(tokens, position_ids=None, attention_mask=None)
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@each_family
def test_the_formula_and_every_tensor_are_those_of_the_checkpoint(
    name: str, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    path = write(tmp_path / "model", name)
    stored = load_file(path / "model.safetensors")
    exported = dict(make_trainer(path, "fp8").export_weights())
    assert exported.keys() == stored.keys() == read_model(path).tensors.rows.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in stored.items())
    assert read_shape(path).parameters == sum(tensor.numel() for tensor in stored.values())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@each_family
def test_native_mode_computes_the_same_but_for_rounding(
    name: str, precision: str, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    path, batch = write(tmp_path / "model", name), random_batch(2, 60)
    exact, native = (make_trainer(path, precision, mode=mode).score(batch)[1] for mode in ("exact", "native"))
    difference = (exact - native).abs()
    assert 0 < difference.max() and difference.mean() < 0.1, difference

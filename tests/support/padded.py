"""Small models whose widths end within a quantization block, and one whose widths do not."""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8rl.models import Model
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.megatron.model_checks import check_layout
from tests.support.tiny_model import TinyModel, write_tiny_model

SMOL = TinyModel(
    layers=2, hidden=192, heads=3, kv_heads=3, head_dim=64, intermediate=200, experts=0, family="llama", tied=True
)
"""In the proportions of SmolLM2-135M: heads that do not fill blocks together, and no width that does."""
NINE_HEADS = dataclasses.replace(SMOL, hidden=576, heads=9)
"""With SmolLM2-135M's heads: the twelve that it gets do not divide the width of 640 that it gets."""
QWEN2 = dataclasses.replace(SMOL, heads=6, family="qwen2", tied=False)
"""With biases, and two queries to a key."""
DENSE = TinyModel(hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=384, experts=0, family="llama", tied=True)
"""Whose widths are whole blocks."""
MIXTRAL = TinyModel(hidden=256, intermediate=200, family="mixtral")
"""Of which the experts alone are padded."""


def write(path: Path, shape: TinyModel, dtype: torch.dtype = torch.float32) -> Path:
    """With norms and biases as far from what they begin with as those of a trained model."""
    write_tiny_model(path, shape)
    draw = torch.Generator().manual_seed(1)
    tensors = {
        name: (each.float() + 0.3 * torch.randn(each.shape, generator=draw) * (each.dim() == 1)).to(dtype)
        for name, each in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def dense(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A Llama whose positions are not scaled."""
    return unscaled(write(path, DENSE, dtype))


def unscaled(path: Path) -> Path:
    """Have a model's positions not scaled."""
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (path / "config.json").write_text(json.dumps(config))
    return path


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in sorted(path.glob("*.safetensors")) for name, each in load_file(file).items()}


def logits(path: Path) -> torch.Tensor:
    tokens = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
    return found


def whole_blocks(model: Model) -> None:
    check_layout(model.shape, TrainerSection(), QuantSpec.preset("fp8_block_pow2"))

"""The models that are studied: M, the demo's, and random ones of any size."""

from __future__ import annotations

from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from models.tiny import TinyModel, write_tiny_model

MODEL = Path("examples/models/tiny_qwen3_moe")
"""M: 2 layers, hidden 128, 8 experts, 1.0M parameters, trained on chains of sums."""
N = TinyModel(layers=4, hidden=512, heads=4, kv_heads=2, intermediate=512, experts=8, top_k=2)
"""4 layers, hidden 512, 8 experts: 29M parameters, random."""


def random_model(folder: Path, shape: TinyModel = N, seed: int = 0) -> Path:
    """A Hugging Face directory in `folder` with random weights."""
    path = folder / f"random_{abs(hash((shape, seed)))}"
    if not path.exists():
        disable_progress_bar()  # studies say how far they are
        write_tiny_model(path, shape, seed)
    return path

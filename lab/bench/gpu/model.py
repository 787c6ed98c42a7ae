"""Models with random weights, each written once for all parts of a call."""

from __future__ import annotations

from pathlib import Path

import torch

from lab.bench.gpu.measure import Layers


def written(shape: Layers, device: torch.device, folder: Path) -> Path:
    """The Hugging Face directory of such a model in `folder`. Its weights are drawn on `device`."""
    from fp8rl.models.tiny import TinyModel, write_tiny_model

    model = TinyModel(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        intermediate=shape.moe_intermediate,
        experts=shape.experts,
        top_k=shape.top_k,
        vocab=max(shape.vocab, 128),
    )
    path = folder / f"{shape.layers}x{shape.hidden}x{shape.experts}x{shape.vocab}"
    if not path.exists():
        with device:
            write_tiny_model(path, model)
        torch.cuda.empty_cache()
    return path

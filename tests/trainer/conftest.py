"""A one-rank world and the models of the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from tests.support.models import write_family, write_model
from tests.support.tiny_model import TinyModel
from tests.support.trainers import MakeTrainer, Models, trainer_on


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder, size = tmp_path_factory.mktemp("models"), {"hidden": 256, "heads": 4, "intermediate": 256}
    latent = TinyModel(**size, experts=8, top_k=3, family="deepseek_v3", yarn=True)
    linear = TinyModel(**size, kv_heads=2, experts=4, family="qwen3_5_moe_text")  # in the first of its layers
    return {
        "moe": write_model(folder / "moe"),
        "dense": write_model(folder / "dense", moe=False, tied=True),
        "latent": write_family(folder / "latent", latent), "linear": write_family(folder / "linear", linear),
    }  # fmt: skip


@pytest.fixture(scope="session")
def moe_path(models: Models) -> Path:
    return models["moe"]


@pytest.fixture(scope="session")
def dense_path(models: Models) -> Path:
    return models["dense"]


@pytest.fixture(scope="session")
def make_trainer(layout: Layout) -> MakeTrainer:
    def make(
        path: Path, precision: str = "bf16", dtype: torch.dtype = torch.bfloat16, k_splits: int = 1,
        mode: str = "exact", adapter: Any = None, shared_base: bool = False, kv: dict[str, Any] | None = None,
        **config: Any,
    ) -> Any:  # fmt: skip
        settings = TrainerSection(**{"lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 256, **config})
        numerics = {"mode": mode, "k_splits": k_splits, **(kv or {})}
        options = {"dtype": dtype, "adapter": adapter, "shared_base": shared_base}
        return trainer_on(layout, settings, path, precision, numerics, **options)

    return make

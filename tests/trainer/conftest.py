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
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(scope="session")
def dense_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "dense", moe=False, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def latent_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyModel(hidden=256, heads=4, intermediate=256, experts=8, top_k=3, family="deepseek_v3", yarn=True)
    return write_family(tmp_path_factory.mktemp("models") / "latent", shape)


@pytest.fixture(scope="session")
def linear_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear attention in the first of its layers."""
    shape = TinyModel(hidden=256, heads=4, kv_heads=2, intermediate=256, experts=4, family="qwen3_5_moe_text")
    return write_family(tmp_path_factory.mktemp("models") / "linear", shape)


@pytest.fixture(scope="session")
def models(moe_path: Path, dense_path: Path, latent_path: Path, linear_path: Path) -> Models:
    return {"moe": moe_path, "dense": dense_path, "latent": latent_path, "linear": linear_path}


@pytest.fixture(scope="session")
def make_trainer(layout: Layout) -> MakeTrainer:
    def make(
        path: Path,
        precision: str = "bf16",
        dtype: torch.dtype = torch.bfloat16,
        k_splits: int = 1,
        mode: str = "exact",
        adapter: Any = None,
        shared_base: bool = False,
        kv: dict[str, Any] | None = None,
        **config: Any,
    ) -> Any:
        settings = TrainerSection(**{"lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 256, **config})
        numerics = {"mode": mode, "k_splits": k_splits, **(kv or {})}
        options = {"dtype": dtype, "adapter": adapter, "shared_base": shared_base}
        return trainer_on(layout, settings, path, precision, numerics, **options)

    return make

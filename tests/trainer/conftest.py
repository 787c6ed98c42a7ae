"""A one-rank world and the models of the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from tests.support.models import LENGTH, write_family, write_model
from tests.support.tiny_model import TinyModel
from tests.support.trainers import MakeTrainer


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
        from fp8rl.trainer.trainer import Trainer

        settings = {"lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 256, **config}
        spec = QuantSpec.preset("fp8_block_pow2")
        numerics = NumericsConfig(mode=mode, spec=spec, trainer=precision, k_splits=k_splits, **(kv or {}))
        return Trainer(
            path,
            TrainerSection(**settings),
            numerics,
            layout,
            seed=0,
            total_steps=100,
            max_sequence_length=LENGTH,
            dtype=dtype,
            adapter=adapter,
            shared_base=shared_base,
        )

    return make

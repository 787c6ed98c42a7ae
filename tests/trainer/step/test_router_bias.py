"""The biases of a GLM-4.5's experts: moved by load with each optimizer step, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.trainer.step.batch import UNKNOWN
from tests.support.batches import cross_entropy, random_batch
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.trainers import MakeTrainer

pytestmark = pytest.mark.slow

GLM = TinyModel(layers=3, hidden=256, heads=2, kv_heads=2, intermediate=256, experts=8, top_k=3, family="glm4_moe")
RATE = 2.0**-10
LAYERS = ("model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.2.mlp.gate.e_score_correction_bias")


@pytest.fixture(scope="module")
def glm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm") / "model"
    write_tiny_model(path, GLM)
    return path


def biases(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export_weights() if name in LAYERS}


@pytest.mark.parametrize("mode", ["exact", "native"])
def test_an_update_moves_every_bias_towards_the_mean_load(mode: str, glm_path: Path, make_trainer: MakeTrainer) -> None:
    batch = random_batch()
    trainer = make_trainer(glm_path, "fp8", mode=mode, router_bias_rate=RATE)
    for _ in range(2):
        before = biases(trainer)
        routes = torch.full((batch.rows, batch.width, 2, GLM.top_k), UNKNOWN, dtype=torch.int16)
        chosen = trainer.score_routed(replace(batch, routes=routes))[1].routes
        trainer.forward_backward(batch, cross_entropy(batch))
        assert all(torch.equal(bias, before[name]) for name, bias in biases(trainer).items())  # a gate may withhold it
        trainer.update()
        after = biases(trainer)
        for layer, name in enumerate(LAYERS):
            load = chosen[:, :, layer][chosen[:, :, layer] != UNKNOWN].long().bincount(minlength=GLM.experts).double()
            assert load.sum() == batch.lengths.sum() * GLM.top_k
            assert torch.equal(after[name] - before[name], RATE * torch.sign(load.mean() - load).float())


def test_biases_stay_without_a_rate(glm_path: Path, make_trainer: MakeTrainer) -> None:
    batch, trainer = random_batch(), make_trainer(glm_path, "fp8")
    trainer.train_step(batch, cross_entropy(batch))
    assert not torch.cat(list(biases(trainer).values())).any()

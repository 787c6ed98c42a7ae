"""The biases of a GLM-4.5's experts: moved by load with each optimizer step, and with nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import UNKNOWN
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import LENGTH
from tests.support.ranks import run_on_ranks
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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", pytest.param("native", marks=pytest.mark.slow)])
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


@pytest.mark.slow
def test_a_resumed_run_has_every_bit(glm_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer, resumed = (make_trainer(glm_path, "fp8", router_bias_rate=RATE) for _ in range(2))
    first, second = random_batch(), random_batch(seed=1)
    trainer.train_step(first, cross_entropy(first))
    trainer.save(tmp_path / "checkpoint", {})
    resumed.load(tmp_path / "checkpoint")
    for each in (trainer, resumed):
        each.train_step(second, cross_entropy(second))
    exported = dict(resumed.export_weights())
    assert all(torch.equal(tensor, exported[name]) for name, tensor in trainer.export_weights())


@dataclass(frozen=True)
class Moved:
    """The biases that the ranks of a layout hold after a step."""

    path: Path

    def __call__(self, layout: Layout, config: TrainerSection) -> dict[str, Tensor]:
        from fp8rl.trainer.trainer import Trainer

        numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"), k_splits=2)
        sizes = {"seed": 0, "total_steps": 100, "max_sequence_length": LENGTH}
        return self.of(Trainer(self.path, config, numerics, layout, **sizes))

    def of(self, trainer: Any) -> dict[str, Tensor]:
        batch = random_batch()
        trainer.train_step(batch, cross_entropy(batch))
        held = dict(trainer.model.named_buffers())
        return {name: value.clone() for name, value in held.items() if name.endswith("expert_bias")}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [{"tp": 2, "ep": 2}, {"dp": 2, "packing": True}, {"cp": 2}], ids=str)
def test_every_layout_moves_the_same_biases(
    parts: dict[str, Any], glm_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    settings = {"router_bias_rate": RATE, "micro_batch_tokens": 128}
    alone = Moved(glm_path).of(make_trainer(glm_path, "fp8", k_splits=2, **settings))
    assert len(alone) == 2 and all(bias.any() for bias in alone.values())
    for rank in run_on_ranks(TrainerSection(**settings, **parts), tmp_path, Moved(glm_path)):
        assert rank.keys() == alone.keys() and all(torch.equal(bias, alone[name]) for name, bias in rank.items())

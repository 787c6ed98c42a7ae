"""Adapters on several ranks: the log-probabilities of one, gradients that are whole, checkpoints that move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from tests.support.batches import cross_entropy, random_batch
from tests.support.ranks import run_on_ranks
from tests.support.trainers import MakeTrainer, Models, trainer_on

pytestmark = pytest.mark.slow

SETTINGS = {"lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 512}
CONFIGS = {
    "merged": AdapterSection(rank=8, mode="merged", targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj")),
    "separate": AdapterSection(rank=8),
    "shared": AdapterSection(rank=8, experts="shared"),
    "latent": AdapterSection(rank=8),
    "linear": AdapterSection(rank=8),
}
"""What is trained, by what is special about it; `latent`, `linear`: a model with latent or linear attention."""

RANKS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "tp2-ep2": ({"tp": 2, "ep": 2}, ("merged", "separate", "latent", "linear")),
    "ep2": ({"ep": 2, "dp": 2}, ("separate", "shared")),
    "pp2": ({"pp": 2}, ("merged", "separate")),
}
"""Layouts, and what is trained on them: all models on the first, on the others what they treat in ways of their own."""


@dataclass(frozen=True)
class Case:
    """What each rank of a layout does with the checkpoints of one rank."""

    paths: dict[str, Path]
    folder: Path
    again: Path
    names: tuple[str, ...]

    def __call__(self, layout: Layout, config: TrainerSection) -> dict[str, Any]:
        out = {}
        for name in self.names:
            trainer = trainer_on(layout, config, self.paths[name], numerics={"k_splits": 2}, adapter=CONFIGS[name])
            begun = adapters(trainer)
            trainer.load(self.folder / name)
            scored = scores(trainer)
            trainer.save(self.again / name, {})
            norm = learn(trainer, 9)
            out[name] = scored if layout.is_reporting_rank else {}, norm, begun, adapters(trainer)
        return out


def learn(trainer: Any, seed: int) -> float:
    batch = random_batch(seed=seed)
    norm: float = trainer.train_step(batch, cross_entropy(batch)).result.grad_norm
    return norm


def scores(trainer: Any) -> dict[int, Tensor]:
    """The log-probabilities of this rank's rows, by their numbers."""
    rows, logprobs = trainer.score(random_batch(seed=9))
    return dict(zip(rows, logprobs, strict=True))


def adapters(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights.adapters(trainer.model)}


@pytest.mark.parametrize(("ranks", "names"), RANKS.values(), ids=RANKS)
def test_adapters_on_two_ranks_compute_and_learn_as_on_one(
    ranks: dict[str, int], names: tuple[str, ...], models: Models, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    """One rank's checkpoint is of its first step. Its adapters before that and after the second are compared."""
    paths = {name: models.get(name, models["moe"]) for name in names}
    alone = {}
    for name in names:
        one = make_trainer(paths[name], "fp8", k_splits=2, adapter=CONFIGS[name], **SETTINGS)
        begun = adapters(one)
        learn(one, 0)
        one.save(tmp_path / "one" / name, {})
        alone[name] = one, scores(one), learn(one, 9), begun, adapters(one)
    case = Case(paths, tmp_path / "one", tmp_path / "again", names)
    found = run_on_ranks(TrainerSection(**SETTINGS, **ranks), tmp_path / "ranks", case)
    for name in names:
        (one, logprobs, norm, begun, learned), of_ranks = alone[name], [each[name] for each in found]
        assert_same({row: each for of_rank in of_ranks for row, each in of_rank[0].items()}, logprobs)
        assert all(each[1] == pytest.approx(norm, rel=1e-2) for each in of_ranks), name
        for place, whole in ((2, begun), (3, learned)):
            held = {key: tensor for each in of_ranks for key, tensor in each[place].items()}
            assert held.keys() == whole.keys()
            moved = torch.cat([(held[key] - whole[key]).float().abs().flatten() for key in whole])
            # A first step of Adam goes by a gradient's sign: rounding turns it where the gradient is almost none.
            assert (moved < 1e-4).float().mean() > (0.95 if place == 3 else 0.999), (name, place)
        one.load(tmp_path / "again" / name)
        assert_same(scores(one), logprobs)


def assert_same(found: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[row], expected[row]) for row in expected)

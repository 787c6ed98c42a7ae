"""Adapters on several ranks: the log-probabilities of one, gradients that are whole, checkpoints that move."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fp8rl.models.adapters import AdapterSection
from fp8rl.trainer.config import TrainerSection
from tests.support.batches import cross_entropy, random_batch
from tests.support.ranks import run_on_ranks
from tests.support.trainers import Models, save_checkpoint, scored, trainer_on, whole

pytestmark = pytest.mark.slow

SETTINGS = {"lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 512}
CONFIGS = {
    "merged": AdapterSection(rank=8, mode="merged", targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj")),
    "separate": AdapterSection(rank=8), "shared": AdapterSection(rank=8, experts="shared"),
    "latent": AdapterSection(rank=8), "linear": AdapterSection(rank=8),
    "latent, merged": AdapterSection(rank=8, mode="merged", targets=("q_a_proj", "q_b_proj", "up_proj", "down_proj")),
}  # fmt: skip
"""What is trained, by the model or what is special about it. The last adapts half of a dense MLP's first product."""

RANKS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "tp2-ep2": ({"tp": 2, "ep": 2}, ("merged", "separate", "latent", "linear", "latent, merged")),
    "ep2": ({"ep": 2, "dp": 2}, ("separate", "shared")), "pp2": ({"pp": 2}, ("merged", "separate")),
}  # fmt: skip
"""Layouts, and what is trained on them: all models on the first, on the others what they treat in ways of their own."""


def on_a_rank(paths: Models, folder, layout, config: TrainerSection) -> dict[str, Any]:
    """What each rank of a layout does with the checkpoints of one rank."""
    out = {}
    for name, path in paths.items():
        trainer = trainer_on(layout, config, path, numerics={"k_splits": 4}, adapter=CONFIGS[name])
        begun = adapters(trainer)
        trainer.load(folder / "one" / name)
        scores = trainer.score(random_batch(seed=9))
        save_checkpoint(trainer, folder / "again" / name, {})
        survival, norm = trainer.update_survival(), learn(trainer, 9)
        out[name] = scores if layout.is_reporting_rank else None, norm, begun, adapters(trainer), survival
    return out


def learn(trainer: Any, seed: int) -> float:
    batch = random_batch(seed=seed)
    norm: float = trainer.train_step(batch, cross_entropy(batch)).result.grad_norm
    return norm


def adapters(trainer: Any):
    return {name: tensor.clone() for name, tensor in trainer.weights.adapters(trainer.model)}


@pytest.mark.parametrize(("ranks", "names"), RANKS.values(), ids=RANKS)
def test_adapters_on_two_ranks_compute_and_learn_as_on_one(ranks, names, models, tmp_path, make_trainer) -> None:
    """One rank's checkpoint is of its first step. Its adapters before that and after the second are compared."""
    paths = {name: models.get(name.partition(",")[0], models["moe"]) for name in names}
    alone = {}
    for name in names:
        one = make_trainer(paths[name], "fp8", k_splits=4, adapter=CONFIGS[name], **SETTINGS)
        begun = adapters(one)
        learn(one, 0)
        save_checkpoint(one, tmp_path / "one" / name, {})
        alone[name] = one, scored(one, random_batch(seed=9)), learn(one, 9), begun, adapters(one)
    config = TrainerSection(**SETTINGS, **ranks)
    found = run_on_ranks(config, tmp_path / "ranks", partial(on_a_rank, paths, tmp_path))
    for name in names:
        (one, logprobs, norm, begun, learned), of_ranks = alone[name], [each[name] for each in found]
        assert torch.equal(whole([each[0] for each in of_ranks]), logprobs)
        assert all(each[1] == pytest.approx(norm, rel=1e-2) for each in of_ranks), name
        for place, wanted in ((2, begun), (3, learned)):
            held = {key: tensor for each in of_ranks for key, tensor in each[place].items()}
            assert held.keys() == wanted.keys()
            moved = torch.cat([(held[key] - wanted[key]).float().abs().flatten() for key in wanted])
            # A first step of Adam goes by a gradient's sign: rounding turns it where the gradient is almost none.
            assert (moved < 1e-4).float().mean() > (0.95 if place == 3 else 0.999), (name, place)
        one.load(tmp_path / "again" / name)
        assert torch.equal(scored(one, random_batch(seed=9)), logprobs)
        assert all(each[4] == pytest.approx(one.update_survival()) for each in of_ranks), name

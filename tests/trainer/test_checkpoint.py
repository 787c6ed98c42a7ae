"""Checkpoints on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from numerics.errors import UserError
from tests.support.batches import cross_entropy, random_batch
from tests.support.trainers import MakeTrainer

pytestmark = pytest.mark.slow


def _train(trainer: Any, first: int, last: int) -> list[tuple[float, float, float]]:
    out = []
    for step in range(first, last):
        batch = random_batch(seed=step)
        result = trainer.train_step(batch, cross_entropy(batch)).result
        out.append((result.loss, result.grad_norm, trainer.optimizer.lr))
    return out


@pytest.mark.parametrize(("precision", "steps_before_loading"), [("bf16", 0), ("fp8", 2)])
def test_three_and_three_steps_equal_six(
    precision: str, steps_before_loading: int, moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    settings = {"decay": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    straight = make_trainer(moe_path, precision, **settings)
    expected = _train(straight, 0, 6)
    first = make_trainer(moe_path, precision, **settings)
    assert _train(first, 0, 3) == expected[:3]
    first.save(tmp_path / "step_3", {"seed": 7, "cursor": [1, 2]})
    resumed = make_trainer(moe_path, precision, **settings)
    _train(resumed, 10, 10 + steps_before_loading)  # a different past must leave no trace
    assert resumed.load(tmp_path / "step_3") == {"seed": 7, "cursor": [1, 2]}
    assert resumed.weight_version == 3
    assert _train(resumed, 3, 6) == expected[3:]
    ours, theirs = (dict(t.model.named_parameters()) for t in (resumed, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_loaded_checkpoint_retires_quantized_weights(
    moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(moe_path, "fp8", lr=0.05)
    batch = random_batch()
    _train(trainer, 0, 1)
    saved_scores = trainer.score(batch)[1]
    trainer.save(tmp_path / "a", {})
    _train(trainer, 1, 2)
    assert not torch.equal(trainer.score(batch)[1], saved_scores)
    trainer.load(tmp_path / "a")
    assert torch.equal(trainer.score(batch)[1], saved_scores)


def test_a_checkpoint_is_replaced_whole(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path)
    trainer.save(tmp_path / "last", {"n": 1})
    trainer.save(tmp_path / "last", {"n": 2})
    assert trainer.load(tmp_path / "last") == {"n": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["last"]


def test_an_interrupted_save_leaves_the_old_checkpoint(
    moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer import checkpoint

    trainer = make_trainer(moe_path)
    trainer.save(tmp_path / "last", {"n": 1})

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path / "last", {"n": 2})
    assert trainer.load(tmp_path / "last") == {"n": 1}


def test_what_is_not_a_checkpoint_is_refused(moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path)
    with pytest.raises(UserError, match="checkpoint"):
        trainer.load(tmp_path)
    (tmp_path / "about.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="format"):
        trainer.load(tmp_path)


def test_weights_are_made_from_the_masters(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8")
    trainer.train_step(random_batch(), cross_entropy(random_batch()))
    trained = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    trainer.optimizer.write_weights()
    assert all(torch.equal(parameter, trained[name]) for name, parameter in trainer.model.named_parameters())

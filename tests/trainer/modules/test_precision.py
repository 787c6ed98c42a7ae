"""The precision of a live trainer, changed and changed back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8rl.numerics.core.errors import UserError
from tests.support.batches import cross_entropy, random_batch
from tests.support.models import EXPERTS
from tests.support.trainers import MakeTrainer

pytestmark = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize("moe", [True, False])
def test_a_live_trainer_changes_its_precision_and_changes_it_back(
    mode: str, moe: bool, moe_path: Path, dense_path: Path, make_trainer: MakeTrainer
) -> None:
    path, batch = moe_path if moe else dense_path, random_batch()
    trainer = make_trainer(path, "fp8", mode=mode)
    fp8 = trainer.numerics
    first = trainer.score(batch)[1]
    trainer.set_numerics(replace(fp8, trainer="bf16"))
    in_bf16 = trainer.score(batch)[1]
    assert (in_bf16 - first).abs().mean() > 1e-3
    assert torch.equal(in_bf16, make_trainer(path, "bf16", mode=mode).score(batch)[1])
    trainer.set_numerics(fp8)
    assert torch.equal(trainer.score(batch)[1], first)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize(("first", "last", "in_fp8"), [(1, 0, {"1"}), (0, 1, {"0"}), (0, 0, {"0", "1"})])
def test_layers_at_the_ends_may_stay_in_bf16(
    mode: str, first: int, last: int, in_fp8: set[str], moe_path: Path, make_trainer: MakeTrainer
) -> None:
    """A live trainer: the quantized weights that its forward asks for."""
    trainer = make_trainer(moe_path, "fp8", mode=mode)
    spec = trainer.numerics.spec.override({"first_layers_bf16": first, "last_layers_bf16": last})
    trainer.set_numerics(replace(trainer.numerics, spec=spec))
    trainer.train_step(random_batch(), cross_entropy(random_batch()))
    trainer.score(random_batch())
    used = [name.split(".") for name in trainer.quantized_parameters()]
    assert {parts[parts.index("layers") + 1] for parts in used} == in_fp8
    assert len(used) == (2 + 2 * EXPERTS) * len(in_fp8)  # qkv, o_proj, and gate_up and down of each expert


@pytest.mark.slow
def test_gradients_follow_the_change(moe_path: Path, make_trainer: MakeTrainer) -> None:
    batch = random_batch()
    changed, started = make_trainer(moe_path, "fp8"), make_trainer(moe_path, "bf16")
    changed.set_numerics(started.numerics)
    steps = [t.train_step(batch, cross_entropy(batch)).result for t in (changed, started)]
    assert steps[0].grad_norm == steps[1].grad_norm
    assert torch.equal(changed.score(batch)[1], started.score(batch)[1])


def test_weights_are_quantized_anew_after_a_change(moe_path: Path, make_trainer: MakeTrainer) -> None:
    """What changes while the trainer runs in BF16 is in the FP8 weights afterwards; nothing else changes here."""
    batch = random_batch()
    trainer = make_trainer(moe_path, "fp8")
    fp8, before = trainer.numerics, trainer.score(batch)[1]
    trainer.set_numerics(replace(fp8, trainer="bf16"))
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if ".experts." in name:
                parameter.mul_(1.5)
    trainer.set_numerics(fp8)
    assert not torch.equal(trainer.score(batch)[1], before)


def test_another_mode_or_layout_is_refused_and_changes_nothing(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8")
    numerics = trainer.numerics
    with pytest.raises(UserError, match=r"numerics\.mode: found 'native', expected exact, which"):
        trainer.set_numerics(replace(numerics, mode="native"))
    shared = numerics.spec.override({"weight": {"granularity": "tensor"}})
    with pytest.raises(UserError, match=r"numerics\.weight\.granularity"):
        trainer.set_numerics(replace(numerics, spec=shared, rollout="bf16"))
    assert trainer.numerics is numerics

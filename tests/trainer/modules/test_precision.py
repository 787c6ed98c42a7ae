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


@pytest.mark.parametrize("mode", ["exact", "native"])
@pytest.mark.parametrize("moe", [True, False])
def test_a_live_trainer_changes_its_precision_and_changes_it_back(
    mode: str, moe: bool, moe_path: Path, dense_path: Path, make_trainer: MakeTrainer
) -> None:
    path, batch = moe_path if moe else dense_path, random_batch()
    trainer, in_bf16 = (make_trainer(path, precision, mode=mode) for precision in ("fp8", "bf16"))
    fp8, first = trainer.numerics, trainer.score(batch)[1]
    trainer.set_numerics(replace(fp8, trainer="bf16"))
    assert torch.equal(trainer.score(batch)[1], in_bf16.score(batch)[1])
    assert (trainer.score(batch)[1] - first).abs().mean() > 1e-3
    trainer.set_numerics(fp8)
    assert torch.equal(trainer.score(batch)[1], first)
    trainer.set_numerics(replace(fp8, trainer="bf16"))
    steps = [each.train_step(batch, cross_entropy(batch)).result for each in (trainer, in_bf16)]
    assert steps[0].grad_norm == steps[1].grad_norm
    assert torch.equal(trainer.score(batch)[1], in_bf16.score(batch)[1])
    trainer.set_numerics(fp8)
    in_bf16.set_numerics(fp8)
    learned = trainer.score(batch)[1]
    assert torch.equal(learned, in_bf16.score(batch)[1]) and not torch.equal(learned, first)


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


def test_another_mode_or_layout_is_refused_and_changes_nothing(moe_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(moe_path, "fp8")
    numerics = trainer.numerics
    with pytest.raises(UserError, match=r"numerics\.mode: found 'native', expected exact, which"):
        trainer.set_numerics(replace(numerics, mode="native"))
    shared = numerics.spec.override({"weight": {"granularity": "tensor"}})
    with pytest.raises(UserError, match=r"numerics\.weight\.granularity"):
        trainer.set_numerics(replace(numerics, spec=shared, rollout="bf16"))
    assert trainer.numerics is numerics

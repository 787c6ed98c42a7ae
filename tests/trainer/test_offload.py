"""An optimizer's state that goes to the host and comes back, between two steps of a real trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from fp8rl.trainer.inventory import buffers, optimizer_state
from fp8rl.trainer.roles import offload
from fp8rl.trainer.trainer import Trainer
from tests.support.batches import cross_entropy, random_batch
from tests.support.holdings import bytes_held
from tests.support.trainers import MakeTrainer


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = {f"{kind} of {name}": tensor for name, kind, tensor in optimizer_state(trainer)}
    return state | {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def files(folder: Path) -> dict[str, str]:
    """Digests of the tensors that a checkpoint has."""
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.rglob("*.distcp")}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_goes_on_bit_for_bit(
    dtype: torch.dtype, moe_path: Path, tmp_path: Path, make_trainer: MakeTrainer
) -> None:
    """An FP32 weight is its own master, and stays where the forward reads it."""
    moving, staying = (make_trainer(moe_path, dtype=dtype) for _ in range(2))
    batch = random_batch(rows=2, longest=9)
    for trainer in (moving, staying):
        trainer.train_step(batch, cross_entropy(batch))
    held = bytes_held(moving)
    moved = offload(moving)
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers(moving))
    assert moved == held["masters"] + held["moments"] + gradients and gradients >= held["gradients"]
    assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in buffers(moving))
    assert offload(moving) == moved, "once is enough"

    assert moving.score(batch)[1].equal(staying.score(batch)[1])
    for trainer, name in ((moving, "moving"), (staying, "staying")):
        trainer.save(tmp_path / name, {})
    assert files(tmp_path / "moving") == files(tmp_path / "staying") and files(tmp_path / "moving")
    with pytest.raises(RuntimeError, match="masters and moments in the host's memory"):
        moving.train_step(batch, cross_entropy(batch))
    with pytest.raises(RuntimeError, match="masters and moments in the host's memory"):
        moving.load(tmp_path / "moving")

    moving.optimizer.aside.come_back()
    done = [trainer.train_step(batch, cross_entropy(batch)).result for trainer in (moving, staying)]
    assert done[0].loss == done[1].loss and done[0].grad_norm == done[1].grad_norm
    after = state_of(staying)
    assert all(tensor.equal(after[name]) for name, tensor in state_of(moving).items())

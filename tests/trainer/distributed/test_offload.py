"""An optimizer's state that goes to the host and comes back, between two steps of a real trainer."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fp8rl.trainer.distributed.offload import HostCopy
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
@pytest.mark.parametrize(
    ("model", "dtype"), [("moe_path", torch.bfloat16), ("moe_path", torch.float32), ("linear_path", torch.bfloat16)]
)
def test_training_goes_on_bit_for_bit(
    model: str, dtype: torch.dtype, tmp_path: Path, make_trainer: MakeTrainer, request: pytest.FixtureRequest
) -> None:
    """An FP32 weight is its own master, and stays where the forward reads it; linear attention has some beside BF16."""
    path = request.getfixturevalue(model)
    moving, staying = (make_trainer(path, dtype=dtype) for _ in range(2))
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

    moving.optimizer.host_copy.onload()
    done = [trainer.train_step(batch, cross_entropy(batch)).result for trainer in (moving, staying)]
    assert done[0].loss == done[1].loss and done[0].grad_norm == done[1].grad_norm
    after = state_of(staying)
    assert all(tensor.equal(after[name]) for name, tensor in state_of(moving).items())


class Link:
    """CUDA's part in a move: streams, and memory that is registered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: list[int] = []
        self.waited = 0
        for name, value in {
            "is_available": lambda: True,
            "empty_cache": lambda: None,
            "current_stream": lambda: None,
            "cudart": lambda: self,
            "check_error": lambda code: None,
            "Stream": lambda: self,
            "stream": lambda stream: nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def wait_stream(self, other: None) -> None:
        pass

    def synchronize(self) -> None:
        self.waited += 1


@pytest.mark.parametrize("gpu", [False, True])
def test_the_hosts_memory_is_made_once_and_pinned_on_a_gpu(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch) if gpu else None
    whole, other, gradient = torch.arange(600.0), torch.arange(7).bfloat16(), torch.ones(5)
    first, second = whole[:300], whole[300:].view(2, 150)
    expected = [tensor.clone() for tensor in (first, second, other)]
    host_copy, places = HostCopy(), set()
    for _ in range(3):
        assert host_copy.offload([first, second, other], [gradient]) == 600 * 4 + 7 * 2 + 5 * 4
        assert not whole.untyped_storage().nbytes() and not gradient.untyped_storage().nbytes()
        held = [host_copy.held(tensor) for tensor in (first, second, other)]
        assert all(map(torch.equal, held, expected))
        places.add(tuple(tensor.data_ptr() for tensor in held))
        host_copy.onload()
        assert all(map(torch.equal, (first, second, other), expected)) and not gradient.any()
        gradient.fill_(1.0)
    assert len(places) == 1
    if link is not None:
        assert len(link.registered) == 1 and link.waited == 6, "both ways are waited for"
    more = torch.arange(5000.0)
    host_copy.offload([first, more], [])
    host_copy.onload()
    assert torch.equal(more, torch.arange(5000.0)) and torch.equal(first, expected[0])
    assert link is None or len(link.registered) == 1, "that of before is not pinned any more"

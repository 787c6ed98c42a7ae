"""An optimizer's state on the host: between two steps of a trainer, and beside a GPU by Megatron's own optimizer."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor, nn

from fp8rl.trainer.distributed import optimizer as optimizer_module
from fp8rl.trainer.distributed.offload import HostCopy
from fp8rl.trainer.distributed.optimizer import _create_moments, step_threads
from fp8rl.trainer.inventory import optimizer_state
from tests.support.batches import cross_entropy, random_batch
from tests.support.holdings import bytes_held
from tests.support.trainers import save_checkpoint


def state_of(trainer) -> dict[str, torch.Tensor]:
    state = {f"{kind} of {name}": tensor for name, kind, tensor in optimizer_state(trainer.optimizer)}
    return state | {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype"), [("moe", torch.bfloat16), ("moe", torch.float32), ("linear", torch.bfloat16)]
)
def test_training_goes_on(model: str, dtype: Any, tmp_path, make_trainer, models) -> None:
    """An FP32 weight is its own master, and stays where the forward reads it; linear attention has some beside BF16."""
    moving, staying = (make_trainer(models[model], dtype=dtype) for _ in range(2))
    batch = random_batch(rows=2, longest=9)
    for trainer in (moving, staying):
        trainer.train_step(batch, cross_entropy(batch))
    held = bytes_held(moving)
    moved = moving.offload().moved
    gradients = sum(buffer.grad_data.nbytes for buffer in moving.optimizer.buffers)
    assert moved == held["masters"] + held["moments"] + gradients and gradients >= held["gradients"]
    assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in moving.optimizer.buffers)
    assert moving.offload().moved == moved, "once is enough"
    assert moving.score(batch)[1].equal(staying.score(batch)[1])
    for trainer, name in ((moving, "moving"), (staying, "staying")):
        save_checkpoint(trainer, tmp_path / name, {})
    (ours,), (theirs,) = ([*(tmp_path / name).rglob("*.distcp")] for name in ("moving", "staying"))
    assert ours.read_bytes() == theirs.read_bytes()
    for refused in (lambda: moving.train_step(batch, cross_entropy(batch)), lambda: moving.load(tmp_path / "moving")):
        with pytest.raises(RuntimeError, match="masters and moments in the host's memory"):
            refused()
    moving.onload()
    done = [trainer.train_step(batch, cross_entropy(batch)).result for trainer in (moving, staying)]
    assert done[0].loss == done[1].loss and done[0].grad_norm == done[1].grad_norm
    after = state_of(staying)
    assert all(tensor.equal(after[name]) for name, tensor in state_of(moving).items())


class Link:
    """CUDA's part in a move: streams, and memory that is registered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: list[int] = []
        self.waited = 0
        nothing = dict.fromkeys(("empty_cache", "current_stream", "check_error"), lambda *_: None)
        own = {"cudart": lambda: self, "Stream": lambda: self, "stream": nullcontext, "is_available": lambda: True}
        for name, value in (nothing | own).items():
            monkeypatch.setattr(torch.cuda, name, value)

    def cudaHostRegister(self, address: int, *_: int) -> None:
        self.registered.append(address)

    def cudaHostUnregister(self, address: int) -> None:
        self.registered.remove(address)

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


ADAM = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}


class OnDevice(nn.Parameter):
    """A parameter that says that it is on a GPU, and goes to the host as one."""

    is_cuda = True  # type: ignore[assignment]

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.detach().as_subclass(Tensor).clone()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events of a device that does everything at once."""
    event = SimpleNamespace(synchronize=lambda: None, wait=lambda stream: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)


def parameters() -> list[OnDevice]:
    generator = torch.Generator().manual_seed(0)
    return [OnDevice(torch.randn(*shape, generator=generator).bfloat16()) for shape in ((17, 8), (33,))]


def hybrid(of: list[OnDevice]) -> HybridDeviceOptimizer:
    groups = [{"params": [of[0]]}, {"params": [of[1]], "weight_decay": 0.0}]
    optimizer = HybridDeviceOptimizer(
        groups, offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW, gpu_optimizer_cls=torch.optim.AdamW,
        overlap_cpu_optimizer_d2h_h2d=False, pin_cpu_grads=False, pin_cpu_params=False, param_update_in_fp32=True,
        **ADAM,
    )  # fmt: skip
    _create_moments(SimpleNamespace(optimizer=optimizer))  # type: ignore[arg-type]
    return optimizer


def step(optimizer: HybridDeviceOptimizer, of: list[OnDevice], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(parameter.shape, generator=generator) for parameter in of]
    for parameter, gradient in zip(of, gradients, strict=True):
        parameter.decoupled_grad = gradient  # type: ignore[attr-defined]
    optimizer.step()
    return gradients


def bits(of: list[OnDevice]) -> list[Tensor]:
    return [parameter.detach().as_subclass(Tensor).clone() for parameter in of]


def test_its_steps_are_those_of_adam_on_fp32_masters_and_a_resumed_one_goes_on(streams: None) -> None:
    of = parameters()
    masters = [nn.Parameter(tensor.float()) for tensor in bits(of)]
    optimizer = hybrid(of)
    adam = torch.optim.AdamW([{"params": [masters[0]]}, {"params": [masters[1]], "weight_decay": 0.0}], **ADAM)
    for seed in range(3):
        saved, weights = copy.deepcopy(optimizer.state_dict()), bits(of)
        gradients = step(optimizer, of, seed)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        adam.step()
        for found, master in zip(bits(of), masters, strict=True):
            assert torch.equal(found, master.detach().bfloat16())
    for parameter, master in zip(of, masters, strict=True):
        state = optimizer.state[parameter]
        assert torch.equal(state["master_param"], master.detach()) and int(state["step"]) == 3
        assert torch.equal(state["exp_avg"], adam.state[master]["exp_avg"])
    again = parameters()  # resumed before the last step
    for parameter, tensor in zip(again, weights, strict=True):
        parameter.data.copy_(tensor)
    second = hybrid(again)
    second.load_state_dict(saved)
    step(second, again, 2)
    assert all(map(torch.equal, bits(again), bits(of)))
    for ours, theirs in zip(again, of, strict=True):
        assert all(torch.equal(second.state[ours][name], value) for name, value in optimizer.state[theirs].items())


@pytest.mark.parametrize(
    ("gpu", "offload", "here", "threads"),
    [(True, True, 1, 16), (True, True, 3, 5), (True, True, 40, 1), (True, False, 1, 1), (False, True, 1, 1)],
)
def test_beside_a_gpu_a_rank_steps_on_its_share_of_the_node_s_cores(monkeypatch, gpu, offload, here, threads) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(optimizer_module.os, "sched_getaffinity", lambda process: range(16))
    monkeypatch.setattr(optimizer_module, "all_gathered", lambda node: [node] * here + ["another"])
    assert step_threads(offload) == threads

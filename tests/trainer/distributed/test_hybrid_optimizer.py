"""Megatron's optimizer on the host, as `trainer.optimizer.offload` has it beside a GPU: steps, state and resume."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor, nn

from fp8rl.trainer.distributed import optimizer as optimizer_module
from fp8rl.trainer.distributed.optimizer import _create_moments, step_threads

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
        groups,
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        overlap_cpu_optimizer_d2h_h2d=False,
        pin_cpu_grads=False,
        pin_cpu_params=False,
        param_update_in_fp32=True,
        **ADAM,
    )
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


def test_its_steps_are_those_of_adam_on_fp32_masters(streams: None) -> None:
    of = parameters()
    masters = [nn.Parameter(tensor.float()) for tensor in bits(of)]
    optimizer = hybrid(of)
    adam = torch.optim.AdamW([{"params": [masters[0]]}, {"params": [masters[1]], "weight_decay": 0.0}], **ADAM)
    for seed in range(3):
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


def test_a_resumed_one_goes_on_bit_for_bit(streams: None) -> None:
    of = parameters()
    first = hybrid(of)
    step(first, of, 0)
    saved, weights = copy.deepcopy(first.state_dict()), bits(of)
    step(first, of, 1)

    again = parameters()
    for parameter, tensor in zip(again, weights, strict=True):
        parameter.data.copy_(tensor)
    second = hybrid(again)
    second.load_state_dict(saved)
    step(second, again, 1)
    assert all(map(torch.equal, bits(again), bits(of)))
    for ours, theirs in zip(again, of, strict=True):
        for name, value in first.state[theirs].items():
            assert torch.equal(second.state[ours][name], value), name


@pytest.mark.parametrize(
    ("gpu", "offload", "here", "threads"),
    [(True, True, 1, 16), (True, True, 3, 5), (True, True, 40, 1), (True, False, 1, 1), (False, True, 1, 1)],
)
def test_beside_a_gpu_a_rank_steps_on_its_share_of_the_node_s_cores(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, offload: bool, here: int, threads: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(optimizer_module.os, "sched_getaffinity", lambda process: range(16))
    monkeypatch.setattr(optimizer_module, "all_gathered", lambda node: [node] * here + ["another"])
    assert step_threads(offload) == threads

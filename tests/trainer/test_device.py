"""Which device a rank takes, and what depends on it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.megatron import patches


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four GPUs, as torch.cuda would show them; the list receives what was made the current one."""
    patches.install()  # once in a process, so for the machine that is really here
    chosen: list[int] = []
    shown = {"is_available": lambda: True, "device_count": lambda: 4, "set_device": chosen.append}
    for name, value in (shown | {"current_device": lambda: chosen[-1] if chosen else 0}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    return chosen


def test_ranks_of_a_node_take_a_gpu_each_or_without_one_cpu(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, index in ((0, 0), (3, 3), (4, 0), (6, 2)):
        assert device.claim(rank) == torch.device("cuda", index) == device.current()
    assert gpus == [0, 3, 0, 2] and device.collectives(device.current()) == "nccl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.claim(3) == torch.device("cpu") == device.current()
    assert device.collectives(device.current()) == "gloo"


def test_the_world_is_not_bound_to_a_gpu(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would split the group with the engines off it, and wait for the trainer's other ranks."""

    class JoinedError(Exception): ...

    def join(backend: str, **settings: object) -> None:
        assert backend == "nccl" and settings["rank"] == 2
        assert settings.get("device_id") is None
        raise JoinedError

    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    with pytest.raises(JoinedError):
        parallel.initialize(TrainerSection(dp=4), rank=2, host="10.0.0.1")
    assert gpus == [2]


@pytest.mark.parametrize("gpu", [False, True])
def test_a_rank_starts_with_what_its_device_takes(gpus: list[int], gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler on a CPU, a toolkit to build kernels with on a GPU; both before the ops' implementation."""
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(device, "enable_compiler", lambda: done.append("compiler"))
    monkeypatch.setattr(device, "use_toolkit", lambda: done.append("toolkit"))
    monkeypatch.setattr(device.implementation, "choose", lambda device, spec: done.append(device))
    device.start(1, NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2")))
    assert done == (["toolkit", torch.device("cuda", 1)] if gpu else ["compiler", torch.device("cpu")])


def test_transformer_engine_takes_a_gpu(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "transformer_engine" not in sys.modules
    assert not device.has_transformer_engine()
    found = ModuleType("transformer_engine")
    found.__spec__ = object()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "transformer_engine", found)
    assert device.has_transformer_engine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not device.has_transformer_engine()

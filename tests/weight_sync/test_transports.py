"""What each transport asks of the engines. That tensors arrive is shown on the real engine, in tests/e2e."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fp8rl.models.tensors import WHOLE
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin import lifecycle
from fp8rl.rollout.engine.protocol import from_action
from fp8rl.rollout.engine.server.arguments import server_environment
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import EngineError
from fp8rl.trainer.actor import RANK_ENVIRONMENT
from fp8rl.weight_sync.transports import distributed
from fp8rl.weight_sync.transports.disk import DiskTransport
from fp8rl.weight_sync.transports.distributed import DistributedTransport
from fp8rl.weight_sync.transports.tensor import TensorTransport
from tests.support.tiny_model import write_tiny_model

SPEC = QuantSpec.preset("bf16")
WEIGHTS = SimpleNamespace(rank=WHOLE, device=torch.device("cpu"), invalidate=lambda: None)
TENSORS = {str(index): torch.full((300,), index, dtype=torch.uint8) for index in range(5)}


class RecordingEngine(EngineClient):
    """Keeps the names and the tensors of each update that it is asked for."""

    def __init__(self) -> None:
        self.ranks = 1
        self.updates: list[tuple[str, dict[str, Any]]] = []
        self.tensors: dict[str, torch.Tensor] = {}

    async def admin(self, path: str, **body: Any) -> dict[str, Any]:
        if (directory := body.pop("model_path", None)) is not None:
            loaded = load_file(Path(directory, "model.safetensors"))
        else:
            loaded = asked_for(body.pop("action"))
        self.updates.append(("+".join(loaded), body))
        self.tensors |= loaded
        return {"ranks": []}


def asked_for(action: str) -> dict[str, torch.Tensor]:
    """Load what a message about a bucket points to, as an engine of one rank does."""
    call, arguments = from_action(action) or pytest.fail(f"found {action}, expected a call")
    assert call == "load_bucket"
    loaded: dict[str, torch.Tensor] = {}
    model = SimpleNamespace(load_weights=lambda tensors: loaded.update((name, t.clone()) for name, t in tensors))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "state", lambda: SimpleNamespace(weights=WEIGHTS))
        lifecycle.load_bucket(SimpleNamespace(model=model), **arguments)
    return loaded


def send(transport: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[RecordingEngine]:
    """Two engines after a transport has sent them the tensors."""
    engines = [RecordingEngine(), RecordingEngine()]
    asyncio.run(transport.send(iter(tensors), engines))
    assert engines[0].updates == engines[1].updates
    return engines


def test_the_tensor_transport_sends_bucket_by_bucket_and_flushes_nothing() -> None:
    engines = send(TensorTransport(1400), TENSORS.items())
    assert engines[0].updates == [("0+1", {}), ("2+3", {}), ("4", {})]
    for engine in engines:
        assert engine.tensors.keys() == TENSORS.keys()
        assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert send(TensorTransport(700), [])[0].updates == []


def test_the_next_bucket_is_filled_while_engines_load_one_and_the_first_failure_ends_it() -> None:
    filled, more = [], threading.Event()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in TENSORS.items():
            filled.append(name)
            if len(filled) == len(TENSORS):
                more.set()
            yield name, tensor

    class Slow(RecordingEngine):
        async def admin(self, path: str, **body: Any) -> dict[str, Any]:
            if not self.updates:
                assert await asyncio.to_thread(more.wait, 30), "who fills waits for the engine"
            else:
                raise EngineError("gone")
            return await super().admin(path, **body)

    engine = Slow()
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(TensorTransport(1400).send(tensors(), [engine]))
    assert [update[0] for update in engine.updates] == ["0+1"]


def test_the_disk_transport_announces_a_directory_that_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny_model(source)
    for _ in range(2):  # each sync replaces the directory of the one before
        engines = send(DiskTransport(source, tmp_path / "scratch" / "sync", SPEC), TENSORS.items())
        (update,) = engines[0].updates
        assert update == ("0+1+2+3+4", {"load_format": "auto", "flush_cache": False})
    assert [entry.name for entry in (tmp_path / "scratch").iterdir()] == ["sync"]


def test_buckets_are_filled_on_the_trainers_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread of its own, which would begin with the first of the node."""
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
    engines = send(TensorTransport(1 << 20), TENSORS.items())
    assert engines[0].tensors.keys() == TENSORS.keys() and entered and set(entered) == {3}


def test_both_ends_say_the_same_to_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sets these for itself, where nobody has set them."""
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    engine, rank = (
        {name: value for name, value in environment.items() if name.startswith("NCCL_")}
        for environment in (server_environment(None, tmp_path, cuda=True), RANK_ENVIRONMENT)
    )
    assert engine == rank and rank.keys() == {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"}


class Receiver(EngineClient):
    """A rank. calls: what was asked of it; tensors: what arrived; refuses: it takes part in no broadcast."""

    seen_from = LOOPBACK

    patience = timedelta(seconds=30)

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.ranks, self.url = refuses, 1, "http://engine"
        self.calls: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.group: Any = None

    async def join_weights_group(self, name: str, address: str, port: int, rank: int, size: int, backend: str) -> None:
        self.calls.append(f"join {rank}/{size} {backend}")
        self.group = await asyncio.to_thread(self._join, name, address, port, rank, size)

    @staticmethod
    def _join(name: str, address: str, port: int, rank: int, size: int) -> Any:
        """Under torch's registry of groups, in which a name stands once for each process, and here all are one."""
        store: dist.Store = dist.TCPStore(address, port, size, is_master=False, wait_for_workers=False)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(store, rank, size, Receiver.patience)

    async def receive_bucket(self, group: str, size: int, tensors: Any) -> None:
        self.calls.append("receive")
        if self.refuses:
            raise EngineError("/weights_checker answered 400: no")
        flat = torch.empty(size, dtype=torch.uint8)
        await asyncio.to_thread(lambda: self.group.broadcast(flat, 0).wait())
        self.tensors |= (lifecycle.tensor_within(flat, *tensor) for tensor in tensors)

    async def leave_weights_group(self, name: str) -> None:
        self.calls.append("leave")
        self.group = None


def broadcast(receivers: list[Receiver], tensors: Iterable[Any]) -> None:
    asyncio.run(DistributedTransport(1 << 20).send(iter(tensors), receivers))  # type: ignore[arg-type]


def test_an_engine_that_refuses_frees_the_others_and_leaves_no_group() -> None:
    receivers = [Receiver(), Receiver(refuses=True)]
    with pytest.raises(EngineError, match="answered 400"):
        broadcast(receivers, [("a", torch.ones(1 << 16))])
    assert [receiver.calls for receiver in receivers] == [
        [f"join {rank}/3 gloo", "receive", "leave"] for rank in (1, 2)
    ]
    fresh = Receiver()
    broadcast([fresh], [("a", torch.ones(3))])
    assert torch.equal(fresh.tensors["a"], torch.ones(3))


@pytest.mark.slow
def test_an_engine_that_does_not_join_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(Receiver, "patience", timedelta(seconds=3))
    absent = Receiver()
    absent.url, absent.join_weights_group = "http://absent", lambda *_: asyncio.sleep(600)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"found http://absent missing after 2 s, expected every engine to join"):
        broadcast([Receiver(), absent], [("a", torch.ones(3))])


def test_tensors_that_break_off_midway_leave_no_group() -> None:
    def breaking() -> Iterable[Any]:
        yield "a", torch.ones(1 << 18)
        yield "b", torch.ones(1 << 18)
        raise OSError("the cable was pulled")

    receiver = Receiver()
    with pytest.raises(OSError, match="cable"):
        broadcast([receiver], breaking())
    assert receiver.calls == ["join 1/2 gloo", "receive", "leave"]

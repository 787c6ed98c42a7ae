"""The broadcast of buckets, over gloo to engines that are threads and rebuild a message as SGLang does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.server.arguments import server_environment
from fp8rl.rollout.types import EngineError
from fp8rl.trainer.actor import RANK_ENVIRONMENT
from fp8rl.weight_sync.buckets import Packer
from fp8rl.weight_sync.transports import DistributedTransport, distributed
from fp8rl.weight_sync.transports.distributed import contents

CPU = torch.device("cpu")
SPEC = QuantSpec.preset("fp8_block_pow2")


def test_both_ends_say_the_same_to_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sets these for itself, where nobody has set them."""
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    engine, rank = (
        {name: value for name, value in environment.items() if name.startswith("NCCL_")}
        for environment in (server_environment(None, tmp_path, cuda=True), RANK_ENVIRONMENT)
    )
    assert engine == rank and rank.keys() == {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"}


class Receiver:
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

    async def update_weights_from_distributed(
        self, name: str, tensors: list[tuple[str, str, list[int]]], version: int, flush_cache: bool
    ) -> None:
        self.calls.append(f"update {version} {flush_cache}")
        if self.refuses:
            raise EngineError("/update_weights_from_distributed answered 400: no")
        self.tensors |= await asyncio.to_thread(self._receive, tensors)

    def _receive(self, tensors: list[tuple[str, str, list[int]]]) -> dict[str, torch.Tensor]:
        """`WeightUpdater._update_bucketed_weights_from_distributed`."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        empty = [(name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in tensors]
        bucket = FlattenedTensorBucket(named_tensors=empty)
        self.group.broadcast(bucket.get_flattened_tensor(), 0).wait()
        return {name: tensor for name, tensor in bucket.reconstruct_tensors() if not name.endswith(".bias")}

    async def leave_weights_group(self, name: str) -> None:
        self.calls.append("leave")
        self.group = None


def send(receivers: list[Receiver], tensors: Iterable[Any]) -> None:
    asyncio.run(DistributedTransport(1 << 20).send(iter(tensors), receivers, 7))  # type: ignore[arg-type]


def test_contents_name_the_gaps() -> None:
    packer = Packer(1000, lambda size, device: torch.empty(size, dtype=torch.uint8))
    views = [packer.allocate((5,), dtype, CPU) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32)]
    (bucket,) = packer.pack([("a", views[0]), ("c", views[2])])
    gap = ("gap.bias", "uint8", [22])  # from byte 10 to 32: what was there was left out
    assert contents(bucket) == [("a", "bfloat16", [5]), gap, ("c", "float32", [5])]
    (bucket,) = packer.pack([("a", packer.allocate((2, 3), torch.bfloat16, CPU))])
    packer.allocate((1,), torch.float32, CPU)
    assert contents(bucket) == [("a", "bfloat16", [2, 3])]


def test_an_engine_that_refuses_frees_the_others_and_leaves_no_group() -> None:
    receivers = [Receiver(), Receiver(refuses=True)]
    with pytest.raises(EngineError, match="answered 400"):
        send(receivers, [("a", torch.ones(1 << 16))])
    assert [receiver.calls for receiver in receivers] == [
        [f"join {rank}/3 gloo", "update 7 False", "leave"] for rank in (1, 2)
    ]
    fresh = Receiver()
    send([fresh], [("a", torch.ones(3))])
    assert torch.equal(fresh.tensors["a"], torch.ones(3))


class Absent(Receiver):
    """It does not come to the group."""

    async def join_weights_group(self, *unused: Any) -> None:
        await asyncio.sleep(600)


@pytest.mark.slow
def test_an_engine_that_does_not_join_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(Receiver, "patience", timedelta(seconds=3))
    absent = Absent()
    absent.url = "http://absent"
    with pytest.raises(EngineError, match=r"found http://absent missing after 2 s, expected every engine to join"):
        send([Receiver(), absent], [("a", torch.ones(3))])


def test_tensors_that_break_off_midway_leave_no_group() -> None:
    def breaking() -> Iterable[Any]:
        yield "a", torch.ones(1 << 18)
        yield "b", torch.ones(1 << 18)
        raise OSError("the cable was pulled")

    receiver = Receiver()
    with pytest.raises(OSError, match="cable"):
        send([receiver], breaking())
    assert receiver.calls == ["join 1/2 gloo", "update 7 False", "leave"]

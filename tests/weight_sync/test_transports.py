"""What each transport asks of the engines. That tensors arrive is shown on the real engine, in tests/e2e."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.types import EngineError
from fp8rl.weight_sync.transports import DiskTransport, TensorTransport
from fp8rl.weight_sync.transports import tensor as tensor_transport
from tests.support.ranks import WARM
from tests.support.tiny_model import write_tiny_model

SPEC = QuantSpec.preset("bf16")
TENSORS = {str(index): torch.full((300,), index, dtype=torch.uint8) for index in range(5)}


class RecordingEngine:
    """Keeps each update that it is asked for, and loads what a message about a bucket points to, as SGLang does."""

    ranks = 1

    def __init__(self) -> None:
        self.updates: list[tuple[Any, ...]] = []
        self.tensors: dict[str, torch.Tensor] = {}

    async def update_weights_from_tensor(self, payloads: list[str], version: int, **options: Any) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        (message,) = (MultiprocessingSerializer.deserialize(payload) for payload in payloads)
        loaded = {name: t.clone() for name, t in FlattenedTensorBucket(**message).reconstruct_tensors()}
        self.updates.append(("+".join(loaded), version, options))
        self.tensors |= loaded

    async def update_weights_from_disk(self, path: Path, version: int, **options: Any) -> None:
        self.updates.append((load_file(path / "model.safetensors").keys(), version, options))


def send(transport: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[RecordingEngine]:
    """Two engines after a transport has sent them the tensors, as version 7."""
    engines = [RecordingEngine(), RecordingEngine()]
    asyncio.run(transport.send(iter(tensors), engines, 7))
    assert engines[0].updates == engines[1].updates
    return engines


def test_the_tensor_transport_sends_bucket_by_bucket_and_flushes_nothing() -> None:
    options = {"load_format": "flattened_bucket", "flush_cache": False}
    engines = send(TensorTransport(1400), TENSORS.items())
    assert engines[0].updates == [("0+1", 7, options), ("2+3", 7, options), ("4", 7, options)]
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
        async def update_weights_from_tensor(self, payloads: list[str], version: int, **options: Any) -> None:
            if not self.updates:
                assert await asyncio.to_thread(more.wait, 30), "who fills waits for the engine"
            else:
                raise EngineError("gone")
            await super().update_weights_from_tensor(payloads, version, **options)

    engine = Slow()
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(TensorTransport(1400).send(tensors(), [engine], 7))
    assert [update[0] for update in engine.updates] == ["0+1"]


class ForeignEngine(RecordingEngine):
    """Loads in another process, which then lets go of the memory."""

    def __init__(self, process: Executor) -> None:
        self.process, self.loaded = process, []

    async def update_weights_from_tensor(self, payloads: list[str], version: int, **options: Any) -> None:
        self.loaded += self.process.submit(_load, payloads[0]).result()


def _load(payload: str) -> list[int]:
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.deserialize(payload)["flattened_tensor"][:1].tolist()


@pytest.mark.slow
def test_memory_that_is_used_again_stays_until_every_engine_has_read_it() -> None:
    """torch frees shared memory after as many readers as messages were made of it."""
    with ProcessPoolExecutor(1, WARM) as process:
        engines = [ForeignEngine(process) for _ in range(3)]
        asyncio.run(TensorTransport(300).send(iter(TENSORS.items()), engines, 7))
    assert [engine.loaded for engine in engines] == [[0, 1, 2, 3, 4]] * 3


def test_the_device_is_where_torch_and_sglang_put_it() -> None:
    from sglang.srt.utils.patch_torch import _REDUCE_TENSOR_ARG_DEVICE_INDEX
    from torch.multiprocessing import reductions

    index = tensor_transport._DEVICE
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)[index] == "storage_device"
    assert index == _REDUCE_TENSOR_ARG_DEVICE_INDEX


def test_the_disk_transport_announces_a_directory_that_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny_model(source)
    for _ in range(2):  # each sync replaces the directory of the one before
        engines = send(DiskTransport(source, tmp_path / "scratch" / "sync", SPEC), TENSORS.items())
        assert engines[0].updates == [(TENSORS.keys(), 7, {"flush_cache": False})]
    assert [entry.name for entry in (tmp_path / "scratch").iterdir()] == ["sync"]


def test_memory_of_a_gpu_goes_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = tuple(range(tensor_transport._DEVICE + 3))
    monkeypatch.setattr(tensor_transport.reductions, "reduce_tensor", lambda tensor: ("rebuild", arguments))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    rebuild, sent = tensor_transport._Mapped(SimpleNamespace(is_cuda=True)).__reduce__()  # type: ignore[arg-type]
    place = tensor_transport._DEVICE
    assert rebuild == "rebuild" and sent == (*arguments[:place], f"GPU-{place}", *arguments[place + 1 :])


def test_buckets_are_filled_on_the_trainers_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread of its own, which would begin with the first of the node."""
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
    engines = send(TensorTransport(1 << 20), TENSORS.items())
    assert engines[0].tensors.keys() == TENSORS.keys() and entered and set(entered) == {3}

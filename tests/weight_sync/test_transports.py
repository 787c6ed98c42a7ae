"""What each transport asks of the engines. That tensors arrive is shown on the real engine, in tests/e2e."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from numerics.spec import QuantSpec
from weight_sync.config import SyncConfig
from weight_sync.transports import DiskTransport, TensorTransport, make_transport
from weight_sync.transports import tensor as tensor_transport

SPEC = QuantSpec.preset("bf16")
TENSORS = {str(index): torch.full((300,), index, dtype=torch.uint8) for index in range(5)}


class RecordingEngine:
    """Keeps each update that it is asked for."""

    def __init__(self) -> None:
        self.updates: list[tuple[Any, ...]] = []

    async def update_weights_from_tensor(self, payloads: list[str], version: int, **options: Any) -> None:
        self.updates.append((*payloads, version, options))

    async def update_weights_from_disk(self, path: Path, version: int) -> None:
        self.updates.append((load_file(path / "model-00000.safetensors").keys(), version))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """What two engines are asked by a transport; a bucket is told by the names in it."""
    monkeypatch.setattr(
        tensor_transport, "_serialize", lambda bucket: ("+".join(name for name, _ in bucket), torch.empty(0))
    )

    def send(transport: Any, tensors: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        engines = [RecordingEngine(), RecordingEngine()]
        asyncio.run(transport.send(iter(tensors.items()), engines, 7))
        assert engines[0].updates == engines[1].updates
        return engines[0].updates

    return send


def test_the_cache_is_flushed_with_the_last_bucket_only(sent: Callable[..., list[tuple[Any, ...]]]) -> None:
    flattened = {"load_format": "flattened_bucket"}
    assert sent(TensorTransport(700), TENSORS) == [
        ("0+1", 7, {**flattened, "flush_cache": False}),
        ("2+3", 7, {**flattened, "flush_cache": False}),
        ("4", 7, {**flattened, "flush_cache": True}),
    ]


def test_one_bucket_is_the_last_and_none_is_nothing(sent: Callable[..., list[tuple[Any, ...]]]) -> None:
    ((names, _, options),) = sent(TensorTransport(1 << 20), TENSORS)
    assert (names, options["flush_cache"]) == ("0+1+2+3+4", True)
    assert sent(TensorTransport(1 << 20), {}) == []


def test_the_disk_transport_announces_a_directory_that_is_complete(
    sent: Callable[..., list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    for _ in range(2):  # each sync replaces the directory of the one before
        assert sent(DiskTransport(source, tmp_path / "scratch" / "sync", SPEC), TENSORS) == [(TENSORS.keys(), 7)]
    assert [entry.name for entry in (tmp_path / "scratch").iterdir()] == ["sync"]


def test_the_configuration_names_the_transport(tmp_path: Path) -> None:
    chosen = [make_transport(SyncConfig(transport=name), tmp_path, tmp_path, SPEC) for name in ("tensor", "disk")]
    assert [type(transport) for transport in chosen] == [TensorTransport, DiskTransport]
    assert make_transport(SyncConfig(bucket_mib=3), tmp_path, tmp_path, SPEC) == TensorTransport(3 << 20)

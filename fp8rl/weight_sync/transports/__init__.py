"""Transports of tensors from the trainer's ranks into the engines, with one interface.

The engines have a rank's tensors loaded when its `send` returns. Their caches are not flushed yet, and nothing is
committed: `bridge` does both, and verifies. The shortest transport, by files on a disk that both sides share, stands
here; the others have files of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fp8rl.numerics.core.process import rank
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.weight_sync.buckets import Named
from fp8rl.weight_sync.config import SyncSection
from fp8rl.weight_sync.served import write_served_checkpoint
from fp8rl.weight_sync.transports.distributed import DistributedTransport
from fp8rl.weight_sync.transports.tensor import TensorTransport


class Transport(Protocol):
    """A transport runs in the processes of all trainer ranks, and is sent there for each sync: it pickles and keeps
    nothing.

    It fails with an EngineError, an httpx.HTTPError or an OSError; the bridge makes a SyncError of it.
    """

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory from which `send` takes a tensor without another copy."""

    async def send(self, tensors: Iterable[tuple[str, Tensor]], engines: Sequence[EngineClient], version: int) -> None:
        """Load this rank's `tensors` (HF names) into every engine, under a weight version. All ranks call it."""


def make_transport(config: SyncSection, model_path: Path, scratch: Path, spec: QuantSpec) -> Transport:
    """Return the transport that the spec names.

    model_path: source of configuration and tokenizer files; scratch: directory for the disk transport's checkpoint.
    """
    make: dict[str, Callable[[], Transport]] = {
        "tensor": lambda: TensorTransport(config.bucket_mib << 20),
        "distributed": lambda: DistributedTransport(config.bucket_mib << 20),
        "disk": lambda: DiskTransport(model_path, scratch, spec),
    }
    return make[config.transport]()


@dataclass(frozen=True)
class DiskTransport:
    """Sends by writing a checkpoint on the shared disk, in safetensors files, which the engines load."""

    model_path: Path
    """Source of configuration and tokenizer files."""
    directory: Path
    """The directory that the checkpoint is written to."""
    spec: QuantSpec

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    async def send(self, tensors: Iterable[Named], engines: Sequence[EngineClient], version: int) -> None:
        write_served_checkpoint(tensors, self.model_path, self.directory, self.spec)
        if rank() == 0:
            await asyncio.gather(
                *(engine.update_weights_from_disk(self.directory, version, flush_cache=False) for engine in engines)
            )

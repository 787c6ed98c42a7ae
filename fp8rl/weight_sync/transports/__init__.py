"""Transports of tensors from the trainer's ranks into the engines, with one interface.

The engines have a rank's tensors loaded when its `send` returns. Their caches are not flushed yet, and nothing is
committed: `bridge` does both, and verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.weight_sync.config import SyncSection
from fp8rl.weight_sync.transports.disk import DiskTransport
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

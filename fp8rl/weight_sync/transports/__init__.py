"""Sends tensors from the trainer's ranks to the engines, by one of three transports with the same interface.

When a rank's `send` returns, the engines have loaded its tensors. They have not flushed their caches or committed the
tensors yet. `bridge` asks for both afterwards, and verifies the tensors.
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
    """Sends tensors from the processes of all trainer ranks. Each sync pickles the transport again to these processes,
    so a transport keeps no state.

    `send` fails with an EngineError, an httpx.HTTPError or an OSError, which the bridge turns into a SyncError.
    """

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory from which `send` takes a tensor without another copy."""

    async def send(self, tensors: Iterable[tuple[str, Tensor]], engines: Sequence[EngineClient], version: int) -> None:
        """Load this rank's `tensors` (HF names) into every engine, as weights of `version`. All ranks must call it."""


def make_transport(config: SyncSection, model_path: Path, scratch: Path, spec: QuantSpec) -> Transport:
    """Return the transport that `sync.transport` names.

    model_path: source of configuration and tokenizer files; scratch: directory for the disk transport's checkpoint.
    """
    make: dict[str, Callable[[], Transport]] = {
        "tensor": lambda: TensorTransport(config.bucket_mib << 20),
        "distributed": lambda: DistributedTransport(config.bucket_mib << 20),
        "disk": lambda: DiskTransport(model_path, scratch, spec),
    }
    return make[config.transport]()

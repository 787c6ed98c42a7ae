"""Sends weights as safetensors files on a disk that trainer and engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8rl.numerics.core.process import rank
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.weight_sync.buckets import Named
from fp8rl.weight_sync.served import write_served_checkpoint


@dataclass(frozen=True)
class DiskTransport:
    """Sends by writing a checkpoint that the engines load."""

    takes_stacks = False

    model_path: Path
    """Source of configuration and tokenizer files."""
    directory: Path
    """The directory that the checkpoint is written to."""
    spec: QuantSpec

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    async def send(self, tensors: Iterable[Named], engines: Sequence[EngineClient]) -> None:
        write_served_checkpoint(tensors, self.model_path, self.directory, self.spec)
        if rank() == 0:
            await asyncio.gather(*(engine.update_weights_from_disk(self.directory) for engine in engines))

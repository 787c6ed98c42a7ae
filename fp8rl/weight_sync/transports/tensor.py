"""Sends flat buckets through memory that engines on the same machine map (shared memory, or CUDA IPC)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fp8rl.numerics.core.memory import share
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.weight_sync.buckets import Bucket, Named, Packer


class TensorTransport:
    """Sends through memory that the engines map. They load one half of it while the other half is filled."""

    takes_stacks = True

    def __init__(self, bucket_bytes: int) -> None:
        self._packer = Packer(bucket_bytes // 2, partial(share, "bucket"), loading=1)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._packer.allocate(shape, dtype, device)

    async def send(self, tensors: Iterable[Named], engines: Sequence[EngineClient]) -> None:
        buckets = self._packer.pack(tensors)
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1

        def fill() -> Bucket | None:
            with torch.cuda.device(device):  # a thread of its own begins with the first GPU
                return next(buckets, None)

        loading = asyncio.create_task(asyncio.sleep(0))
        while (bucket := await asyncio.to_thread(fill)) is not None:
            await loading
            loading = asyncio.create_task(_load(bucket, engines))
        await loading


async def _load(bucket: Bucket, engines: Sequence[EngineClient]) -> None:
    """Let every engine load a bucket. An engine answers when its copies are done."""
    # An address is good for one reader, so each rank of an engine gets one.
    addresses = [[bucket.memory.address() for _ in range(engine.ranks)] for engine in engines]
    each = zip(engines, addresses, strict=True)
    await asyncio.gather(*(engine.load_bucket(to, bucket.entries) for engine, to in each))

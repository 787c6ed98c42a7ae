"""Broadcasts buckets to engines with GPUs of their own, in process groups that exist for one sync.

Every trainer rank makes a group of itself and all engines, since SGLang takes a broadcast only from a group's rank 0.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rl.numerics.core.memory import DeviceMemory
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import EngineError
from fp8rl.trainer import device
from fp8rl.trainer.distributed.parallel import in_turn, open_store
from fp8rl.weight_sync.buckets import Named, Packer

TIMEOUT = timedelta(minutes=2)
_QUEUE = "weights"
"""Name of the queue in which ranks send. An engine blocks in each broadcast until all engines take part in it, so all
engines must serve the ranks in the same order."""


class DistributedTransport:
    """Sends by a broadcast to engines that have GPUs of their own."""

    takes_stacks = True

    def __init__(self, bucket_bytes: int) -> None:
        self._packer = Packer(bucket_bytes, DeviceMemory)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._packer.allocate(shape, dtype, device)

    async def send(self, tensors: Iterable[Named], engines: Sequence[EngineClient]) -> None:
        buckets = self._packer.pack(tensors)
        bucket = next(buckets, None)
        if bucket is None:
            return  # nothing is this rank's
        async with _process_group(engines) as (name, group):
            while bucket is not None:
                with in_turn(_QUEUE):
                    await asyncio.gather(
                        asyncio.to_thread(_broadcast, bucket.flat[: bucket.used], group),
                        *(engine.receive_bucket(name, bucket.used, bucket.entries) for engine in engines),
                    )
                bucket = next(buckets, None)


@asynccontextmanager
async def _process_group(engines: Sequence[EngineClient]) -> AsyncIterator[tuple[str, Any]]:
    """Make a process group for a `with` block: this process is rank 0, then the engines. Yield its name and the
    group."""
    name = f"weights-{secrets.token_hex(4)}"
    backend = device.collectives(device.current())
    first = list(itertools.accumulate((engine.ranks for engine in engines), initial=1))  # rank of each engine
    size = first[-1]
    with in_turn(_QUEUE):
        host = engines[0].seen_from
        store = open_store(host, size)
        local, *others = map(
            asyncio.ensure_future,
            (
                asyncio.to_thread(_join, name, store, size, backend),
                *(
                    engine.join_weights_group(name, host, store.port, rank, size, backend)
                    for rank, engine in zip(first, engines)
                ),
            ),
        )
        try:
            done, _ = await asyncio.wait([local, *others], return_when=asyncio.FIRST_EXCEPTION)
            for call in done - {local}:
                call.result()  # an engine's error says more than that the engine is missing
            group = local.result()
        except TimeoutError as error:
            # Under gloo each rank leaves its address in the store, under NCCL rank 0 alone leaves one.
            last = (key.rpartition("/")[2] for key in store.list_keys())
            there = {int(rank) for rank in last if rank.isdecimal()}
            missing = [engine.url for rank, engine in zip(first, engines) if rank not in there]
            raise EngineError(
                f"the process group of a sync: found {' and '.join(missing)} missing after "
                f"{TIMEOUT.total_seconds():g} s, expected every engine to join"
            ) from error
    failed = True
    try:
        yield name, group
        failed = False
    finally:
        # All leave at once: a side that still waits in a broadcast is freed when the other side leaves.
        with in_turn(_QUEUE):
            await asyncio.gather(
                asyncio.to_thread(dist.destroy_process_group, group),
                *(engine.leave_weights_group(name) for engine in engines),
                return_exceptions=failed,
            )


def _join(name: str, store: dist.Store, size: int, backend: str) -> Any:
    from sglang.srt.utils import init_custom_process_group

    try:
        return init_custom_process_group(
            backend=backend,
            store=dist.PrefixStore(name, store),
            world_size=size,
            rank=0,
            group_name=name,
            timeout=TIMEOUT,
        )
    except RuntimeError as error:
        raise TimeoutError(f"the engines did not join the process group of the sync: {error}") from error


def _broadcast(flat: Tensor, group: Any) -> None:
    try:
        dist.broadcast(flat, src=0, group=group)
    except RuntimeError as error:
        raise EngineError(f"the broadcast of weights failed: {error}") from error

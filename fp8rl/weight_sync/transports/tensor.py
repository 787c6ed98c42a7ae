"""Sends flat buckets through memory that engines on the same machine map (shared memory, or CUDA IPC)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.weight_sync.buckets import Bucket, Named, Packer

_DEVICE = 6
"""Index of the device among the arguments of `rebuild_cuda_tensor`."""


class TensorTransport:
    """Sends through memory that the engines map. They load one half of it while the other half is filled."""

    takes_stacks = True

    def __init__(self, bucket_bytes: int) -> None:
        self._packer = Packer(bucket_bytes // 2, shared_memory, loading=1)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._packer.allocate(shape, dtype, device)

    async def send(self, tensors: Iterable[Named], engines: Sequence[EngineClient], version: int) -> None:
        buckets = self._packer.pack(tensors)
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1

        def fill() -> Bucket | None:
            with torch.cuda.device(device):  # a thread of its own begins with the first GPU
                return next(buckets, None)

        loading = asyncio.create_task(asyncio.sleep(0))
        while (bucket := await asyncio.to_thread(fill)) is not None:
            await loading
            loading = asyncio.create_task(_load(bucket, engines, version))
        await loading


async def _load(bucket: Bucket, engines: Sequence[EngineClient], version: int) -> None:
    """Let every engine load a bucket."""
    # Each message is good for one reader, so each rank of an engine gets one. The memory is freed after all have read.
    # An engine answers when its copies are done (`rollout.engine.plugin.lifecycle.update_from_tensor`).
    await asyncio.gather(
        *(
            engine.update_weights_from_tensor([serialize(bucket) for _ in range(engine.ranks)], version)
            for engine in engines
        )
    )


def shared_memory(size: int, device: torch.device) -> Tensor:
    # Handles by name: torch's default passes file descriptors, which unrelated processes cannot.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        storage = torch.UntypedStorage._new_shared(size, device=device)
    except RuntimeError as error:
        if "No space left" not in str(error):
            raise
        raise OSError(
            f"/dev/shm: found no room for a bucket of {size >> 20} MiB, expected room. Remove old files there, give "
            "the container more (docker run --shm-size=1g), lower sync.bucket_mib, or set sync.transport=disk"
        ) from None
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def serialize(bucket: Bucket) -> str:
    """Return SGLang's message for one bucket; it points to the bucket's memory."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(entry.name, entry.shape, entry.dtype, entry.start, entry.start + entry.size, entry.size)
        for entry in bucket.entries
    ]
    message = {"flattened_tensor": _Mapped(bucket.flat), "metadata": metadata}
    return MultiprocessingSerializer.serialize(message, output_str=True)


class _Mapped:
    """Wraps a tensor; unpickling gives the tensor. The pickle names a GPU by UUID, as processes may number GPUs
    differently. SGLang reads UUIDs (`monkey_patch_torch_reductions`). SGLang's code for sending is not used, because
    it patches torch for the whole process, which then fails to send tensors on the CPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        if self._tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
            arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        return rebuild, arguments

"""On one host: flat buckets through shared memory (CUDA IPC for tensors on a GPU)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.client import EngineClient
from weight_sync.buckets import Named, buckets


@dataclass(frozen=True)
class TensorTransport:
    """bucket_bytes: size of one bucket; two are alive at a time at most."""

    bucket_bytes: int

    async def send(self, tensors: Iterable[Named], engines: Sequence[EngineClient], version: int) -> None:
        # Handles by name: torch's default passes file descriptors, which unrelated processes cannot.
        torch.multiprocessing.set_sharing_strategy("file_system")
        for bucket, last in _with_last(buckets(tensors, self.bucket_bytes)):
            payload, shared = _serialize(bucket)
            await asyncio.gather(
                *(
                    engine.update_weights_from_tensor(
                        [payload], version, load_format="flattened_bucket", flush_cache=last
                    )
                    for engine in engines
                )
            )
            del shared  # not before every engine has copied it


def _serialize(bucket: list[Named]) -> tuple[str, Tensor]:
    """SGLang's message for one bucket, and the flat tensor that it points to."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    packed = FlattenedTensorBucket(named_tensors=bucket)
    flat = packed.get_flattened_tensor()
    message = {"flattened_tensor": flat, "metadata": packed.get_metadata()}
    return MultiprocessingSerializer.serialize(message, output_str=True), flat


def _with_last(items: Iterable[list[Named]]) -> Iterator[tuple[list[Named], bool]]:
    held: list[Named] | None = None
    for item in items:
        if held is not None:
            yield held, False
        held = item
    if held is not None:
        yield held, True

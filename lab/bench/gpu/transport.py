"""Weights from this process to another by the transport `tensor`: at what rate, and whether they are the same there.

The other process does what an engine does: it maps a bucket, copies each tensor to where it is served from, and answers
when the copies are done.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.digest import tensor_digests
from fp8rl.weight_sync.manifest import Recorder
from fp8rl.weight_sync.served import served_tensors
from fp8rl.weight_sync.transports.tensor import TensorTransport
from lab.bench.gpu.measure import Measured, Sizes, Stopwatch
from lab.bench.gpu.sync import BUCKET_BYTES, SPEC, definition, random_weights

ROUNDS = 3


def run(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    model, transport = definition(sizes.stack), TensorTransport(BUCKET_BYTES)
    weights = dict(random_weights(model, watch.device))
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(there,), daemon=True)
    process.start()
    there.close()
    engine, recorder = _Receiver(here), Recorder(model.tensors)

    def quantized() -> Iterator[tuple[str, Tensor]]:
        return served_tensors(weights.items(), SPEC, model, transport.allocate)

    def send(tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> float:
        start = time.perf_counter()
        asyncio.run(transport.send(tensors(), [engine], 1))  # type: ignore[list-item]
        return time.perf_counter() - start

    send(lambda: recorder.watch(quantized()))  # the first one maps the buckets, and makes what is served
    held, sent = engine.digests(), recorder.sent()
    different = sum(digest != held.get(name) for name, digest in sent.digests.items())
    done.equal("tensors that differ in the other process", different, tensors=len(held), MB=sent.bytes / 1e6)
    passes = {
        "quantize and send": quantized,
        "quantize, digest and send": lambda: Recorder(model.tensors).watch(quantized()),
    }
    for name, tensors in passes.items():
        seconds = min(send(tensors) for _ in range(ROUNDS))
        done.row({"pass": name, "GB": sent.bytes / 1e9}, {"seconds": seconds, "GB/s": sent.bytes / seconds / 1e9})
    here.send(None)
    process.join()


class _Receiver:
    """Stands where a transport has the client of an engine."""

    ranks = 1

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def update_weights_from_tensor(self, payloads: list[str], version: int, **options: Any) -> None:
        await asyncio.to_thread(self._load, payloads[0])  # meanwhile the next bucket is filled

    def _load(self, payload: str) -> None:
        self._connection.send(payload)
        self._connection.recv()

    def digests(self) -> dict[str, str]:
        """Digests by name, of what the other process holds."""
        self._connection.send("")
        held: dict[str, str] = self._connection.recv()
        return held


def _receive(connection: Connection) -> None:
    """The other process, until it is sent None."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    if torch.cuda.is_available():
        monkey_patch_torch_reductions()  # reads the GPU's UUID in a message
    held: dict[str, Tensor] = {}
    while (message := connection.recv()) is not None:
        if message:
            bucket = FlattenedTensorBucket(**MultiprocessingSerializer.deserialize(message))
            for name, tensor in bucket.reconstruct_tensors():
                held.setdefault(name, torch.empty_like(tensor)).view(torch.uint8).copy_(tensor.view(torch.uint8))
            del bucket, tensor
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            connection.send(True)
        else:
            connection.send(dict(zip(held, tensor_digests(list(held.values())), strict=True)))

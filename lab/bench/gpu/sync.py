"""The passes of a weight sync over the stack's weights, in parts of the copy bandwidth: quantize into buckets, digest
what is sent, copy into the engine's tensors, digest what is held."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fp8rl.models.architecture import Model
from fp8rl.models.architectures.qwen3_moe import ARCHITECTURE
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.core.memory import DeviceMemory, copy_all, mapped
from fp8rl.numerics.digest import tensor_digests
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.plugin.lifecycle import tensor_within
from fp8rl.weight_sync.buckets import Bucket, Packer
from fp8rl.weight_sync.manifest import Recorder
from fp8rl.weight_sync.served import served_tensors
from lab.bench.gpu.measure import Layers, Measured, Sizes, Stopwatch, random
from lab.bench.measure import Result

SPEC = QuantSpec.preset("fp8_block_pow2")
BUCKET_BYTES = 256 << 20


def passes(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    bandwidth, model = watch.copy_bandwidth(), _definition(sizes.stack)
    weights = dict(_random_weights(model, watch.device))
    read = sum(tensor.nbytes for tensor in weights.values())
    served = {name: torch.empty_like(t) for name, t in served_tensors(weights.items(), SPEC, model)}
    sent = sum(tensor.nbytes for tensor in served.values())
    tensors, packer = list(served.values()), Packer(BUCKET_BYTES, DeviceMemory)  # one, which keeps its memory
    # The bytes that each pass must read and write.
    timed: dict[str, tuple[Callable[[], object], int]] = {
        "quantize into buckets": (lambda: _all(_pack(weights, model, packer)), read + sent),
        "quantize and digest": (lambda: _all(_pack(weights, model, packer, Recorder(model.tensors))), read + 2 * sent),
        "quantize, digest, copy": (
            lambda: _copy(_pack(weights, model, packer, Recorder(model.tensors)), served),
            read + 4 * sent,
        ),
        "digest what is held": (lambda: tensor_digests(tensors), sent),
    }
    for name, (run_pass, size) in timed.items():
        seconds = watch.seconds(run_pass, repeats=5, with_host=True)
        done.row({"pass": name, "GB": size / 1e9}, {"seconds": seconds, "of copy": size / seconds / bandwidth})
    total = sum(float(row["seconds"]) for row in done.rows[2:])
    moved = read + 5 * sent
    recorder = Recorder(model.tensors)
    _copy(_pack(weights, model, packer, recorder), served)
    held = dict(zip(served, tensor_digests(tensors), strict=True))
    different = sum(digest != held[name] for name, digest in recorder.sent().digests.items())
    done.equal("tensors that differ after the copy", different, tensors=len(held))
    parts = {"GB moved": moved / 1e9, "seconds": total, "BF16 weights (GB/s)": read / total / 1e9}
    name = "sync: quantize + digest + copy + digest / copy bandwidth"
    done.result(Result(name, moved / total / bandwidth, 0.6, True, parts))


def transport(done: Measured, sizes: Sizes, watch: Stopwatch) -> None:
    """Weights from this process to another by the transport `tensor`: their rate, and whether they are the same there.

    The other process does what an engine does: it maps a bucket, copies each tensor to where it is served from, and
    answers when the copies are done.
    """
    from fp8rl.weight_sync.transports.tensor import TensorTransport

    model, sender = _definition(sizes.stack), TensorTransport(BUCKET_BYTES)
    weights = dict(_random_weights(model, watch.device))
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(there,), daemon=True)
    process.start()
    there.close()
    engine, recorder = _Receiver(here), Recorder(model.tensors)

    def quantized() -> Iterator[tuple[str, Tensor]]:
        return served_tensors(weights.items(), SPEC, model, sender.allocate)

    def send(tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> float:
        start = time.perf_counter()
        asyncio.run(sender.send(tensors(), [engine]))  # type: ignore[list-item]
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
        seconds = min(send(tensors) for _ in range(3))
        done.row({"pass": name, "GB": sent.bytes / 1e9}, {"seconds": seconds, "GB/s": sent.bytes / seconds / 1e9})
    here.send(None)
    process.join()


class _Receiver:
    """Stands where a transport has the client of an engine."""

    ranks = 1

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def load_bucket(self, addresses: list[str], tensors: list[Any]) -> None:
        await asyncio.to_thread(self._load, addresses[0], tensors)  # meanwhile the next bucket is filled

    def _load(self, *message: Any) -> None:
        self._connection.send(message)
        self._connection.recv()

    def digests(self) -> dict[str, str]:
        """Digests by name, of what the other process holds."""
        self._connection.send(())
        held: dict[str, str] = self._connection.recv()
        return held


def _receive(connection: Connection) -> None:
    """The other process, until it is sent None."""
    held: dict[str, Tensor] = {}
    while (message := connection.recv()) is not None:
        if message:
            address, tensors = message
            flat = mapped(address)
            sent = dict(tensor_within(flat, *tensor) for tensor in tensors)
            targets = [held.setdefault(name, torch.empty_like(tensor)) for name, tensor in sent.items()]
            copy_all(targets, list(sent.values()))
            del flat, sent
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            connection.send(True)
        else:
            connection.send(dict(zip(held, tensor_digests(list(held.values())), strict=True)))


def _definition(layers: Layers) -> Model:
    """Such a stack with its table of tensors."""
    sizes = ModelSizes(
        layers=layers.layers,
        hidden_size=layers.hidden,
        heads=layers.heads,
        kv_heads=layers.kv_heads,
        head_dim=128,
        rotary_dim=128,
        vocab_size=layers.vocab,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=4096,
        tied=False,
        experts=layers.experts,
        top_k=layers.top_k,
        expert_size=layers.moe_intermediate,
    )
    return Model(ARCHITECTURE, sizes)


def _random_weights(model: Model, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The stack's quantized matrices by their HF names, as a trainer exports them."""
    for row in model.tensors.rows.values():
        if model.quantizes(row, SPEC):
            yield row.name, random(*row.shape, device=device, scale=0.02)


def _pack(
    weights: dict[str, Tensor], model: Model, packer: Packer, recorder: Recorder | None = None
) -> Iterator[Bucket]:
    tensors = served_tensors(weights.items(), SPEC, model, packer.allocate)
    return packer.pack(recorder.watch(tensors) if recorder else tensors)


def _copy(buckets: Iterator[Bucket], served: dict[str, Tensor]) -> None:
    """Copy each tensor to where it is served from, as an engine does."""
    for bucket in buckets:
        sent = dict(tensor_within(bucket.flat, *tensor) for tensor in bucket.entries)
        copy_all([served[name] for name in sent], list(sent.values()))


def _all(buckets: Iterator[Bucket]) -> None:
    for _ in buckets:
        pass

"""The bridge sends the trainer's weights to the engines, and proves that they arrived.

A sync pauses generation. Every trainer rank quantizes and sends its shard. Each engine commits the shard: it rebuilds
the GEMM operands, and digests its own parameters. The engine's digests are compared with the digests of the sent
tensors. Then generation resumes. If a tensor differs or a step fails, generation stays paused and `SyncError` is
raised. So no engine generates with some weights of one version and some of another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import httpx
import torch
from torch import Tensor

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.core.process import exhaust
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.engine.protocol import CACHE, GRAPHS, WEIGHTS
from fp8rl.rollout.engine.server.client import EngineClient, PauseMode
from fp8rl.rollout.types import Endpoint, EngineError
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.weight_sync.buckets import Named, changes
from fp8rl.weight_sync.config import ANSWER_WITHIN_S, SyncSection
from fp8rl.weight_sync.frozen import Contents, FrozenBase, base_addresses, check_frozen, exported, place_base, reads
from fp8rl.weight_sync.manifest import Manifest, Recorder, ShardDigests, SyncError, some_of
from fp8rl.weight_sync.served import served_tensors
from fp8rl.weight_sync.transports.disk import DiskTransport
from fp8rl.weight_sync.transports.distributed import DistributedTransport
from fp8rl.weight_sync.transports.tensor import TensorTransport

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class SyncReport:
    """The metrics of one sync."""

    version: int
    bytes: int
    """Bytes of the payload that each engine gets."""
    weight_bytes: int
    """Bytes of all weights in an engine."""
    seconds: float
    """Seconds from pause to resume."""
    send_seconds: float
    verify_seconds: float
    """The part of `seconds` after the last send."""
    verified_tensors: int
    """Tensors whose digests were equal in every engine."""
    mismatched: tuple[str, ...] = ()
    """Names of the tensors whose digests differ in some engine."""

    @property
    def mismatched_tensors(self) -> int:
        return len(self.mismatched)

    def metrics(self) -> dict[str, float]:
        """Return the numbers, except for the version, as `sync/...` metrics in seconds and bytes."""
        values = dataclasses.asdict(self) | {"mismatched_tensors": self.mismatched_tensors}
        return {f"sync/{name}": float(value) for name, value in values.items() if name not in ("version", "mismatched")}


@dataclasses.dataclass(frozen=True)
class Bridge:
    """Sends weights from one trainer to its engines."""

    trainer: TrainerGroup
    spec: QuantSpec
    config: SyncSection
    model_path: Path
    """The directory from which configuration files are copied."""
    scratch: Path
    """The directory in which checkpoints are written."""
    wakes: bool = False
    """Whether the engines may be asleep, so that a sync wakes them."""
    adapter: AdapterSection | None = None
    """The run's adapters. A sync sends only the adapters if the engines hold the frozen weights."""
    base: FrozenBase = dataclasses.field(default_factory=FrozenBase)
    """The frozen weights that the engines hold in addition to adapters."""

    def sync(
        self, endpoints: Sequence[Endpoint], manifest_path: Path | None = None, *, whole: bool = False
    ) -> SyncReport:
        """Bring all engines to the trainer's weight version, and verify what they hold.

        manifest_path: where to save the manifest. whole: send all tensors, even if the engines need only the adapters,
        or only the changes (`sync.delta`).

        Raises `SyncError`, which names the tensors that differ in each engine, or the error that ended the sync.
        """
        config, version = self.config, self.trainer.weight_version
        transport = make_transport(config, self.model_path, self.scratch / "sync_checkpoint", self.spec)
        timeout_s, since = config.answer_within_s, None
        if (config.delta or self.adapter) and not whole:
            with _as_sync_error(version):
                versions = set(asyncio.run(_each(endpoints, lambda engine: engine.ping(), timeout_s)))
            common = versions.pop() if len(versions) == 1 else None
            since = None if common is None else int(common)
        contents: Contents = self.base.contents(since) if self.adapter else "weights"
        if contents == "weights and adapters" and config.shared_base and all(self.trainer.apply(reads, self.spec)):
            contents = "adapters beside a base"
        task = SendTask(transport, self.spec, list(endpoints), version, config.delta, since, timeout_s, contents)

        def send() -> Sequence[ShardDigests]:
            shared = contents == "adapters beside a base"
            parts = give_base(self.trainer, self.spec, endpoints, timeout_s) if shared else []
            parts += self.trainer.apply(send_shard, task)
            return self.base.completed(parts, self.adapter, contents) if self.adapter else parts

        self.base.version = None
        manifest, report, problems = send_and_verify(
            send, self.spec, endpoints, version, config.pause, timeout_s, wakes=self.wakes
        )
        if manifest_path is not None:
            manifest.save(manifest_path)
        if problems:
            base_note = self.base.base_note(report.mismatched) if contents == "adapters" else ""
            raise SyncError(
                f"sync to weight version {version}: {report.mismatched_tensors} of {len(manifest.entries)} tensors are "
                f"not what the trainer sent: {some_of(report.mismatched)}{base_note}; generation stays paused.\n"
                "Restart the run from its last checkpoint, and if it happens again, compare the "
                "versions of sglang on all nodes:\n" + "\n".join(problems[:20])
            )
        self.base.version = version
        return report


class Transport(Protocol):
    """Sends tensors from the processes of all trainer ranks. Each sync pickles the transport again to these processes,
    so a transport keeps no state.

    `send` fails with an EngineError, an httpx.HTTPError or an OSError, which the bridge turns into a SyncError.
    """

    takes_stacks: bool
    """Whether `send` takes stacks of tensors (`TensorTable.stack`)."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory from which `send` takes a tensor without another copy."""

    async def send(self, tensors: Iterable[Named], engines: Sequence[EngineClient]) -> None:
        """Load this rank's `tensors` (HF names) into every engine. All ranks must call it.

        When it returns, the engines have loaded the tensors, and have not flushed their caches or committed yet.
        """


def make_transport(config: SyncSection, model_path: Path, scratch: Path, spec: QuantSpec) -> Transport:
    """Return the transport that `sync.transport` names.

    model_path: source of configuration and tokenizer files; scratch: directory for the disk transport's checkpoint.
    """
    if config.transport == "disk":
        return DiskTransport(model_path, scratch, spec)
    size = config.bucket_mib << 20
    return TensorTransport(size) if config.transport == "tensor" else DistributedTransport(size)


@dataclasses.dataclass(frozen=True)
class SendTask:
    """The arguments of `send_shard`, the same on every trainer rank."""

    transport: Transport
    spec: QuantSpec
    endpoints: list[Endpoint]
    version: int
    delta: bool = False
    """Whether to keep a copy of the sent tensors, and to send only what has changed since version `since`."""
    since: int | None = None
    """The version that all engines hold; None: they differ. All is sent unless this is the version sent last."""
    timeout_s: float = ANSWER_WITHIN_S
    """Timeout of one response of an engine."""
    contents: Contents = "weights"
    """The part of the model to send."""


def send_and_verify(
    send: Callable[[], Sequence[ShardDigests]],
    spec: QuantSpec,
    endpoints: Sequence[Endpoint],
    version: int,
    pause: PauseMode = "retract",
    timeout_s: float = ANSWER_WITHIN_S,
    wakes: bool = False,
) -> tuple[Manifest, SyncReport, list[str]]:
    """Run a sync: pause, send, commit, compare, and resume if nothing differs. Return the manifest, the metrics, and
    one line for each difference.

    send: lets every rank send its shard of the tensors served under `spec`. pause: see `SyncSection.pause`. timeout_s:
    timeout of one response of an engine. wakes: wake sleeping engines. An engine gets memory for weights before the
    send, and memory for its cache and graphs after the proof.
    """

    async def stop(engine: EngineClient) -> None:
        await engine.pause(pause)
        if wakes:
            await engine.occupy(WEIGHTS)

    async def go_on(engine: EngineClient) -> None:
        if wakes:
            await engine.occupy(CACHE, GRAPHS)
        await engine.resume()

    async def commit(engine: EngineClient) -> dict[str, str]:
        if pause != "in_place":  # in place, unfinished answers go on with the cache
            await engine.flush()
        return await engine.commit(version)

    start = time.perf_counter()
    with _as_sync_error(version):
        asyncio.run(_each(endpoints, stop, timeout_s))
        parts = send()
        sent = time.perf_counter()
        manifest = Manifest.merged(version, spec, parts)
        reported = asyncio.run(_each(endpoints, commit, timeout_s))
        differing = [manifest.differences(entries) for entries in reported]
        problems = [
            f"engine {endpoint.url}: {line}"
            for endpoint, lines in zip(endpoints, differing, strict=True)
            for line in lines.values()
        ]
        if not problems:
            asyncio.run(_each(endpoints, go_on, timeout_s))
        end = time.perf_counter()
    bad = set().union(*differing)
    report = SyncReport(
        version=version,
        bytes=sum(part.bytes for part in parts),
        weight_bytes=sum(part.weight_bytes for part in parts),
        seconds=end - start,
        send_seconds=sent - start,
        verify_seconds=end - sent,
        verified_tensors=len(manifest.entries) - len(bad & manifest.entries.keys()),
        mismatched=tuple(sorted(bad)),
    )
    return manifest, report, problems


def give_base(
    trainer: TrainerGroup, spec: QuantSpec, endpoints: Sequence[Endpoint], timeout_s: float
) -> list[ShardDigests]:
    """Place a trainer's base if necessary, and let engines read it. The caller must commit afterwards.

    Return the digests of the tensors that each rank has written.
    Raises EngineError: an engine cannot read the base, and must be replaced.
    """
    sent = trainer.apply(place_base, spec)
    addresses = iter(next(found for found in trainer.apply(base_addresses, len(endpoints)) if found))
    asyncio.run(_each(endpoints, lambda engine: engine.map_base(next(addresses)), timeout_s))
    return sent


def send_shard(trainer: Trainer, task: SendTask) -> ShardDigests:
    """Quantize this rank's shard, and send it to every engine."""
    table, ranks = trainer.definition.tensors, max(endpoint.ranks for endpoint in task.endpoints)
    recorder, payload = Recorder(table, ranks), 0
    weights = exported(trainer, task.contents, stacked=task.transport.takes_stacks and not task.delta)

    def to_send() -> Iterator[Named]:
        nonlocal payload
        # What is quantized straight into the transport's memory cannot be left out of it.
        allocate = None if task.delta else task.transport.allocate
        tensors = recorder.watch(served_tensors(weights, task.spec, trainer.definition, allocate))
        if task.delta:
            tensors = changes(trainer.last_sent, tensors, task.version, task.since, table, ranks)
        for name, tensor in tensors:
            payload += tensor.nbytes
            yield name, tensor

    async def send() -> None:
        async with _clients(task.endpoints, task.timeout_s) as engines:
            await task.transport.send(to_send(), engines)

    try:
        if task.contents != "weights":
            check_frozen(trainer)
        with _as_sync_error(task.version):
            asyncio.run(send())
        return recorder.sent(payload)
    finally:
        exhaust(weights)


async def _each(
    endpoints: Sequence[Endpoint], use: Callable[[EngineClient], Awaitable[Result]], timeout_s: float
) -> list[Result]:
    """Call `use` with a client of each engine, and return the results."""
    async with _clients(endpoints, timeout_s) as engines:
        return await asyncio.gather(*(use(engine) for engine in engines))


@asynccontextmanager
async def _clients(endpoints: Sequence[Endpoint], timeout_s: float) -> AsyncIterator[list[EngineClient]]:
    async with AsyncExitStack() as closing:
        yield [await closing.enter_async_context(EngineClient(each, timeout_s=timeout_s)) for each in endpoints]


@contextmanager
def _as_sync_error(version: int) -> Iterator[None]:
    try:
        yield
    except (EngineError, httpx.HTTPError, OSError) as error:
        raise SyncError(
            f"sync to weight version {version}: found {error!r} on the way, expected every engine to load and verify "
            "the weights; generation stays paused. Sync again, and replace an engine that died"
        ) from error

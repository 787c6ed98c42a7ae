"""The bridge: the trainer's weights into the engines, and the proof that they arrived.

A sync pauses generation, has every trainer rank quantize and send what it hands out, has each engine commit it (refresh
what it computes with, take digests of its own parameters), compares the digests with those of what was sent, and
resumes. If anything differs, or anything fails on the way, generation stays paused and `SyncError` says what: a mixture
is never sampled from.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx

from fp8rl.models.adapters import AdapterConfig
from fp8rl.numerics.ranks import exhaust
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.errors import EngineError
from fp8rl.rollout.protocol import CACHE, GRAPHS, WEIGHTS
from fp8rl.rollout.server.client import EngineClient, PauseMode
from fp8rl.rollout.types import Endpoint
from fp8rl.trainer.actor import TrainerGroup
from fp8rl.weight_sync.adapters import Contents, HeldBase, check_frozen, exported
from fp8rl.weight_sync.base import give_base, reads
from fp8rl.weight_sync.buckets import Named, changes
from fp8rl.weight_sync.config import ANSWER_WITHIN_S, SyncConfig
from fp8rl.weight_sync.hf_checkpoint import write_served_checkpoint
from fp8rl.weight_sync.manifest import Manifest, Recorder, Sent, SyncError, some_of
from fp8rl.weight_sync.quantized import served_tensors
from fp8rl.weight_sync.transports import Transport, make_transport

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer  # megatron is for the ranks, not for the driver

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class SyncReport:
    """One sync. bytes: payload to each engine, of weight_bytes that it holds of it. seconds: pause to resume, of which
    verify_seconds for the proof.

    verified_tensors: tensors whose digests were equal in every engine; mismatched: the names of the others.
    """

    version: int
    bytes: int
    weight_bytes: int
    seconds: float
    send_seconds: float
    verify_seconds: float
    verified_tensors: int
    mismatched: tuple[str, ...] = ()

    @property
    def mismatched_tensors(self) -> int:
        return len(self.mismatched)

    def metrics(self) -> dict[str, float]:
        """All but version and names as `sync/...` metrics; seconds and bytes."""
        values = dataclasses.asdict(self) | {"mismatched_tensors": self.mismatched_tensors}
        return {f"sync/{name}": float(each) for name, each in values.items() if name not in ("version", "mismatched")}


@dataclasses.dataclass(frozen=True)
class Bridge:
    """Brings the weights of one trainer to its engines.

    spec: what the engines serve. model_path: source of configuration files. scratch: directory for written checkpoints.
    wakes: the engines may be asleep; a sync wakes them. adapter: what stands beside the weights that the engines serve,
    which a sync sends alone where they hold the weights. base: what these are.
    """

    trainer: TrainerGroup
    spec: QuantSpec
    config: SyncConfig
    model_path: Path
    scratch: Path
    wakes: bool = False
    adapter: AdapterConfig | None = None
    base: HeldBase = dataclasses.field(default_factory=HeldBase)

    def write_checkpoint(self) -> Path:
        """The current weights as a directory that an engine can start from."""
        path = self.scratch / "served_checkpoint"
        self.trainer.apply(_write, self.spec, self.model_path, path)
        return path

    def sync(
        self, endpoints: Sequence[Endpoint], manifest_path: Path | None = None, *, whole: bool = False
    ) -> SyncReport:
        """Bring all engines to the trainer's weight version, verified.

        whole: send all, though adapters alone or, with `sync.delta`, changes would do. The manifest is saved to
        `manifest_path`.

        Raises `SyncError` with the tensors that differ, engine by engine, or with what failed on the way.
        """
        config, version = self.config, self.trainer.weight_version
        transport = make_transport(config, self.model_path, self.scratch / "sync_checkpoint", self.spec)
        patience_s, since = config.answer_within_s, None
        if (config.delta or self.adapter) and not whole:
            with _as_sync_error(version):
                since = asyncio.run(_common_version(endpoints, patience_s))
        contents: Contents = self.base.contents(since) if self.adapter else "weights"
        if contents == "weights and adapters" and config.shared_base and all(self.trainer.apply(reads, self.spec)):
            contents = "adapters beside a base"
        share = Share(transport, self.spec, list(endpoints), version, config.delta, since, patience_s, contents)

        def send() -> Sequence[Sent]:
            shared = contents == "adapters beside a base"
            parts = give_base(self.trainer, self.spec, endpoints, patience_s) if shared else []
            parts += self.trainer.apply(send_share, share)
            return self.base.completed(parts, self.adapter, contents) if self.adapter else parts

        self.base.version = None
        manifest, report, problems = send_and_verify(
            send,
            self.spec,
            endpoints,
            version,
            config.pause,
            patience_s,
            wakes=self.wakes,
        )
        if manifest_path is not None:
            manifest.save(manifest_path)
        if problems:
            of_base = self.base.changed(report.mismatched) if contents == "adapters" else ""
            raise SyncError(
                f"sync to weight version {version}: {report.mismatched_tensors} of {len(manifest.entries)} tensors are "
                f"not what the trainer sent: {some_of(report.mismatched)}{of_base}; generation stays paused.\n"
                "Restart the run from its last checkpoint, and if it happens again, compare the versions of sglang on "
                "both sides:\n" + "\n".join(problems[:20])
            )
        self.base.version = version
        return report


@dataclasses.dataclass(frozen=True)
class Share:
    """What each trainer rank is asked for in a sync: to send its part of `version`, served under `spec`, to engines.

    delta: keep a copy, and send only what has changed since the version that all engines hold, `since`, if there is one
    and it was the last to be sent. patience_s: for one answer of an engine. contents: what of the model it sends.
    """

    transport: Transport
    spec: QuantSpec
    endpoints: list[Endpoint]
    version: int
    delta: bool = False
    since: int | None = None
    patience_s: float = ANSWER_WITHIN_S
    contents: Contents = "weights"


def send_and_verify(
    send: Callable[[], Sequence[Sent]],
    spec: QuantSpec,
    endpoints: Sequence[Endpoint],
    version: int,
    pause: PauseMode = "retract",
    patience_s: float = ANSWER_WITHIN_S,
    wakes: bool = False,
) -> tuple[Manifest, SyncReport, list[str]]:
    """A sync: pause, send, commit, compare; generation resumes if nothing differs. Also the lines that say what does.

    send: has every rank send its share of what is served under `spec`. pause: what becomes of answers that are under
    way, see `SyncConfig.pause`. patience_s: for one answer of an engine. wakes: give sleeping engines memory for their
    weights before these come, and for the rest once they are proven.
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
        if pause != "in_place":  # whose answers need what they have cached
            await engine.flush()
        return (await engine.commit(version)).entries

    start = time.perf_counter()
    with _as_sync_error(version):
        asyncio.run(_each(endpoints, stop, patience_s))
        parts = send()
        sent = time.perf_counter()
        manifest = Manifest.merged(version, spec, parts)
        held = asyncio.run(_each(endpoints, commit, patience_s))
        problems = _differences(manifest, endpoints, held)
        if not problems:
            asyncio.run(_each(endpoints, go_on, patience_s))
        end = time.perf_counter()
    bad = set().union(*(manifest.mismatched(entries) for entries in held))
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


def send_share(trainer: Trainer, share: Share) -> Sent:
    """What each trainer rank does in a sync: quantize what it hands out, and send it to every engine."""
    table, ranks = trainer.definition.tensors, max(endpoint.ranks for endpoint in share.endpoints)
    recorder, payload = Recorder(table, ranks), 0
    weights = exported(trainer, share.contents)

    def to_send() -> Iterator[Named]:
        nonlocal payload
        # What is quantized straight into the transport's memory cannot be left out of it.
        allocate = None if share.delta else share.transport.allocate
        tensors = recorder.watch(served_tensors(weights, share.spec, trainer.definition, allocate))
        if share.delta:
            tensors = changes(trainer.last_sent, tensors, share.version, share.since, table, ranks)
        for name, tensor in tensors:
            payload += tensor.nbytes
            yield name, tensor

    async def send() -> None:
        async with _clients(share.endpoints, share.patience_s) as engines:
            await share.transport.send(to_send(), engines, share.version)

    try:
        if share.contents != "weights":
            check_frozen(trainer)
        with _as_sync_error(share.version):
            asyncio.run(send())
        return recorder.sent(payload)
    finally:
        exhaust(weights)


async def _common_version(endpoints: Sequence[Endpoint], patience_s: float) -> int | None:
    """The weight version of which all engines say that they hold it; None if there is none."""
    held = set(await _each(endpoints, lambda engine: engine.ping(), patience_s))
    version = held.pop() if len(held) == 1 else None
    return None if version is None else int(version)


async def _each(
    endpoints: Sequence[Endpoint], use: Callable[[EngineClient], Awaitable[Result]], patience_s: float
) -> list[Result]:
    """What `use` gets from each engine."""
    async with _clients(endpoints, patience_s) as engines:
        return await asyncio.gather(*(use(engine) for engine in engines))


@asynccontextmanager
async def _clients(endpoints: Sequence[Endpoint], patience_s: float) -> AsyncIterator[list[EngineClient]]:
    """A client of each engine, for the block."""
    engines = [EngineClient(endpoint, timeout_s=patience_s) for endpoint in endpoints]
    try:
        yield engines
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


@contextmanager
def _as_sync_error(version: int) -> Iterator[None]:
    try:
        yield
    except (EngineError, httpx.HTTPError, OSError) as error:
        raise SyncError(
            f"sync to weight version {version}: found {error!r} on the way, expected every engine to load and verify "
            "the weights; generation stays paused. Sync again, and replace an engine that died"
        ) from error


def _differences(manifest: Manifest, endpoints: Sequence[Endpoint], held: list[dict[str, str]]) -> list[str]:
    return [
        f"engine {endpoint.url}: {line}"
        for endpoint, entries in zip(endpoints, held, strict=True)
        for line in manifest.differences(entries)
    ]


def _write(trainer: Trainer, spec: QuantSpec, model_path: Path, path: Path) -> None:
    weights = trainer.export_weights()
    write_served_checkpoint(served_tensors(weights, spec, trainer.definition), model_path, path, spec)

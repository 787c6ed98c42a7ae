"""The bridge: the trainer's weights into the engines, and the proof that they arrived.

A sync pauses generation, streams the quantized tensors, has each engine commit them (refresh what it computes with,
take digests of its own parameters), compares the digests with the trainer's, and resumes. If anything differs, or
anything fails on the way, generation stays paused and `SyncError` says what: a mixture is never sampled from.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from torch import Tensor

from numerics.spec import QuantSpec
from rollout.client import EngineClient, PauseMode
from rollout.errors import EngineError
from rollout.types import Endpoint
from trainer.actor import TrainerGroup
from weight_sync.config import SyncConfig
from weight_sync.hf_checkpoint import write_served_checkpoint
from weight_sync.manifest import Manifest, Recorder, SyncError
from weight_sync.quantized import served_tensors
from weight_sync.transports import Transport, make_transport

if TYPE_CHECKING:
    from trainer.trainer import Trainer  # megatron is for the ranks, not for the driver


@dataclasses.dataclass(frozen=True)
class SyncReport:
    """One sync. bytes: payload to each engine. seconds: pause to resume, of which verify_seconds for the proof.

    verified_tensors: tensors whose digests were equal in every engine; mismatched_tensors: the others.
    """

    version: int
    bytes: int
    seconds: float
    send_seconds: float
    verify_seconds: float
    verified_tensors: int
    mismatched_tensors: int

    def metrics(self) -> dict[str, float]:
        """As `sync/...` metrics; seconds and bytes."""
        names = ("bytes", "seconds", "send_seconds", "verify_seconds", "verified_tensors", "mismatched_tensors")
        return {f"sync/{name}": float(getattr(self, name)) for name in names}


@dataclasses.dataclass(frozen=True)
class Bridge:
    """From one trainer to its engines.

    spec: what the engines serve. model_path: source of configuration files. scratch: directory for written checkpoints.
    """

    trainer: TrainerGroup
    spec: QuantSpec
    config: SyncConfig
    model_path: Path
    scratch: Path

    def write_checkpoint(self) -> Path:
        """The current weights as a directory that an engine can start from."""
        path = self.scratch / "served_checkpoint"
        self.trainer.apply(_write, self.spec, self.model_path, path)
        return path

    def sync(self, endpoints: Sequence[Endpoint], manifest_path: Path | None = None) -> SyncReport:
        """Bring all engines to the trainer's weight version, verified.

        The manifest is saved to `manifest_path`. Raises `SyncError` with the tensors that differ, engine by engine, or
        with what failed on the way.
        """
        transport = make_transport(self.config, self.model_path, self.scratch / "sync_checkpoint", self.spec)
        version = self.trainer.weight_version
        results = self.trainer.apply(push, transport, self.spec, list(endpoints), version, self.config.pause)
        manifest, report, problems = next(result for result in results if result is not None)
        if manifest_path is not None:
            manifest.save(manifest_path)
        if problems:
            raise SyncError(
                f"sync to weight version {version}: {report.mismatched_tensors} of {len(manifest.entries)} tensors are "
                "not what the trainer sent; generation stays paused. Restart the run from its last checkpoint, and if "
                "it happens again, compare the versions of sglang on both sides:\n" + "\n".join(problems[:20])
            )
        return report


Pushed = tuple[Manifest, SyncReport, list[str]]


def push(
    trainer: Trainer,
    transport: Transport,
    spec: QuantSpec,
    endpoints: list[Endpoint],
    version: int,
    pause: PauseMode = "retract",
) -> Pushed | None:
    """The sync as each trainer rank runs it: all take part in the export, rank 0 sends and verifies."""
    weights = trainer.export_weights()
    try:
        if trainer.layout.rank != 0:
            return None
        tensors = served_tensors(weights, spec, trainer.definition, transport.allocate)
        return asyncio.run(send_and_verify(transport, tensors, spec, endpoints, version, pause))
    finally:
        _exhaust(weights)


async def send_and_verify(
    transport: Transport,
    tensors: Iterable[tuple[str, Tensor]],
    spec: QuantSpec,
    endpoints: list[Endpoint],
    version: int,
    pause: PauseMode = "retract",
) -> Pushed:
    """Rank 0's part, on what is served under `spec`: send, commit, compare; generation resumes if nothing differs.

    pause: what becomes of answers that are under way, see `SyncConfig.pause`.
    """
    recorder = Recorder(str(version), spec.digest())
    start = time.perf_counter()
    engines = [EngineClient(endpoint) for endpoint in endpoints]
    try:
        await asyncio.gather(*(engine.pause(pause) for engine in engines))
        await transport.send(recorder.watch(tensors), engines, version)
        if pause != "in_place":  # whose answers need what they have cached
            await asyncio.gather(*(engine.flush() for engine in engines))
        sent = time.perf_counter()
        manifest = recorder.manifest()
        held = [answer.entries for answer in await asyncio.gather(*(engine.commit(version) for engine in engines))]
        problems = _differences(manifest, endpoints, held)
        bad = set().union(*(manifest.mismatched(entries) for entries in held))
        if not problems:
            await asyncio.gather(*(engine.resume() for engine in engines))
        end = time.perf_counter()
    except (EngineError, httpx.HTTPError, OSError) as error:
        raise SyncError(
            f"sync to weight version {version}: found {error!r} on the way, expected every engine to load and verify "
            "the weights; generation stays paused. Sync again, and replace an engine that died"
        ) from error
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
    report = SyncReport(
        version=version,
        bytes=recorder.bytes,
        seconds=end - start,
        send_seconds=sent - start,
        verify_seconds=end - sent,
        verified_tensors=len(manifest.entries) - len(bad & manifest.entries.keys()),
        mismatched_tensors=len(bad),
    )
    return manifest, report, problems


def _differences(manifest: Manifest, endpoints: list[Endpoint], held: list[dict[str, str]]) -> list[str]:
    return [
        f"engine {endpoint.url}: {line}"
        for endpoint, entries in zip(endpoints, held, strict=True)
        for line in manifest.differences(entries)
    ]


def _write(trainer: Trainer, spec: QuantSpec, model_path: Path, path: Path) -> None:
    weights = trainer.export_weights()
    try:
        if trainer.layout.rank == 0:
            tensors = served_tensors(weights, spec, trainer.definition)
            write_served_checkpoint(tensors, model_path, path, spec)
    finally:
        _exhaust(weights)


def _exhaust(weights: Iterator[object]) -> None:
    """Take the rest of an export: it is collective, and a rank that leaves early keeps the others waiting in it."""
    for _ in weights:
        pass

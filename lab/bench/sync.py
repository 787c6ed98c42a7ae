"""Weight sync of a model of 400 MB in BF16: verified, against sending the same tensors without any digest or check; and
how many of the served bytes a step changes."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.tensors import SCALE_SUFFIX, WHOLE
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.memory import mapped, share
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.engine.plugin.host import hold
from fp8rl.rollout.engine.plugin.lifecycle import tensor_within
from fp8rl.rollout.engine.plugin.weights import ServedWeights
from fp8rl.rollout.engine.server.client import EngineClient
from fp8rl.rollout.types import Endpoint
from fp8rl.weight_sync.bridge import SendTask, SyncReport, send_and_verify, send_shard
from fp8rl.weight_sync.buckets import Bucket, Packer, changes
from fp8rl.weight_sync.manifest import Manifest, Recorder
from fp8rl.weight_sync.served import convert_checkpoint, served_tensors
from fp8rl.weight_sync.transports.tensor import TensorTransport
from lab.bench.measure import Result, median_ratio
from lab.bench.memory import restart_peak, status
from lab.bench.trainers import EXACT, one_rank, random_batch
from tests.support.tiny_model import TinyModel, write_tiny_model

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

MODEL = TinyModel(layers=4, hidden=1024, heads=8, kv_heads=2, intermediate=1024, experts=16, top_k=2, vocab=1024)
MANY_TENSORS = TinyModel(layers=4, experts=64)
BUCKET_BYTES = 64 << 20
ROUNDS = 5
T = TypeVar("T")


def run() -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model(model, MODEL)
        measured = measure(model)
    verified, unverified, report = measured.verified, measured.unverified, measured.report
    assert report is not None
    yield Result(
        name="weight sync time, verified / unverified (400 MB in BF16)",
        value=median_ratio(verified, unverified),
        bar=1.4,
        at_least=False,
        parts={
            "verified (s)": statistics.median(verified),
            "unverified (s)": statistics.median(unverified),
            "of which commit and comparison (s)": report.verify_seconds,
            "tensors": float(report.verified_tensors),
        },
    )
    yield Result(
        name="weight sync bytes, FP8 / BF16",
        value=report.bytes / measured.bf16_bytes,
        bar=0.55,
        at_least=False,
        parts={"FP8 (MB)": report.bytes / 1e6, "BF16 (MB)": measured.bf16_bytes / 1e6},
    )
    yield Result(
        name="rate of a verified FP8 sync / of one copy of its bytes",
        value=median_ratio(measured.copies, verified),
        bar=0.3,
        at_least=True,
        parts={"copy (s)": statistics.median(measured.copies), "FP8 (MB)": report.bytes / 1e6},
    )
    yield Result(
        name="peak extra memory of a sync, in the trainer's rank / one bucket",
        value=measured.extra_bytes / BUCKET_BYTES,
        bar=2.0,
        at_least=False,
        parts={"extra (MB)": measured.extra_bytes / 1e6, "bucket (MB)": BUCKET_BYTES / 1e6},
    )


@dataclass
class Measured:
    """Seconds round by round, of verified and of unverified syncs and of one copy of the bytes that travel."""

    verified: list[float] = field(default_factory=list)
    unverified: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    report: SyncReport | None = None
    bf16_bytes: int = 0
    extra_bytes: int = 0
    """By which this process grew within a sync."""


def measure(model: Path) -> Measured:
    numerics, measured = EXACT, Measured()
    spec, transport = numerics.rollout_spec, TensorTransport(BUCKET_BYTES)
    with one_rank(model) as make, tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        trainer = make(64)
        # The engine has an event loop of its own; a sync has another.
        with serving(model, numerics, Path(folder), runner) as endpoint:
            task = SendTask(transport, spec, [endpoint], version=0)
            for index in range(ROUNDS + 1):
                start = time.perf_counter()
                asyncio.run(_send_only(trainer, transport, numerics, endpoint))
                middle = time.perf_counter()
                before = restart_peak()
                _, report, problems = send_and_verify(lambda: [send_shard(trainer, task)], spec, [endpoint], 0)
                end = time.perf_counter()
                assert not problems, problems
                measured.report, measured.extra_bytes = report, status("VmHWM") - before
                if index:  # the first round compiles
                    measured.unverified.append(middle - start)
                    measured.verified.append(end - middle)
                    source, target = (torch.ones(report.bytes, dtype=torch.uint8) for _ in range(2))
                    start = time.perf_counter()
                    target.copy_(source)
                    measured.copies.append(time.perf_counter() - start)
        measured.bf16_bytes = sum(tensor.nbytes for _, tensor in trainer.weights.share(trainer.model))
    return measured


@contextmanager
def serving(
    model: Path, numerics: NumericsConfig, folder: Path, runner: asyncio.Runner, adapter: AdapterSection | None = None
) -> Iterator[Endpoint]:
    """An engine that serves a model."""
    plugin = {"numerics": numerics.to_dict(), "adapter": adapter and adapter.model_dump(mode="json")}
    config = RolloutSection(max_total_tokens=4096, context_length=1024)
    convert_checkpoint(model, folder / "served", numerics.rollout_spec)
    engine = Engine(config, folder / "engine.log", plugin, expected_report(numerics, adapter))
    try:
        yield runner.run(engine.start(folder / "served"))
    finally:
        runner.run(engine.stop())


async def _send_only(
    trainer: Trainer, transport: TensorTransport, numerics: NumericsConfig, endpoint: Endpoint
) -> None:
    """Quantize and load, as a pipeline without proof does it: no digests, no commit."""
    weights = trainer.weights.share(trainer.model)
    async with EngineClient(endpoint) as engine:
        await engine.pause()
        tensors = served_tensors(weights, numerics.rollout_spec, trainer.definition, transport.allocate)
        await transport.send(tensors, [engine])
        await engine.resume()


def host() -> Iterator[Result]:
    """Microseconds of the host a tensor, of a sync of many small tensors: the trainer's part, then the engine's."""
    times: dict[str, list[float]] = {}
    with one_rank(MANY_TENSORS) as make:
        trainer, module, spec = make(64), nn.Module(), EXACT.rollout_spec
        hold(module, trainer.definition, spec, WHOLE)
        held = ServedWeights(spec.weight, module, trainer.definition, "0")
        for index in range(2 + ROUNDS):  # the first two compile
            for name, seconds in _one_by_one(trainer, held, index).items():
                times.setdefault(name, []).append(seconds)
        count = len(held.manifest())
    parts = {name: 1e6 * statistics.median(seconds[2:]) / count for name, seconds in times.items()}
    yield Result(
        name="host's time of a sync on a CPU (us a tensor, many small ones)",
        value=sum(parts.values()),
        bar=120,
        at_least=False,
        parts={"tensors": float(count), **parts},
    )


def _one_by_one(trainer: Trainer, held: ServedWeights, version: int) -> dict[str, float]:
    """Seconds of this process, of each part of a sync in which no part waits for another."""
    spec, definition, recorder = EXACT.rollout_spec, trainer.definition, Recorder(trainer.definition.tensors)
    seconds: dict[str, float] = {}

    def timed(name: str, part: Callable[[], T]) -> T:
        start = time.process_time()
        made = part()
        seconds[name] = time.process_time() - start
        return made

    packer = Packer(BUCKET_BYTES, partial(share, "bucket"), loading=BUCKET_BYTES)  # each bucket keeps its memory
    weights = timed("export", lambda: list(trainer.weights.share(trainer.model, stacked=True)))
    served = timed("quantize", lambda: list(served_tensors(iter(weights), spec, definition, packer.allocate)))
    timed("digest", lambda: list(recorder.watch(iter(served))))
    buckets = timed("pack", lambda: list(packer.pack(served)))
    held.invalidate()
    sent = timed("unpack", lambda: [pair for bucket in buckets for pair in _unpacked(bucket)])
    timed("load", lambda: held.load(lambda unknown: None, sent))
    timed("operands and digests", held.prepare)
    entries = timed("commit", lambda: held.commit(str(version)))
    manifest = timed("compare", lambda: Manifest.merged(version, spec, [recorder.sent()]))
    assert not manifest.differences(entries)
    return seconds


def _unpacked(bucket: Bucket) -> list[tuple[str, Tensor]]:
    """Return what an engine finds in the message of a bucket."""
    message = json.dumps(bucket.entries)
    flat = mapped(bucket.memory.address())
    return [tensor_within(flat, *tensor) for tensor in json.loads(message)]


def churn() -> Iterator[Result]:
    """The share of served bytes that a step changes, by learning rate, which is what is left to send of a full sync.

    Adam moves each weight by about the learning rate, so the churn grows with it, and falls with the size of the
    weights.
    """
    with one_rank() as make:
        for rate in (1e-6, 1e-5, 1e-4):
            yield _churn(make(64, lr=rate, warmup_steps=0), rate)


def _churn(trainer: Trainer, rate: float, steps: int = 4) -> Result:
    shares: list[float] = []
    changed: dict[str, list[float]] = {"codes": [], "scales": [], "BF16 values": []}
    former: dict[str, Tensor] = {}
    for step in range(steps + 1):
        batch = random_batch(32, 64, seed=step)
        trainer.train_step(batch, SftObjective.of(batch))
        tensors = served_tensors(trainer.weights.share(trainer.model), EXACT.rollout_spec, trainer.definition)
        served = {name: tensor.clone() for name, tensor in tensors}
        deltas = changes(trainer.last_sent, served.items(), step, step - 1, trainer.definition.tensors, ranks=1)
        sent = sum(tensor.nbytes for _, tensor in deltas)
        if step:
            shares.append(sent / sum(tensor.nbytes for tensor in served.values()))
            for kind, fraction in _fractions(served, former).items():
                changed[kind].append(fraction)
        former = served
    return Result(
        name=f"delta bytes / full FP8 bytes at lr {rate:g}",
        value=statistics.median(shares),
        bar=0.2 if rate == 1e-6 else 1.0,
        at_least=False,
        parts={f"changed {kind}": statistics.median(values) for kind, values in changed.items()},
    )


def _fractions(new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, float]:
    """The fraction of each kind's elements that differ."""
    differing: dict[str, int] = {}
    total: dict[str, int] = {}
    for name, tensor in new.items():
        scales, codes = name.endswith(SCALE_SUFFIX), tensor.dtype.itemsize == 1
        kind = "scales" if scales else "codes" if codes else "BF16 values"
        differing[kind] = differing.get(kind, 0) + int((tensor.float() != old[name].float()).sum())
        total[kind] = total.get(kind, 0) + tensor.numel()
    return {kind: differing[kind] / total[kind] for kind in total}

"""Weight sync of a model of 400 MB in BF16: verified, against sending the same tensors without any digest or check."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8rl.models.tiny import TinyModel, write_tiny_model
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.server.client import EngineClient
from fp8rl.rollout.types import Endpoint
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.weight_sync.bridge import Share, SyncReport, send_and_verify, send_share
from fp8rl.weight_sync.served import convert_checkpoint, served_tensors
from fp8rl.weight_sync.transports.tensor import TensorTransport
from lab.bench.measure import Result, median_ratio

if TYPE_CHECKING:
    from fp8rl.trainer.trainer import Trainer

MODEL = TinyModel(layers=4, hidden=1024, heads=8, kv_heads=2, intermediate=1024, experts=16, top_k=2, vocab=1024)
BUCKET_BYTES = 64 << 20
ROUNDS = 5


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model(model, MODEL)
        measured = measure(model)
    verified, unverified, report = measured.verified, measured.unverified, measured.report
    assert report is not None
    return [
        Result(
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
        ),
        Result(
            name="weight sync bytes, FP8 / BF16",
            value=report.bytes / measured.bf16_bytes,
            bar=0.55,
            at_least=False,
            parts={"FP8 (MB)": report.bytes / 1e6, "BF16 (MB)": measured.bf16_bytes / 1e6},
        ),
        Result(
            name="rate of a verified FP8 sync / of one copy of its bytes",
            value=median_ratio(measured.copies, verified),
            bar=0.3,
            at_least=True,
            parts={"copy (s)": statistics.median(measured.copies), "FP8 (MB)": report.bytes / 1e6},
        ),
        Result(
            name="peak extra memory of a sync, in the trainer's rank / one bucket",
            value=measured.extra_bytes / BUCKET_BYTES,
            bar=2.0,
            at_least=False,
            parts={"extra (MB)": measured.extra_bytes / 1e6, "bucket (MB)": BUCKET_BYTES / 1e6},
        ),
    ]


@dataclass
class Measured:
    """Seconds round by round, of verified and of unverified syncs and of one copy of the bytes that travel.

    bf16_bytes: of the weights. extra_bytes: by which this process grew within a sync.
    """

    verified: list[float] = field(default_factory=list)
    unverified: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    report: SyncReport | None = None
    bf16_bytes: int = 0
    extra_bytes: int = 0


def measure(model: Path) -> Measured:
    enable_compiler()
    config = TrainerSection()
    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
    layout = parallel.initialize(config)
    from fp8rl.trainer.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder) / "served"
        trainer = Trainer(model, config, numerics, layout, seed=0, total_steps=1, max_sequence_length=64)
        convert_checkpoint(model, served, numerics.rollout_spec)
        measured = _measure(trainer, numerics, served, Path(folder))
        measured.bf16_bytes = sum(tensor.nbytes for _, tensor in trainer.export_weights())
    parallel.shutdown()
    return measured


def _measure(trainer: Trainer, numerics: NumericsConfig, served: Path, folder: Path) -> Measured:
    engine = Engine(
        RolloutSection(max_total_tokens=4096, context_length=1024),
        folder / "engine.log",
        {"numerics": numerics.to_dict()},
        expected_report(numerics),
    )
    runner = asyncio.Runner()  # the engine's event loop; a sync has its own
    endpoint = runner.run(engine.start(served))
    transport, spec = TensorTransport(BUCKET_BYTES), numerics.rollout_spec
    share = Share(transport, spec, [endpoint], version=0)
    measured = Measured()
    try:
        for index in range(ROUNDS + 1):
            start = time.perf_counter()
            asyncio.run(_send_only(trainer, transport, numerics, endpoint))
            middle = time.perf_counter()
            before = _restart_peak()
            _, report, problems = send_and_verify(lambda: [send_share(trainer, share)], spec, [endpoint], 0)
            end = time.perf_counter()
            assert not problems, problems
            measured.report, measured.extra_bytes = report, _peak() - before
            if index:  # the first round compiles
                measured.unverified.append(middle - start)
                measured.verified.append(end - middle)
                measured.copies.append(_copy_seconds(report.bytes))
    finally:
        runner.run(engine.stop())
        runner.close()
    return measured


def _copy_seconds(size: int) -> float:
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    start = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start


def _restart_peak() -> int:
    """The bytes that this process has in memory, which its peak is counted from again."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


async def _send_only(
    trainer: Trainer, transport: TensorTransport, numerics: NumericsConfig, endpoint: Endpoint
) -> None:
    """Quantize and load, as a pipeline without proof does it: no digests, no commit."""
    async with EngineClient(endpoint) as engine:
        await engine.pause()
        await transport.send(_served(trainer, transport, numerics), [engine], 0)
        await engine.resume()


def _served(trainer: Trainer, transport: TensorTransport, numerics: NumericsConfig) -> Iterator[tuple[str, Tensor]]:
    return served_tensors(trainer.export_weights(), numerics.rollout_spec, trainer.definition, transport.allocate)

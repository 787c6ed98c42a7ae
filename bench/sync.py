"""Weight sync of a model of 400 MB in BF16: verified, against sending the same tensors without any digest or check."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from bench.measure import Result, median_ratio
from examples.tiny_model import TinyModel, write_tiny_model
from numerics.compiler import enable_compiler
from numerics.config import NumericsConfig
from numerics.spec import QuantSpec
from rl.run.engines import expected_report
from rollout.client import EngineClient
from rollout.config import RolloutConfig
from rollout.engine import Engine
from rollout.types import Endpoint
from trainer import parallel
from trainer.config import TrainerConfig
from weight_sync.bridge import Share, SyncReport, send_and_verify, send_share
from weight_sync.hf_checkpoint import convert_checkpoint
from weight_sync.quantized import served_tensors
from weight_sync.transports.tensor import TensorTransport

if TYPE_CHECKING:
    from trainer.trainer import Trainer

MODEL = TinyModel(layers=4, hidden=1024, heads=8, kv_heads=2, intermediate=1024, experts=16, top_k=2, vocab=1024)
BUCKET_BYTES = 64 << 20
ROUNDS = 5


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model(model, MODEL)
        verified, unverified, report, bf16_bytes = measure(model)
    return [
        Result(
            name="weight sync time, verified / unverified (400 MB in BF16)",
            value=median_ratio(verified, unverified),
            bar=1.5,
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
            value=report.bytes / bf16_bytes,
            bar=0.55,
            at_least=False,
            parts={"FP8 (MB)": report.bytes / 1e6, "BF16 (MB)": bf16_bytes / 1e6},
        ),
    ]


def measure(model: Path) -> tuple[list[float], list[float], SyncReport, int]:
    """Seconds of verified and of unverified syncs of a model, round by round; one report; bytes of the BF16 weights."""
    enable_compiler()
    config = TrainerConfig()
    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
    layout = parallel.initialize(config)
    from trainer.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder) / "served"
        trainer = Trainer(model, config, numerics, layout, seed=0, total_steps=1, max_sequence_length=64)
        convert_checkpoint(model, served, numerics.rollout_spec)
        verified, unverified, report = _measure(trainer, numerics, served, Path(folder))
        bf16_bytes = sum(tensor.nbytes for _, tensor in trainer.export_weights())
    parallel.shutdown()
    return verified, unverified, report, bf16_bytes


def _measure(
    trainer: Trainer, numerics: NumericsConfig, served: Path, folder: Path
) -> tuple[list[float], list[float], SyncReport]:
    engine = Engine(
        RolloutConfig(max_total_tokens=4096, context_length=1024),
        folder / "engine.log",
        {"numerics": numerics.to_dict()},
        expected_report(numerics),
    )
    endpoint = asyncio.run(engine.start(served))
    transport, spec = TensorTransport(BUCKET_BYTES), numerics.rollout_spec
    verified, unverified = [], []
    try:
        for index in range(ROUNDS + 1):
            start = time.perf_counter()
            asyncio.run(_send_only(trainer, transport, numerics, endpoint))
            middle = time.perf_counter()
            _, report, problems = send_and_verify(
                lambda: [send_share(trainer, Share(transport, spec, [endpoint], 0))], spec, [endpoint], 0
            )
            end = time.perf_counter()
            assert not problems, problems
            if index:  # the first round compiles
                unverified.append(middle - start)
                verified.append(end - middle)
    finally:
        asyncio.run(engine.stop())
    return verified, unverified, report


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

"""Adapters beside the weights: bytes of a sync of them alone, rollout throughput and the time of a step with them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp8rl.models.adapters import AdapterSection
from fp8rl.weight_sync.bridge import SendTask, SyncReport, send_and_verify, send_shard
from fp8rl.weight_sync.frozen import Contents, FrozenBase
from fp8rl.weight_sync.manifest import ShardDigests
from fp8rl.weight_sync.transports.tensor import TensorTransport
from lab.bench.engines import adapters as rollout
from lab.bench.measure import Result, median_ratio
from lab.bench.sync import BUCKET_BYTES, MODEL, serving
from lab.bench.trainers import EXACT, SHAPE, medians, one_rank, random_batch, step_seconds
from tests.support.tiny_model import write_tiny_model

ADAPTER = AdapterSection(rank=8, alpha=16.0)


def run() -> Iterator[Result]:
    whole, alone = _syncs()
    base_bytes = whole.bytes - alone.bytes
    yield Result(
        name="bytes of a sync, adapters of rank 8 alone / all weights in FP8",
        value=alone.bytes / base_bytes,
        bar=0.05,
        at_least=False,
        parts={
            "adapters (MB)": alone.bytes / 1e6,
            "weights in FP8 (MB)": base_bytes / 1e6,
            "rank of as many bytes": ADAPTER.rank * base_bytes / alone.bytes,
            "adapters alone (s)": alone.seconds,
            "of which commit and comparison, with all of the base digested (s)": alone.verify_seconds,
            "adapters and weights (s)": whole.seconds,
        },
    )
    yield rollout(ADAPTER)
    with one_rank() as trainer:
        times = step_seconds({"adapters": trainer(adapter=ADAPTER), "all weights": trainer()}, random_batch())
    yield Result(
        name=f"train step time, adapters of rank 8 / all weights ({SHAPE})",
        value=median_ratio(times["adapters"], times["all weights"]),
        bar=1.1,
        at_least=False,
        parts=medians(times),
    )


def _syncs() -> tuple[SyncReport, SyncReport]:
    """A sync of everything, and one of adapters alone."""
    spec = EXACT.rollout_spec
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        write_tiny_model(model := Path(folder) / "model", MODEL)
        with one_rank(model) as make, serving(model, EXACT, Path(folder), runner, ADAPTER) as endpoint:
            trainer, held = make(64, adapter=ADAPTER), FrozenBase()

            def sync(contents: Contents) -> SyncReport:
                task = SendTask(TensorTransport(BUCKET_BYTES), spec, [endpoint], 0, contents=contents)

                def send() -> list[ShardDigests]:
                    return held.completed([send_shard(trainer, task)], ADAPTER, contents)

                _, report, problems = send_and_verify(send, spec, [endpoint], 0)
                assert not problems, problems
                return report

            sync("weights and adapters")  # compiles
            sync("adapters")
            return sync("weights and adapters"), sync("adapters")

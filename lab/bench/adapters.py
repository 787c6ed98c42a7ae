"""Adapters beside the weights: bytes of a sync of them alone, rollout throughput and the time of a step with them."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fp8rl.models.adapters import AdapterSection
from fp8rl.models.tiny import write_tiny_model
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.data.sources import Source, load_problems
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.types import Prompt, SamplingParams, prompt_ids
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.weight_sync.bridge import Share, SyncReport, send_and_verify, send_share
from fp8rl.weight_sync.frozen import Contents, HeldBase
from fp8rl.weight_sync.manifest import Sent
from fp8rl.weight_sync.served import convert_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport
from lab.bench.batch import random_batch
from lab.bench.measure import Result, interleaved, median_ratio
from lab.bench.rollout import GROUP, NEW_TOKENS, PROBLEMS, PROMPTS
from lab.bench.rollout import MODEL as DEMO
from lab.bench.sync import BUCKET_BYTES, MODEL
from lab.bench.train import MODEL as TRAINED
from lab.bench.train import ROWS, WIDTH

ADAPTER = AdapterSection(rank=8, alpha=16.0)
NUMERICS = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
ROUNDS, WARMUP, STEPS = 8, 2, 5


def run() -> list[Result]:
    whole, alone = _syncs()
    times, rates = _steps(), asyncio.run(_rates())
    base_bytes = whole.bytes - alone.bytes
    return [
        Result(
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
        ),
        Result(
            name=f"rollout tokens/s, with adapters of rank 8 / without ({PROMPTS} x {GROUP} answers)",
            value=median_ratio(rates["with adapters"], rates["without"]),
            bar=0.85,
            at_least=True,
            parts={f"{name} (tokens/s)": statistics.median(values) for name, values in rates.items()},
        ),
        Result(
            name="train step time, adapters of rank 8 / all weights (hidden 512, 4 layers, 8,192 tokens)",
            value=median_ratio(times["adapters"], times["all weights"]),
            bar=1.1,
            at_least=False,
            parts={f"{name} (s)": statistics.median(values) for name, values in times.items()},
        ),
    ]


def _syncs() -> tuple[SyncReport, SyncReport]:
    """A sync of everything, and one of adapters alone."""
    enable_compiler()
    layout = parallel.initialize(TrainerSection())
    from fp8rl.trainer.trainer import Trainer

    runner, spec = asyncio.Runner(), NUMERICS.rollout_spec
    with tempfile.TemporaryDirectory() as folder:
        model, served = Path(folder) / "model", Path(folder) / "served"
        write_tiny_model(model, MODEL)
        convert_checkpoint(model, served, spec)
        trainer = Trainer(
            model, TrainerSection(), NUMERICS, layout, seed=0, total_steps=1, max_sequence_length=64, adapter=ADAPTER
        )
        engine = _engine(Path(folder), RolloutSection(max_total_tokens=4096), ADAPTER)
        endpoint, held = runner.run(engine.start(served)), HeldBase()

        def sync(contents: Contents) -> SyncReport:
            share = Share(TensorTransport(BUCKET_BYTES), spec, [endpoint], 0, contents=contents)

            def send() -> list[Sent]:
                return held.completed([send_share(trainer, share)], ADAPTER, contents)

            _, report, problems = send_and_verify(send, spec, [endpoint], 0)
            assert not problems, problems
            return report

        try:
            sync("weights and adapters")  # compiles
            sync("adapters")
            return sync("weights and adapters"), sync("adapters")
        finally:
            runner.run(engine.stop())
            runner.close()
            parallel.shutdown()


def _steps() -> dict[str, list[float]]:
    """Seconds of a step that trains adapters, and of one that trains all weights."""
    config = TrainerSection(micro_batch_tokens=4096)
    layout = parallel.initialize(config)
    from fp8rl.trainer.trainer import Trainer

    batch = random_batch(ROWS, WIDTH, TRAINED.vocab)
    objective = SftObjective.of(batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_tiny_model(path, TRAINED)
        options: dict[str, Any] = {"seed": 0, "total_steps": 100, "max_sequence_length": WIDTH}
        adapters = Trainer(path, config, NUMERICS, layout, adapter=ADAPTER, **options)
        whole = Trainer(path, config, NUMERICS, layout, **options)
        sides = {"adapters": adapters, "all weights": whole}
        steps = {name: partial(side.train_step, batch, objective) for name, side in sides.items()}
        times = interleaved(steps, STEPS, warmup=2)
    parallel.shutdown()
    return times


async def _rates() -> dict[str, list[float]]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts = [Prompt(p, prompt_ids(tokenizer, p)) for p in load_problems(Source(PROBLEMS))]
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=(tokenizer.eos_token_id,))
    sides = {"with adapters": ADAPTER, "without": None}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder) / "served"
        convert_checkpoint(DEMO, served, NUMERICS.rollout_spec)
        engines = {name: _engine(Path(folder), RolloutSection(), adapter) for name, adapter in sides.items()}
        try:
            for engine in engines.values():
                await engine.start(served)
            for index in range(WARMUP + ROUNDS):
                chosen = prompts[index * PROMPTS : (index + 1) * PROMPTS]
                for name, engine in engines.items():
                    await engine.flush()
                    start = time.perf_counter()
                    answers = await engine.generate(to_groups(chosen, GROUP, run_seed=0, step=index), sampling)
                    if index >= WARMUP:
                        tokens = sum(len(answer.token_ids) for answer in answers)
                        rates[name].append(tokens / (time.perf_counter() - start))
        finally:
            for engine in engines.values():
                await engine.stop()
    return rates


def _engine(folder: Path, config: RolloutSection, adapter: AdapterSection | None) -> Engine:
    plugin = {"numerics": NUMERICS.to_dict(), "adapter": adapter and adapter.model_dump(mode="json")}
    log = folder / f"engine_{'without' if adapter is None else 'with'}.log"
    return Engine(config, log, plugin, expected_report(NUMERICS, adapter))

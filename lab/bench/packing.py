"""What padding takes of a pass and of a step: rows padded to the longest of their micro-batch, or end to end."""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fp8rl.models.tiny import TinyModel, write_tiny_model
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.step.batch import TokenBatch
from fp8rl.trainer.step.microbatches import plan, plan_packed
from lab.bench.measure import Result, interleaved, median_ratio

MODEL = TinyModel(layers=4, hidden=512, heads=4, kv_heads=2, intermediate=512, experts=8, top_k=2, vocab=1024)
DEMO = Path(__file__).with_name("demo_lengths.json")
"""Tokens of each row, prompt included, in some steps of `examples/arithmetic.yaml`."""
MEDIAN, LONGEST, LONG_TAILED = 64, 512, 96
"""The long-tailed rows: log-normal lengths (sigma 1)."""
BUDGET, ROUNDS = 4096, 5


def run() -> Iterator[Result]:
    enable_compiler()
    layout = parallel.initialize(TrainerSection())
    rng = random.Random(0)
    drawn = [min(LONGEST, max(2, round(MEDIAN * math.exp(rng.gauss(0, 1))))) for _ in range(LONG_TAILED)]
    yield _measured(layout, "lengths of the demo", json.loads(DEMO.read_text()), 1.05)
    yield _measured(layout, f"log-normal lengths, {MEDIAN} in the median", [drawn], 0.95)
    parallel.shutdown()


def _measured(layout: Layout, name: str, steps: list[list[int]], bar: float) -> Result:
    """The step time of the last of these steps, and the padding of all."""
    batch = _batch(steps[-1])
    objective = SftObjective.of(batch)
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(path := Path(folder) / "model", MODEL)
        trainers = {packing: _trainer(path, layout, batch.width, packing) for packing in (False, True)}
        sides = {
            str(packing): lambda each=each: each.train_step(batch, objective) for packing, each in trainers.items()
        }
        times = interleaved(sides, ROUNDS, warmup=2)
    tokens = sum(map(sum, steps))
    padded = sum(_padded(lengths) for lengths in steps)
    counts = [sum(len(assign(lengths, 1, BUDGET)[0]) for lengths in steps) for assign in (plan, plan_packed)]
    return Result(
        name=f"train step time, rows end to end / padded ({name}; hidden 512, 4 layers, {sum(steps[-1]):,} tokens)",
        value=median_ratio(times["True"], times["False"]),
        bar=bar,
        at_least=False,
        parts={
            "end to end (s)": statistics.median(times["True"]),
            "padded (s)": statistics.median(times["False"]),
            "padding of sorted rows (%)": 100 * (1 - tokens / padded),
            "micro-batches, padded": counts[0],
            "micro-batches, end to end": counts[1],
        },
    )


def _padded(lengths: list[int]) -> int:
    """Tokens of a step's micro-batches with their padding."""
    return sum(len(rows) * max(lengths[row] for row in rows) for rows in plan(lengths, 1, BUDGET)[0])


def _batch(lengths: list[int]) -> TokenBatch:
    rows, width = len(lengths), max(lengths)
    tokens = torch.randint(6, MODEL.vocab, (rows, width), generator=torch.Generator().manual_seed(0))
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    real[:, 0] = False  # a first token is no target
    return TokenBatch(tokens, torch.tensor(lengths), real)


def _trainer(path: Path, layout: Layout, width: int, packing: bool) -> Any:
    from fp8rl.trainer.trainer import Trainer

    config = TrainerSection(micro_batch_tokens=BUDGET, packing=packing)
    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
    return Trainer(path, config, numerics, layout, seed=0, total_steps=100, max_sequence_length=width)

"""Train step time: FP8 forward and backward against BF16 and against native FP8, hidden 512, one process, warm."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from fp8rl.models.tiny import TinyModel, write_tiny_model
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.config import Mode, NumericsConfig, TrainerPrecision
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.algorithms.sft import SftObjective
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed import parallel
from lab.bench.batch import random_batch
from lab.bench.measure import Result, interleaved, median_ratio

MODEL = TinyModel(layers=4, hidden=512, heads=4, kv_heads=2, intermediate=512, experts=8, top_k=2, vocab=1024)
ROWS, WIDTH, ROUNDS = 64, 128, 5


def run() -> list[Result]:
    enable_compiler()
    config = TrainerSection(micro_batch_tokens=4096)
    layout = parallel.initialize(config)
    from fp8rl.trainer.trainer import Trainer

    batch = random_batch(ROWS, WIDTH, MODEL.vocab)
    objective = SftObjective.of(batch)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_tiny_model(path, MODEL)

        def trainer(precision: TrainerPrecision, mode: Mode = "exact") -> Trainer:
            numerics = NumericsConfig(mode=mode, spec=QuantSpec.preset("fp8_block_pow2"), trainer=precision)
            return Trainer(path, config, numerics, layout, seed=0, total_steps=100, max_sequence_length=WIDTH)

        bf16, fp8, native = trainer("bf16"), trainer("fp8"), trainer("fp8", "native")
        times = interleaved(
            {
                "bf16": lambda: bf16.train_step(batch, objective),
                "fp8": lambda: fp8.train_step(batch, objective),
                "native": lambda: native.train_step(batch, objective),
            },
            ROUNDS,
            warmup=2,
        )
    parallel.shutdown()
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return [
        Result(
            name="train step time, FP8 / BF16 (hidden 512, 4 layers, 8,192 tokens)",
            value=median_ratio(times["fp8"], times["bf16"]),
            bar=1.3,
            at_least=False,
            parts={"BF16 step (s)": seconds["bf16"], "FP8 step (s)": seconds["fp8"]},
        ),
        Result(
            name="train tokens/s, exact FP8 / native FP8 (hidden 512, 4 layers, 8,192 tokens)",
            value=median_ratio(times["native"], times["fp8"]),
            bar=0.8,
            at_least=True,
            parts={"exact step (s)": seconds["fp8"], "native step (s)": seconds["native"]},
        ),
    ]

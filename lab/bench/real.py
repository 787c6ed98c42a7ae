"""Exact FP8 against BF16 with the pretrained model that `examples/smollm2.py` makes: tokens per second of engines, and
CPU seconds of a train step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial

from fp8rl.rl.algorithms.sft import SftObjective
from lab.bench.engines import FP8, GROUP, NEW_TOKENS, SIDES, STOCK, Turns, in_turns, serving
from lab.bench.measure import Result, interleaved, median_ratio
from lab.bench.runs import EXAMPLES
from lab.bench.trainers import EXACT, medians, numerics_of, one_rank, random_batch

MODEL, NAME = EXAMPLES / "models/smollm2_135m", "SmolLM2-135M"
PROMPTS, ROUNDS = 4, 3
ROWS, WIDTH, VOCAB = 16, 64, 49152


def rollout() -> Iterator[Result]:
    """The shared ops in FP8 against stock SGLang in BF16, on the same prompts."""

    async def measured() -> Turns:
        async with serving(MODEL, {side: SIDES[side] for side in (STOCK, FP8)}) as engines:
            return await in_turns(engines, MODEL, PROMPTS, 1.0, ROUNDS, warmup=1)

    shape = f"{NAME}, {PROMPTS} x {GROUP} answers of up to {NEW_TOKENS} tokens"
    yield asyncio.run(measured()).ratio(f"rollout tokens/s, exact FP8 / {STOCK} ({shape})", FP8, STOCK, 0.8)


def train() -> Iterator[Result]:
    """Two trainers in this process take turns at the same rows."""
    batch = random_batch(ROWS, WIDTH, VOCAB)
    objective = SftObjective.of(batch)
    with one_rank(MODEL) as trainer:
        sides = {"BF16 step": numerics_of("bf16"), "FP8 step": EXACT}
        made = {side: trainer(WIDTH, numerics=numerics) for side, numerics in sides.items()}
        steps = {side: partial(each.train_step, batch, objective) for side, each in made.items()}
        times = interleaved(steps, ROUNDS, clock=time.process_time)
    yield Result(
        name=f"CPU time of a train step, FP8 / BF16 ({NAME}, {ROWS * WIDTH:,} tokens)",
        value=median_ratio(times["FP8 step"], times["BF16 step"]),
        bar=1.25,
        at_least=False,
        parts=medians(times),
    )

"""Rollout throughput at the demo's shape: the shared ops in FP8 and BF16, SGLang's own in FP8, and stock SGLang."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer

from fp8rl.numerics.config import Mode, NumericsConfig, RolloutPrecision
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.data.sources import Source, load_problems
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.types import Prompt, SamplingParams, prompt_ids
from fp8rl.weight_sync.served import convert_checkpoint
from lab.bench.measure import Result, median_ratio

MODEL = Path("examples/models/tiny_qwen3_moe")
PROBLEMS = Path("examples/data/arithmetic_train.jsonl")
PROMPTS, GROUP, NEW_TOKENS, ROUNDS, WARMUP = 32, 8, 20, 8, 2
Side = tuple[Mode, RolloutPrecision] | None
"""What an engine computes; None is SGLang without our plugin."""
STOCK, BF16, FP8, NATIVE = "stock SGLang BF16", "exact BF16", "exact FP8", "native FP8"


def run() -> list[Result]:
    sides: dict[str, Side] = {STOCK: None, BF16: ("exact", "bf16"), FP8: ("exact", "fp8"), NATIVE: ("native", "fp8")}
    rates = asyncio.run(measure(MODEL, sides))
    parts = {f"{name} (tokens/s)": statistics.median(values) for name, values in rates.items()}
    shape = f"{PROMPTS} x {GROUP} answers"
    return [
        Result(
            name=f"rollout tokens/s, exact FP8 / stock SGLang BF16 ({shape})",
            value=median_ratio(rates[FP8], rates[STOCK]),
            bar=0.6,
            at_least=True,
            parts=parts,
        ),
        Result(
            name=f"rollout tokens/s, exact FP8 / exact BF16 ({shape})",
            value=median_ratio(rates[FP8], rates[BF16]),
            bar=0.8,
            at_least=True,
            parts=parts,
        ),
        Result(
            name=f"rollout tokens/s, exact FP8 / native FP8 ({shape})",
            value=median_ratio(rates[FP8], rates[NATIVE]),
            bar=0.8,
            at_least=True,
            parts=parts,
        ),
    ]


async def measure(model: Path, sides: Mapping[str, Side]) -> dict[str, list[float]]:
    """Tokens per second of an engine for each side, which take turns, in every round."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [Prompt(p, prompt_ids(tokenizer, p)) for p in load_problems(Source(PROBLEMS))]
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=(tokenizer.eos_token_id,))
    rates: dict[str, list[float]] = {name: [] for name in sides}
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, side in sides.items():
                engines[name] = await _engine(model, Path(folder), name, side)
            for index in range(WARMUP + ROUNDS):
                chosen = prompts[index * PROMPTS : (index + 1) * PROMPTS]
                for name, engine in engines.items():
                    await engine.flush()
                    start = time.perf_counter()
                    answers = await engine.generate(to_groups(chosen, GROUP, run_seed=0, step=index), sampling)
                    seconds = time.perf_counter() - start
                    if index >= WARMUP:
                        rates[name].append(sum(len(answer.token_ids) for answer in answers) / seconds)
        finally:
            for engine in engines.values():
                await engine.stop()
    return rates


async def _engine(model: Path, folder: Path, name: str, side: Side) -> Engine:
    mode, precision = side or ("exact", "bf16")
    numerics = NumericsConfig(mode=mode, spec=QuantSpec.preset("fp8_block_pow2"), trainer="bf16", rollout=precision)
    checkpoint = folder / name.replace(" ", "_")
    convert_checkpoint(model, checkpoint, numerics.rollout_spec)
    engine = Engine(
        RolloutSection(),
        folder / f"{checkpoint.name}.log",
        {"numerics": numerics.to_dict()} if side else None,
        expected_report(numerics) if side else None,
    )
    await engine.start(checkpoint)
    return engine

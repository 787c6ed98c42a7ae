"""Engines that take turns on the same prompts: tokens per second of each, at the demo's shape and others'."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

from fp8rl.models.adapters import AdapterSection
from fp8rl.numerics.config import KVPrecision, Mode, NumericsConfig, RolloutPrecision
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.tasks.data import Source, load_problems
from fp8rl.rollout.types import Prompt, SamplingParams, Trajectory, prompt_ids
from fp8rl.weight_sync.served import convert_checkpoint
from lab.bench.measure import DEMO, Result, median_ratio

PROBLEMS = Path("examples/data/arithmetic_train.jsonl")
PROMPTS, GROUP, NEW_TOKENS, ROUNDS, WARMUP = 32, 8, 20, 8, 2
SHAPE = f"{PROMPTS} x {GROUP} answers"


@dataclass(frozen=True)
class Side:
    """The numerics of an engine, and its plugin."""

    mode: Mode = "exact"
    precision: RolloutPrecision = "fp8"
    kv: KVPrecision = "bf16"
    plugin: bool = True
    """False: stock SGLang."""
    adapter: AdapterSection | None = None


@dataclass
class Turns:
    """Tokens per second of each side in every round, and all that they answered."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[str, list[Trajectory]] = field(default_factory=dict)
    counted: dict[str, list[Trajectory]] = field(default_factory=dict)
    """The answers after the warm-up."""

    @property
    def parts(self) -> dict[str, float]:
        return {f"{name} (tokens/s)": statistics.median(values) for name, values in self.rates.items()}

    def ratio(self, what: str, over: str, under: str, bar: float) -> Result:
        return Result(what, median_ratio(self.rates[over], self.rates[under]), bar, at_least=True, parts=self.parts)


STOCK, BF16, FP8, NATIVE = "stock SGLang BF16", "exact BF16", "exact FP8", "native FP8"
SIDES = {
    STOCK: Side(precision="bf16", plugin=False),
    BF16: Side(precision="bf16"),
    FP8: Side(),
    NATIVE: Side(mode="native"),
}
ABSORBED = "SGLang's own ops in BF16, told to absorb latents"
"""Stock SGLang stops at latent attention on a CPU: its attention there takes latents for keys of heads."""
OWN = {
    "glm": (STOCK, SIDES[STOCK]),
    "deepseek": (ABSORBED, Side(mode="native", precision="bf16")),
    "qwen3_next": (NATIVE, SIDES[NATIVE]),  # stock SGLang has kernels of linear attention for CPUs with AMX alone
}


def rollout() -> Iterator[Result]:
    """The shared ops in FP8 and BF16, SGLang's own in FP8, and stock SGLang."""
    found = asyncio.run(measure(DEMO, SIDES))
    for under, bar in ((STOCK, 0.6), (BF16, 0.8), (NATIVE, 0.8)):
        yield found.ratio(f"rollout tokens/s, exact FP8 / {under} ({SHAPE})", FP8, under, bar)


def kv() -> Iterator[Result]:
    """FP8 keys and values against BF16 ones."""
    yield from asyncio.run(_kv())


async def _kv() -> list[Result]:
    coded, plain = "FP8 keys and values", "BF16 keys and values"
    async with serving(DEMO, {coded: Side(kv="fp8"), plain: Side()}) as engines:
        found = await in_turns(engines, DEMO, PROMPTS, 1.0, ROUNDS, WARMUP)
        held = {name: float((await engine.memory())[0].kv_cache) for name, engine in engines.items()}
    size = Result(
        name="bytes of the cache by SGLang's own count, FP8 / BF16 keys and values",
        value=held[coded] / held[plain],
        bar=0.53,
        at_least=False,
        parts={f"{name} (MB)": each / 1e6 for name, each in held.items()},
    )
    return [size, found.ratio(f"rollout tokens/s, FP8 / BF16 keys and values ({SHAPE})", coded, plain, 0.9)]


def families() -> Iterator[Result]:
    """Other architectures: the shared ops in FP8 against SGLang's own."""
    for family, (own, side) in OWN.items():
        found = asyncio.run(measure(Path(f"examples/models/tiny_{family}"), {own: side, FP8: Side()}))
        yield found.ratio(f"rollout tokens/s, {family}: exact FP8 / {own} ({SHAPE})", FP8, own, 0.8)


def adapters(adapter: AdapterSection) -> Result:
    sides = {"with adapters": Side(adapter=adapter), "without": Side()}
    what = f"rollout tokens/s, with adapters of rank {adapter.rank} / without ({SHAPE})"
    return asyncio.run(measure(DEMO, sides)).ratio(what, "with adapters", "without", 0.85)


async def measure(model: Path, sides: Mapping[str, Side]) -> Turns:
    """Have an engine of each side answer in turns."""
    async with serving(model, sides) as engines:
        return await in_turns(engines, model, PROMPTS, 1.0, ROUNDS, WARMUP)


@asynccontextmanager
async def serving(model: Path, sides: Mapping[str, Side]) -> AsyncIterator[dict[str, Engine]]:
    """An engine of each side, which serves the model."""
    engines: dict[str, Engine] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for label, side in sides.items():
                spec = QuantSpec.preset("fp8_block_pow2")
                numerics = NumericsConfig(mode=side.mode, spec=spec, trainer="bf16", rollout=side.precision, kv=side.kv)
                plugin = {
                    "numerics": numerics.to_dict(),
                    "adapter": side.adapter and side.adapter.model_dump(mode="json"),
                }
                served = folder / f"served_{len(engines)}"
                convert_checkpoint(model, served, numerics.rollout_spec)
                engines[label] = Engine(
                    RolloutSection(),
                    folder / f"{len(engines)}.log",
                    plugin if side.plugin else None,
                    expected_report(numerics, side.adapter) if side.plugin else None,
                )
                await engines[label].start(served)
            yield engines
        finally:
            for engine in engines.values():
                await engine.stop()


async def in_turns(
    engines: Mapping[str, Engine], model: Path, count: int, temperature: float, rounds: int, warmup: int
) -> Turns:
    """All engines answer the same `count` prompts in each round; problems are new in every round."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [Prompt(p, prompt_ids(tokenizer, p)) for p in load_problems(Source(PROBLEMS))]
    sampling = SamplingParams(NEW_TOKENS, temperature, (tokenizer.eos_token_id,))
    found = Turns({name: [] for name in engines}, {name: [] for name in engines}, {name: [] for name in engines})
    for index in range(warmup + rounds):
        groups = to_groups(prompts[index * count : (index + 1) * count], GROUP, run_seed=0, step=index)
        for name, engine in engines.items():
            await engine.flush()
            began = time.perf_counter()
            answers = await engine.generate(groups, sampling)
            seconds = time.perf_counter() - began
            found.answers[name] += answers
            if index >= warmup:
                found.counted[name] += answers
                found.rates[name].append(sum(len(answer.token_ids) for answer in answers) / seconds)
    return found

"""Seeded speculation at the demo's shape: the same bits, tokens of a forward pass, and tokens per second."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from transformers import AutoTokenizer

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rl.run.feed.feed import to_groups
from fp8rl.rollout.config import RolloutSection, SpeculationSection
from fp8rl.rollout.data.sources import Source, load_problems
from fp8rl.rollout.engine import Engine
from fp8rl.rollout.types import Decoding, Prompt, SamplingParams, Trajectory, prompt_ids
from fp8rl.weight_sync.served import convert_checkpoint
from lab.bench.measure import Result, median_ratio
from lab.bench.rollout import GROUP, MODEL, NEW_TOKENS, PROBLEMS, PROMPTS

PLAIN, DRAFTS = "one token at a time", "drafts"
KINDS = {"T = 1": 1.0, "greedy": 0.0}
ROUNDS, WARMUP = 10, 4
STRAGGLERS = 2
"""Prompts of the last answers of a step, beside whole steps."""


def run() -> Iterator[Result]:
    with asyncio.Runner() as runner:
        measured = _measured()

        async def following() -> list[Result]:
            return await anext(measured, [])

        while results := runner.run(following()):
            yield from results


async def _measured() -> AsyncIterator[list[Result]]:
    """Both engines answer the same groups in turns; problems are new in every round."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = [Prompt(p, prompt_ids(tokenizer, p)) for p in load_problems(Source(PROBLEMS))]
    with tempfile.TemporaryDirectory() as folder:
        engines = await _engines(Path(folder))
        try:
            for kind, temperature in KINDS.items():
                sampling = SamplingParams(NEW_TOKENS, temperature, (tokenizer.eos_token_id,))
                for count in (PROMPTS, STRAGGLERS):
                    turns = [prompts[at * count : (at + 1) * count] for at in range(WARMUP + ROUNDS)]
                    yield await _in_turns(engines, turns, sampling, f"{kind}, {count} x {GROUP} answers")
        finally:
            for engine in engines.values():
                await engine.stop()


async def _engines(folder: Path) -> dict[str, Engine]:
    numerics = NumericsConfig(spec=QuantSpec.preset("fp8_block_pow2"))
    convert_checkpoint(MODEL, folder / "served", numerics.rollout_spec)
    engines = {}
    for name, speculation in ((PLAIN, None), (DRAFTS, SpeculationSection())):
        config, log = RolloutSection(speculation=speculation), folder / f"{len(engines)}.log"
        engines[name] = Engine(config, log, {"numerics": numerics.to_dict()}, expected_report(numerics))
        await engines[name].start(folder / "served")
    return engines


async def _in_turns(
    engines: dict[str, Engine], turns: list[list[Prompt]], sampling: SamplingParams, shape: str
) -> list[Result]:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    said, different, answered = Decoding(), 0, 0
    for index, prompts in enumerate(turns):
        answers: dict[str, list[Trajectory]] = {}
        for name, engine in engines.items():
            await engine.flush()
            began = time.perf_counter()
            answers[name] = await engine.generate(to_groups(prompts, GROUP, run_seed=0, step=index), sampling)
            seconds = time.perf_counter() - began
            if index >= WARMUP:
                rates[name].append(sum(len(answer.token_ids) for answer in answers[name]) / seconds)
        pairs = zip(answers[PLAIN], answers[DRAFTS], strict=True)
        different += sum((a.token_ids, a.logprobs) != (b.token_ids, b.logprobs) for a, b in pairs)
        answered += len(answers[PLAIN])
        if index >= WARMUP:
            said = sum((answer.decoding for answer in answers[DRAFTS]), said)
    return [
        Result(
            name=f"speculation: answers with other tokens or log-probabilities ({shape})",
            value=different,
            bar=0,
            at_least=False,
            parts={"answers": float(answered)},
        ),
        Result(
            name=f"speculation: accepted tokens per forward pass ({shape})",
            value=1 + said.accepted / said.passes,
            bar=1.5,
            at_least=True,
            parts={
                "drafted per forward pass": said.drafted / said.passes,
                "right": said.accepted / max(said.drafted, 1),
            },
        ),
        Result(
            name=f"speculation: rollout tokens/s, with drafts / without ({shape})",
            value=median_ratio(rates[DRAFTS], rates[PLAIN]),
            bar=1.0,
            at_least=True,
            parts={f"{name} (tokens/s)": statistics.median(values) for name, values in rates.items()},
        ),
    ]

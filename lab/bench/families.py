"""Rollout throughput of other architectures, at their examples' shapes: the shared ops in FP8, SGLang's own in BF16."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path

from lab.bench.measure import Result, median_ratio
from lab.bench.rollout import FP8, GROUP, PROMPTS, STOCK, Side, measure

ABSORBED = "SGLang's own ops in BF16, told to absorb latents"
"""Stock SGLang stops at latent attention on a CPU: its attention there takes latents for keys of heads."""
OWN: dict[str, tuple[str, Side]] = {"glm": (STOCK, None), "deepseek": (ABSORBED, ("native", "bf16"))}


def run() -> Iterator[Result]:
    for family, own in OWN.items():
        yield _result(family, *own)


def _result(family: str, own: str, side: Side) -> Result:
    rates = asyncio.run(measure(Path(f"examples/models/tiny_{family}"), {own: side, FP8: ("exact", "fp8")}))
    return Result(
        name=f"rollout tokens/s, {family}: exact FP8 / {own} ({PROMPTS} x {GROUP} answers)",
        value=median_ratio(rates[FP8], rates[own]),
        bar=0.8,
        at_least=True,
        parts={f"{name} (tokens/s)": statistics.median(values) for name, values in rates.items()},
    )

"""Where differences sit: by place in the answer, length, temperature, probability, version, and kind of token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fp8rl.diagnose.certify.dump.report import Part
from fp8rl.diagnose.certify.dump.tokens import Tokens

FIRST = 8
"""The first part of places and lengths; each further one is twice as long."""
_PROBABILITIES = [(0.9, 1.0), (0.5, 0.9), (0.1, 0.5), (0.01, 0.1), (0.0, 0.01)]
SMALLEST, LARGEST = -8, 1


def parts(tokens: Tokens, reference: Tensor, apart: Mapping[str, Tensor]) -> list[Part]:
    """Mean abs(d) by part. reference: the model's log-probabilities [N]. apart: abs(d) [N] by side."""
    return [
        Part(by, label, int(where.sum()), {name: _mean(each[where]) for name, each in apart.items()})
        for by, label, where in _all(tokens, reference)
        if where.any()
    ]


def histogram(apart: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """How many tokens have which abs(d), by side: exactly 0, and by power of ten; what is beyond is in the last."""
    return {name: _counts(each[each.isfinite()]) for name, each in apart.items()}


def _counts(values: Tensor) -> dict[str, int]:
    powers = values[values > 0].log10().floor().clamp(SMALLEST, LARGEST).int()
    counts = {f"1e{power}": int((powers == power).sum()) for power in range(SMALLEST, LARGEST + 1)}
    return {"0": int((values == 0).sum())} | counts


def _all(tokens: Tokens, reference: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    yield from _doubling("place in the answer", tokens.place)
    yield from _doubling("length of the answer", tokens.length)
    for temperature in tokens.temperature.unique().tolist():
        yield "temperature", f"{temperature:g}", tokens.temperature == temperature
    probability = reference.exp()
    for low, high in _PROBABILITIES:
        last = high == 1.0
        yield (
            "probability of the token",
            f"{low:g} to {high:g}",
            (probability >= low) & (probability < high if not last else probability <= math.inf),
        )
    if tokens.special.any():
        yield "kind of token", "text", ~tokens.special
        yield "kind of token", "special", tokens.special
    versions = list(dict.fromkeys(tokens.version))
    for version in versions if len(versions) > 1 else ():
        yield "weight version", str(version), torch.tensor([each == version for each in tokens.version])


def _doubling(by: str, values: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    start, stop = 0, FIRST
    while start <= int(values.max()):
        yield by, f"{start}–{stop - 1}", (values >= start) & (values < stop)
        start, stop = stop, 2 * stop


def _mean(values: Tensor) -> float | None:
    finite = values[values.isfinite()]
    return finite.mean().item() if len(finite) else None

"""The sampled tokens of a dump as flat tensors: the place of each token, and each side's log-probability of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8rl.numerics.core.errors import user_error
from fp8rl_certify.dump.rows import DumpRow, Sampling, Version

ENGINE, TRAINER = "the engine", "the trainer"
Side = str


@dataclass(frozen=True)
class Tokens:
    """N sampled tokens, row after row."""

    ids: Tensor
    """Ids of the tokens, int64 [N]. `row`, `place` and `length` are int64 [N] too."""
    row: Tensor
    place: Tensor
    """Place of the token in its answer."""
    length: Tensor
    """Length of the token's answer."""
    temperature: Tensor
    """float64 [N], the number by which logits are divided."""
    special: Tensor
    """bool [N], True for special tokens, such as the end of an answer."""
    version: list[Version]
    said: dict[Side, Tensor] = field(default_factory=dict)
    """float64 [N] by side: the log-probabilities of engine and trainer; NaN where a side gives none."""

    @classmethod
    def of(cls, rows: Sequence[DumpRow], samplings: Sequence[Sampling], special: frozenset[int]) -> Tokens:
        places = [(row, number, place) for number, row in enumerate(rows) for place in row.sampled]
        ids = torch.tensor([row.tokens[row.prompt_length + place] for row, _, place in places])
        said = {ENGINE: _numbers([row.logprobs[place] for row, _, place in places])}
        if any(row.trainer_logprobs is not None for row in rows):
            theirs = [None if row.trainer_logprobs is None else row.trainer_logprobs[at] for row, _, at in places]
            said[TRAINER] = _numbers(theirs)
        return cls(
            ids=ids,
            row=torch.tensor([number for _, number, _ in places]),
            place=torch.tensor([place for _, _, place in places]),
            length=torch.tensor([row.answer_length for row, _, _ in places]),
            temperature=_numbers([samplings[number].divisor for _, number, _ in places]),
            special=torch.tensor([token in special for token in ids.tolist()]),
            version=[row.version_of(place) for row, _, place in places],
            said=said,
        )


def chosen(rows: Sequence[DumpRow], budget: int) -> list[int]:
    """Choose rows evenly from the dump, with at most `budget` tokens including prompts, but at least one row."""
    total = sum(len(row.tokens) for row in rows)
    step = max(1.0, total / budget)
    found: list[int] = []
    for number in (int(index * step) for index in range(len(rows))):
        if number >= len(rows) or (found and budget < len(rows[number].tokens)):
            break
        found.append(number)
        budget -= len(rows[number].tokens)
    return found


def check_fits(
    rows: Sequence[DumpRow], places: Sequence[str], vocabulary: int, positions: int | None, model: object
) -> None:
    """Check that the model can have made the rows.

    Raises:
        UserError: an id is outside the model's vocabulary, or a row exceeds its context. The message names the row.
    """
    for row, place in zip(rows, places, strict=True):
        largest = max(row.tokens)
        if largest >= vocabulary:
            raise user_error(
                f"{place}: tokens[{row.tokens.index(largest)}]",
                found=largest,
                expected=f"ids below {vocabulary}, the vocabulary of {model}",
                remedy="Give the model that the dump is from with --model.",
            )
        if positions is not None and len(row.tokens) > positions:
            raise user_error(
                f"{place}: tokens",
                found=f"{len(row.tokens)} tokens",
                expected=f"at most {positions}, the positions of {model}",
                remedy="Give the model that the dump is from with --model.",
            )


def flat(by_row: Mapping[int, Tensor], rows: Sequence[DumpRow]) -> Tensor:
    """Join tensors [T] by row, one value for each token of an answer, to [N], one value for each sampled token."""
    return torch.cat([by_row[number][row.sampled] for number, row in enumerate(rows)])


def _numbers(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)


# Where differences sit: by place in the answer, length, temperature, probability, version, and kind of token.


@dataclass(frozen=True)
class Part:
    """A part of the tokens. by: the property by which tokens are divided. label: the property's value in this part.

    means: mean abs(d) from the model in FP32, by side and for `floor`; None if no token has a finite d.
    """

    by: str
    label: str
    tokens: int
    means: dict[str, float | None]


FIRST = 8
"""Places and lengths below this number are the first part. Each further part ends at twice the number."""
_PROBABILITIES = [(0.9, 1.0), (0.5, 0.9), (0.1, 0.5), (0.01, 0.1), (0.0, 0.01)]
SMALLEST, LARGEST = -8, 1


def parts(tokens: Tokens, reference: Tensor, apart: Mapping[str, Tensor]) -> list[Part]:
    """Divide the tokens into parts. reference: the model's log-probabilities [N]. apart: abs(d) [N] by side."""
    return [
        Part(by, label, int(where.sum()), {name: _mean(each[where]) for name, each in apart.items()})
        for by, label, where in _all(tokens, reference)
        if where.any()
    ]


def histogram(apart: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Count the tokens by side and abs(d): exactly 0, then by power of ten. The end bins include all beyond them."""
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

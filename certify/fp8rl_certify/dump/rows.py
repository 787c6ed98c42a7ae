"""One answer of any dump: its token ids, log-probabilities and sampler settings. docs/certify.md has the schema."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.errors import UserError, shown, user_error
from fp8rl.numerics.sampling import EVERY_TOKEN, Truncation

LARGEST = 1e-3
"""Largest log-probability that is accepted: rounding may give a number above 0."""
MOST_TOKENS = 2**31 - 1
"""Largest top-k. No vocabulary is larger."""
MOST_UNREAD, LONGEST_KEY = 20, 60
_REMEDY = "Correct the dump; docs/certify.md has its schema."

TokenId = Annotated[int, Field(ge=0, strict=True)]
Version = int | str | None


@dataclass(frozen=True)
class Sampling:
    """The sampler's settings for an answer. temperature: 0 means greedy, with log-probabilities at temperature 1."""

    temperature: float = 1.0
    truncation: Truncation = EVERY_TOKEN

    @property
    def divisor(self) -> float:
        """The number by which logits are divided: the temperature, or 1 for greedy."""
        return self.temperature or 1.0

    def replaced(
        self, temperature: float | None, top_p: float | None, top_k: int | None, min_p: float | None
    ) -> Sampling:
        """Return the settings with each given setting that is not None in place of the own one. top_k 0: no top-k."""
        given = (temperature, top_p, top_k, min_p)
        own = (self.temperature, self.truncation.top_p, self.truncation.top_k, self.truncation.min_p)
        heat, p, k, least = (mine if said is None else said for said, mine in zip(given, own, strict=True))
        return Sampling(heat, Truncation(p, int(k) or -1, least))


class DumpRow(BaseModel):
    """One answer. A sampler setting that is null is unknown."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    tokens: list[TokenId]
    """Token ids of the prompt, then of the answer."""
    prompt_length: Annotated[int, Field(ge=1, strict=True)]
    """Number of tokens of the prompt."""
    logprobs: list[float | None]
    """The engine's log-probabilities, one for each token of the answer."""
    trainer_logprobs: list[float | None] | None = None
    """The trainer's log-probabilities, one for each token of the answer."""
    mask: list[bool] | None = None
    """One for each token of the answer: 0 if the model has not sampled the token. Such a token is not compared."""
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    version: Version | list[Version] = None
    """Version of the weights: one for the answer, or one for each of its tokens."""

    @field_validator("mask", mode="before")
    @classmethod
    def _numbers_are_a_mask(cls, value: Any) -> Any:
        """Accept 0 and 1 of any number type in a mask."""
        return [each in (1, True) if each in (0, 1) else each for each in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        answer = self.answer_length
        if answer < 1:
            raise _Unfit("prompt_length", self.prompt_length, f"less than the {len(self.tokens)} tokens")
        for name in ("logprobs", "trainer_logprobs", "mask", "version"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != answer:
                expected = f"{answer}, one for each of {len(self.tokens)} - {self.prompt_length} tokens of the answer"
                raise _Unfit(name, f"{len(value)} values", expected)
        for name in ("logprobs", "trainer_logprobs"):
            for index in self.sampled if getattr(self, name) is not None else ():
                value = getattr(self, name)[index]
                if value is None or not math.isfinite(value):
                    expected = "a finite number, or a 0 in its place of mask if the model has not sampled the token"
                    raise _Unfit(f"{name}[{index}]", value, expected)
                if value > LARGEST:
                    raise _Unfit(f"{name}[{index}]", value, "a logarithm of a probability, at most 0")
        return self

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def sampled(self) -> list[int]:
        """Return the places in the answer of the tokens that the model has sampled."""
        places = range(self.answer_length)
        return list(places) if self.mask is None else [place for place in places if self.mask[place]]

    def sampling(self, default: Sampling) -> Sampling:
        """Return the row's settings. Unknown settings are taken from `default`."""
        return default.replaced(self.temperature, self.top_p, self.top_k, self.min_p)

    def version_of(self, place: int) -> Version:
        """Return the version of the weights that sampled the token at a place of the answer."""
        return self.version[place] if isinstance(self.version, list) else self.version


def checked_row(values: Mapping[str, Any], where: str) -> DumpRow:
    """Check plain values, and return them as a row. where: the row's place for messages, e.g. `line 3 of x.jsonl`.

    Raises:
        UserError: a key is missing or wrong. The message names the key.
    """
    try:
        return DumpRow.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, _Unfit):
            raise user_error(
                f"{where}: {cause.key}", found=cause.found, expected=cause.expected, remedy=_REMEDY
            ) from None
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part != "list")
        raise _unreadable(values, where, place.lstrip("."), first) from None


class _Unfit(ValueError):
    """A value that does not fit the others of its row."""

    def __init__(self, key: str, found: object, expected: str) -> None:
        super().__init__(f"{key}: found {found}, expected {expected}")
        self.key, self.found, self.expected = key, found, expected


def _unreadable(values: Mapping[str, Any], where: str, place: str, first: Mapping[str, Any]) -> UserError:
    if first["type"] == "missing":
        found = f"a row with {', '.join(sorted(map(str, values))) or 'no key'}"
        expected = f"{place}, {_MEANING[place]}"
        return user_error(f"{where}: {place}", found=found, expected=expected, remedy=_REMEDY)
    expected = str(first["msg"]).removeprefix("Input should be ")
    return user_error(f"{where}: {place}", found=first["input"], expected=expected, remedy=_REMEDY)


_MEANING = {
    "tokens": "the ids of prompt and answer",
    "prompt_length": "how many of the tokens are the prompt's",
    "logprobs": "the engine's log-probability of each token of the answer",
}

# What the rows of a dump are read into, and how each way of reading checks them.

SCHEMA_KEYS = frozenset(DumpRow.model_fields)


@dataclass(frozen=True)
class Dump:
    """The rows of a file, and what the file says about their model."""

    kind: str
    """The program that wrote the file, in words."""
    rows: list[DumpRow]
    """The rows with at least one token that the model has sampled."""
    places: list[str]
    """The place of each row in its file, in words."""
    sampling: Sampling | None = None
    """Settings for rows without settings of their own, if the file or its run has them."""
    unread: list[str] = field(default_factory=list)
    """Keys that were not read."""
    model: Path | None = None
    """Directory of the weights, if the dump says it."""
    checkpoint: Path | None = None
    """The checkpoint whose weights replace the directory's weights, if there is one."""
    numerics: NumericsConfig | None = None
    """The numerics of the run that wrote the dump."""


def whole(path: Path, kind: str, found: Iterator[tuple[str, dict[str, Any]]], sampling: Sampling | None = None) -> Dump:
    """Check plain rows, each given with its place in words, and return the dump."""
    every: list[tuple[str, DumpRow]] = []
    unread: dict[str, None] = {}
    for place, values in found:
        every.append((place, checked_row(values, f"{place} of {path}")))
        if len(unread) < MOST_UNREAD:
            unread |= dict.fromkeys(shown(str(key), LONGEST_KEY)[1:-1] for key in values if key not in SCHEMA_KEYS)
    used = [(place, row) for place, row in every if row.sampled]
    if not used:
        raise user_error(
            "DUMP",
            found=f"{path} with {len(every)} rows" + (", and no token that was sampled" if every else ""),
            expected="at least one answer",
            remedy="Write rows of token ids and log-probabilities; docs/certify.md has the schema.",
        )
    return Dump(kind, [row for _, row in used], [place for place, _ in used], sampling, list(unread)[:MOST_UNREAD])

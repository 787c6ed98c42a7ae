"""Our own reward functions by name, and those by rule: `integer`, `format`, `length` and `environment`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from fp8rl.rollout.tasks.named_functions import ReturnError

INTEGER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})")


def integer(answer: str, reference: str, finished: bool) -> float:
    """Return 1 if the model ended the answer with `####` and the integer that closes the reference; else 0."""
    gold = final_integer(reference)
    return float(finished and gold is not None and final_integer(answer) == gold)


def final_integer(text: str) -> int | None:
    """Return the integer between the last `####` and the very end of `text`; one space or none before it."""
    _, marker, tail = text.rpartition("####")
    tail = tail.removeprefix(" ")
    if not marker or not INTEGER.fullmatch(tail):
        return None
    return int(tail.replace(",", ""))


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"a regular expression; this one has {error}") from error
    return pattern


def format(answer: str, finished: bool, pattern: Annotated[str, AfterValidator(_compiles)]) -> float:
    """Return 1 if the model ended the answer and all of it matches the regular expression `pattern`, else 0.

    In the pattern, `.` is any character.
    """
    return float(finished and re.fullmatch(pattern, answer, re.DOTALL) is not None)


def length(answer: str, tokens: int, free: Annotated[int, Field(ge=1)]) -> float:
    """Return 0 up to `free` tokens, and less by 1 for each `free` tokens more."""
    return min(0.0, 1.0 - tokens / free)


def environment(answer: str, outcome: Mapping[str, float], part: str = "reward") -> float:
    """Return the number `part` of the environment's result (a number without a name is `reward`).

    It is 0 if the answer's tokens ran out, so that the environment returned nothing. Raises ReturnError: it returned
    others.
    """
    if part not in outcome and outcome:
        raise ReturnError(f"found an environment that returned {', '.join(outcome)}, expected {part} (kwargs.part)")
    return outcome.get(part, 0.0)


@dataclass(frozen=True)
class BuiltIn:
    """A reward function of ours."""

    function: str
    """Its name in a spec."""
    cheap: bool = False
    """So fast and safe that it needs no process of its own."""
    reads: Callable[[str], bool] | None = None
    """Checks that it can use a reference answer; None: it needs none."""
    reference: str = ""
    """The form of the reference, in words."""
    tokenizer: str = ""
    """The argument that names a directory with a tokenizer, which is read before the start; empty: none does."""


BUILT_IN = {
    "integer": BuiltIn(
        "fp8rl.rollout.tasks.rewards.builtin:integer",
        cheap=True,
        reads=lambda answer: final_integer(answer) is not None,
        reference="text that ends in '#### ' and an integer",
    ),
    "math": BuiltIn(
        "fp8rl.rollout.tasks.rewards.mathematics:math",
        # From nearly anything but blanks math-verify makes something to compare.
        reads=lambda answer: bool(answer.rpartition("####")[2].strip("$ \t\r\n")),
        reference="a result after '####' that math-verify can read",
    ),
    "format": BuiltIn("fp8rl.rollout.tasks.rewards.builtin:format"),
    "length": BuiltIn("fp8rl.rollout.tasks.rewards.builtin:length", cheap=True),
    "environment": BuiltIn("fp8rl.rollout.tasks.rewards.builtin:environment", cheap=True),
    "http": BuiltIn("fp8rl.rollout.tasks.rewards.services:http"),
    "model": BuiltIn("fp8rl.rollout.tasks.rewards.services:model", tokenizer="tokenizer"),
}

"""Our own reward functions by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8rl.rollout.rewards.integer import final_integer


@dataclass(frozen=True)
class BuiltIn:
    """A reward function of ours.

    function: as an experiment could name it. cheap: so fast and safe that it needs no process of its own.
    reads: whether it can use a reference answer, and reference: what one must be, in words; None: it needs none.
    tokenizer: the argument that names a directory with one, which is read before the start; empty: none does.
    """

    function: str
    cheap: bool = False
    reads: Callable[[str], bool] | None = None
    reference: str = ""
    tokenizer: str = ""


def _has_a_result(answer: str) -> bool:
    """Whether a text has a result. From nearly anything but blanks math-verify makes something to compare."""
    return bool(answer.rpartition("####")[2].strip("$ \t\r\n"))


BUILT_IN = {
    "integer": BuiltIn(
        "fp8rl.rollout.rewards.integer:integer",
        cheap=True,
        reads=lambda answer: final_integer(answer) is not None,
        reference="text that ends in '#### ' and an integer",
    ),
    "math": BuiltIn(
        "fp8rl.rollout.rewards.mathematics:math",
        reads=_has_a_result,
        reference="a result after '####' that math-verify can read",
    ),
    "format": BuiltIn("fp8rl.rollout.rewards.form:format"),
    "length": BuiltIn("fp8rl.rollout.rewards.length:length", cheap=True),
    "environment": BuiltIn("fp8rl.rollout.rewards.environment:environment", cheap=True),
    "http": BuiltIn("fp8rl.rollout.rewards.http:http"),
    "model": BuiltIn("fp8rl.rollout.rewards.model:model", tokenizer="tokenizer"),
}

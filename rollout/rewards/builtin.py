"""Our own reward functions by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8rl.rollout.rewards.rules import final_integer


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
        "fp8rl.rollout.rewards.rules:integer",
        cheap=True,
        reads=lambda answer: final_integer(answer) is not None,
        reference="text that ends in '#### ' and an integer",
    ),
    "math": BuiltIn(
        "fp8rl.rollout.rewards.mathematics:math",
        # From nearly anything but blanks math-verify makes something to compare.
        reads=lambda answer: bool(answer.rpartition("####")[2].strip("$ \t\r\n")),
        reference="a result after '####' that math-verify can read",
    ),
    "format": BuiltIn("fp8rl.rollout.rewards.rules:format"),
    "length": BuiltIn("fp8rl.rollout.rewards.rules:length", cheap=True),
    "environment": BuiltIn("fp8rl.rollout.rewards.rules:environment", cheap=True),
    "http": BuiltIn("fp8rl.rollout.rewards.services:http"),
    "model": BuiltIn("fp8rl.rollout.rewards.services:model", tokenizer="tokenizer"),
}

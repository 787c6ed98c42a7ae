"""Defines the `rewards:` section of an experiment spec, and loads the functions that it names.

A function gets the arguments that its parameters name:

    one answer        question, reference and fields (from the data; fields has its further columns), answer (the text),
                      finished, tokens (the number of the model's tokens), turns ([(model or environment, text)]),
                      outcome (what the environment returned)
    a whole group     answers in place of answer; everything that is not from the data is a list

and returns a number or named numbers; for a group, a list of these. It may be `async`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from fp8rl.numerics.core.errors import user_error
from fp8rl.numerics.core.section import Section, SpecFunction, SpecPath, located_as
from fp8rl.rollout.tasks.named_functions import Numbers, ReturnError, brief, named_numbers, named_object
from fp8rl.rollout.tasks.rewards.builtin import BUILT_IN


class RewardSection(Section):
    """One reward function and its weight."""

    function: SpecFunction
    """A built-in function (`integer`, `math`, `format`, `length`, `environment`, `http`, `model`),
    `package.module:name`, or `path/to/file.py:name`."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.+-]+$")
    """The name in the metric `rollout/reward/NAME`. Null: the function's name."""
    weight: float = 1.0
    """The factor of the function's number in the reward."""
    timeout_s: float = Field(default=5.0, gt=0.0)
    """Seconds that a call may take. A longer call fails."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the function."""

    @classmethod
    def located(cls, values: Any, directory: Path) -> Any:
        values = super().located(values, directory)
        mapping = values if isinstance(values, dict) else {}
        name, kwargs = mapping.get("function"), mapping.get("kwargs")
        ours = BUILT_IN.get(name) if isinstance(name, str) else None
        if ours is not None and ours.tokenizer and isinstance(kwargs, dict) and ours.tokenizer in kwargs:
            kwargs = kwargs | {ours.tokenizer: located_as(SpecPath, kwargs[ours.tokenizer], directory)}
            return values | {"kwargs": kwargs}
        return values

    @property
    def label(self) -> str:
        """The name in metrics and messages."""
        return self.name or self.function.rpartition(":")[2]


class RewardsSection(Section):
    """The reward of an answer: the weighted sum of these functions. A list is short for `{functions: list}`.

    Evaluation uses only the first function, without its weight.
    """

    shorthand: ClassVar[str] = "functions"

    functions: Annotated[tuple[RewardSection, ...], Field(min_length=1, strict=False)] = (
        RewardSection(function="integer"),
    )
    """The functions that reward an answer."""
    max_failures: int = Field(default=32, ge=0)
    """Number of failed calls that a run survives. A call fails if it raises, takes too long or returns no number. Its
    reward is then 0."""
    workers: int = Field(default=2, ge=1, le=256)
    """Processes for plain functions. Functions that wait should be `async`, so that hundreds can wait at once."""

    @model_validator(mode="after")
    def _labels_differ(self) -> RewardsSection:
        labels = [function.label for function in self.functions]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"found two functions called {', '.join(twice)}, expected different names. Name each")
        return self


EACH = ("finished", "tokens", "turns", "outcome")
"""The arguments, except the text, that differ from answer to answer."""
OFFERED = ("question", "answer", "answers", "reference", "fields", *EACH)


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its settings."""

    config: RewardSection
    call: Callable[..., Any]
    asks: tuple[str, ...]
    """The names in `OFFERED` that are parameters of the function."""

    @property
    def of_group(self) -> bool:
        return "answers" in self.asks

    @property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.call, type(self.call).__call__)))  # or an object's method

    def asked(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function asks for. offered: all arguments."""
        return {name: offered[name] for name in self.asks}

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        """Call the function with the arguments that it asks for, and with its `kwargs`."""
        return self.call(**self.asked(offered), **self.config.kwargs)

    def parts(self, returned: Any, answers: int) -> list[Numbers]:
        """Return the rewards of each answer from the value that a call returned. Raises ReturnError."""
        if not self.of_group:
            return [named_numbers(returned)]
        returned = returned.tolist() if hasattr(returned, "tolist") else returned  # an array of numpy or torch
        if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != answers:
            raise ReturnError(f"found {brief(returned)}, expected a list of {answers} rewards, one per answer")
        return [named_numbers(value) for value in returned]


def load_function(config: RewardSection, key: str) -> RewardFunction:
    """Load the function that `config` names. Raises UserError, which names `key`: there is no such function, its module
    cannot be imported, or it needs a parameter that neither `OFFERED` nor `kwargs` has."""
    call = named_object(config.function, f"{key}.function", {name: own.function for name, own in BUILT_IN.items()})
    parameters = inspect.signature(call).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if unknown := [name for name in config.kwargs if (name not in named and not takes_any) or name in OFFERED]:
        expected = f"parameters of {config.function} besides {', '.join(OFFERED)}: {', '.join(named)}"
        remedy = "Correct kwargs, or give the function such a parameter."
        raise user_error(f"{key}.kwargs", unknown[0], expected, remedy)
    asks = tuple(name for name in OFFERED if name in named)
    missing = [n for n in named if n not in (*OFFERED, *config.kwargs) and (p := parameters[n]).default is p.empty]
    if missing or ("answer" in asks) == ("answers" in asks):
        expected = f"a function of answer, or of answers for a whole group, and any of {', '.join(OFFERED)}"
        expected += f"; kwargs give no {', '.join(missing)}" if missing else ""
        remedy = "Rename its parameters, give them defaults, or set them in kwargs."
        raise user_error(f"{key}.function", f"{config.function}({', '.join(parameters)})", expected, remedy)
    return RewardFunction(config, call, asks)

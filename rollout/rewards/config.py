"""The `rewards:` section of an experiment spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from fp8rl.numerics.core.section import Section, SpecFunction, SpecPath, located_as
from fp8rl.rollout.rewards.builtin import BUILT_IN


class RewardSection(Section):
    """One reward function and its weight."""

    function: SpecFunction
    """One of ours (`integer`, `math`, `format`, `length`, `environment`, `http`, `model`), `package.module:name`, or
    `path/to/file.py:name`."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.+-]+$")
    """The name in metrics, `rollout/reward/NAME`. Null: that of the function."""
    weight: float = 1.0
    """The factor of its number in the reward."""
    timeout_s: float = Field(default=5.0, gt=0.0)
    """A call that takes longer has failed."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""

    @classmethod
    def located(cls, values: Any, directory: Path) -> Any:
        values = super().located(values, directory)
        held = values if isinstance(values, dict) else {}
        name, kwargs = held.get("function"), held.get("kwargs")
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
    """The reward of an answer: the weighted sum of these functions. A list stands for `functions` alone.

    Evaluation goes by the first one, unweighted.
    """

    shorthand: ClassVar[str] = "functions"

    functions: Annotated[tuple[RewardSection, ...], Field(min_length=1, strict=False)] = (
        RewardSection(function="integer"),
    )
    """The functions that judge an answer."""
    max_failures: int = Field(default=32, ge=0)
    """Calls of a run that may raise, take too long or return no number, before the run ends. Each counts as a reward of
    0 until then."""
    workers: int = Field(default=2, ge=1, le=256)
    """Processes for plain functions. Functions that wait should be `async`: hundreds of them wait at the same time."""

    @model_validator(mode="after")
    def _labels_differ(self) -> RewardsSection:
        labels = [function.label for function in self.functions]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(
                f"found two functions called {', '.join(twice)}, expected different names. Give each a name"
            )
        return self

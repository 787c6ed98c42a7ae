"""What the `rewards:` section of an experiment spec may say."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RewardConfig(BaseModel):
    """One function and how much it counts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    function: str = Field(min_length=1)
    """One of ours (`integer`, `math`, `format`, `length`, `environment`, `http`, `model`), `package.module:name`, or
    `path/to/file.py:name`."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.+-]+$")
    """In metrics, `rollout/reward/NAME`. Null: that of the function."""
    weight: float = 1.0
    timeout_s: float = Field(default=5.0, gt=0.0)
    """A call that takes longer has failed."""
    kwargs: dict[str, Any] = {}
    """Further arguments of the function."""

    @property
    def label(self) -> str:
        """What metrics and messages call it."""
        return self.name or self.function.rpartition(":")[2]


class RewardsConfig(BaseModel):
    """The reward of an answer: the weighted sum of what these functions say. A list stands for `functions` alone.

    Evaluation goes by the first one, unweighted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    functions: Annotated[tuple[RewardConfig, ...], Field(min_length=1, strict=False)] = (
        RewardConfig(function="integer"),
    )
    max_failures: int = Field(default=32, ge=0)
    """Calls of a run that may raise, take too long or return no number, before the run ends. Each counts as a reward of
    0 until then."""
    workers: int = Field(default=2, ge=1, le=256)
    """Processes for plain functions. What waits for something else is better an `async` one: hundreds of these wait at
    the same time."""

    @model_validator(mode="before")
    @classmethod
    def _list_of_functions(cls, values: Any) -> Any:
        return {"functions": values} if isinstance(values, list | tuple) else values

    @model_validator(mode="after")
    def _labels_differ(self) -> RewardsConfig:
        labels = [function.label for function in self.functions]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"found two functions called {', '.join(twice)}, expected one. Give them a name each")
        return self

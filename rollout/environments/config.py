"""What the `environment:` section of an experiment spec may say."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

SINGLE_TURN = "single_turn"


class EnvironmentConfig(BaseModel):
    """What owns the conversation of an answer. A text stands for `function` alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    function: str = Field(default=SINGLE_TURN, min_length=1)
    """One of ours (`single_turn`, `calculator`, `python`, `guess`), `package.module:name` or `path/to/file.py:name`."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """An environment that takes longer between two turns of the model, or before the first or after the last, has
    failed."""
    max_failures: int = Field(default=32, ge=0)
    """Answers of a run whose environment may raise, take too long or return no number, before the run ends. Nothing is
    learnt from them."""
    kwargs: dict[str, Any] = {}
    """Further arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_function(cls, values: Any) -> Any:
        return {"function": values} if isinstance(values, str) else values

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.function.rpartition(":")[2]

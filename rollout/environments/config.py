"""What the `environment:` section of an experiment spec may say."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from numerics.io.section import Section, SpecFunction

SINGLE_TURN = "single_turn"


class EnvironmentConfig(Section):
    """What owns the conversation of an answer. A text stands for `function` alone."""

    shorthand: ClassVar[str] = "function"

    function: SpecFunction = SINGLE_TURN
    """One of ours (`single_turn`, `calculator`, `python`, `guess`), `package.module:name` or `path/to/file.py:name`."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """An environment that takes longer between two turns of the model, or before the first or after the last, has
    failed."""
    max_failures: int = Field(default=32, ge=0)
    """Answers of a run whose environment may raise, take too long or return no number, before the run ends. Nothing is
    learnt from them."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.function.rpartition(":")[2]

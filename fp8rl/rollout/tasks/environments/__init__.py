"""Defines the `environment:` section of an experiment spec."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from fp8rl.numerics.core.reading import at_home
from fp8rl.numerics.core.section import Section, SpecFunction, SpecPath, located_as

SINGLE_TURN = "single_turn"
HARNESS = "harness"


class HarnessSection(Section):
    """The program of `function: harness`. [agents.md](agents.md) describes what it gets."""

    # Strictness would refuse the lists that YAML gives.
    command: tuple[str, ...] = Field(default=(), strict=False)
    """The program and its arguments. Each conversation starts a process. A program with a slash is a path, relative
    like all paths of a spec. A program without a slash is searched in PATH. Arguments are not changed."""
    program: SpecFunction | None = None
    """An async function in place of a command, `package.module:name` or `path/to/file.py:name`. It is called in the
    run's own process with a base URL, a key and the problem."""
    directory: SpecPath | None = None
    """The working directory of a command. Null: the run's."""
    variables: tuple[str, ...] = Field(default=(), strict=False)
    """Names of the run's environment variables that a command gets, besides usual ones such as PATH."""
    tool_parser: str | None = None
    """SGLang's name of the format in which the model calls tools (`qwen25`, `llama3`, `glm45`, ...)."""
    override: tuple[
        Literal[
            "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "tool_choice"
        ],
        ...,
    ] = Field(default=(), strict=False)
    """Settings of requests to ignore. Without this key a request whose settings differ from the run's is refused. With
    `tool_choice`, a forced call is treated as `auto`. (smolagents forces a call in every request.)"""
    max_requests: int = Field(default=64, ge=1)
    """Largest number of the model's turns that a program may request."""
    deadline_s: float = Field(default=1800.0, gt=0.0)
    """Seconds that a program may take in all, the engine's time included. `timeout_s` limits the time between turns."""

    @classmethod
    def located(cls, values: Any, directory: Path) -> Any:
        values = super().located(values, directory)
        command = values.get("command") if isinstance(values, dict) else None
        if isinstance(command, list) and command:
            program, *rest = command
            if isinstance(program, str) and os.sep in program:  # else a name in PATH
                program = located_as(SpecPath, program, directory)
            return values | {"command": [program, *(at_home(part) if isinstance(part, str) else part for part in rest)]}
        return values


class EnvironmentSection(Section):
    """The environment, which controls the conversation of an answer. A text is short for `{function: text}`."""

    shorthand: ClassVar[str] = "function"

    function: SpecFunction = SINGLE_TURN
    """`single_turn`, `harness` (a program that calls OpenAI's API), `package.module:name` or `path/to/file.py:name`."""
    harness: HarnessSection | None = None
    """The program of `function: harness`."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds that an environment may take before the model's first turn, between two turns, or after the last."""
    max_failures: int = Field(default=32, ge=0)
    """Number of failures that a run survives. An environment fails if it raises, takes too long, never samples, or
    returns anything but numbers or nothing. Its answer is not trained on."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments of the function."""

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.function.rpartition(":")[2]

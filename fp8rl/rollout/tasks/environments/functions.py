"""Loads the function of an environment by its name."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fp8rl.numerics.core.errors import user_error
from fp8rl.rollout.tasks.environments import HARNESS, SINGLE_TURN, EnvironmentSection, HarnessSection
from fp8rl.rollout.tasks.environments.conversation import Conversation
from fp8rl.rollout.tasks.environments.harness import Harness
from fp8rl.rollout.tasks.named_functions import named_object
from fp8rl.rollout.tasks.tool_calls import parsers

Environment = Callable[[Conversation], Awaitable[Any]]

BUILT_IN = {SINGLE_TURN: "fp8rl.rollout.tasks.environments.functions:single_turn", HARNESS: ""}
_EXAMPLES = {
    "calculator": "examples/environments.py, and name environments.py:calculator",
    "guess": "examples/environments.py, and name environments.py:guess",
    "python": "examples/python_tool.py and examples/limited.py, and name python_tool.py:python",
    "openenv": "examples/openenv.py, and name openenv.py:openenv",
    "verifiers": "examples/verifiers_task.py, and run it by function=harness (docs/agents.md)",
}
"""Environments of ours once, and where they are now."""


async def single_turn(conversation: Conversation) -> None:
    """Let the model answer the question."""
    await conversation.sample()


def load_environment(config: EnvironmentSection, key: str = "environment") -> Environment:
    """Load the function that `config` names, with its `kwargs`; a harness, with its program.

    Raises:
        UserError: naming `key`: there is no such function, its module cannot be imported, it is not `async`, or it
            cannot be called with a conversation and `kwargs`.
    """
    if config.function == HARNESS:
        return _harness(config, key)
    if (example := _EXAMPLES.get(config.function)) is not None:
        remedy = f"Copy {example}."
        raise user_error(f"{key}.function", config.function, "a function of a file: it is an example now", remedy)
    if config.harness is not None:
        raise user_error(
            f"{key}.harness",
            found=f"a program beside function={config.function}",
            expected=f"function={HARNESS}, which runs it",
            remedy=f"Set {key}.function={HARNESS}, or remove {key}.harness.",
        )
    environment = _coroutine(config.function, f"{key}.function", BUILT_IN, ["a conversation"], config.kwargs)
    return partial(environment, **config.kwargs)


def _harness(config: EnvironmentSection, key: str) -> Harness:
    harness = config.harness or HarnessSection()
    if config.kwargs or bool(harness.command) == (harness.program is not None):
        found = "kwargs" if config.kwargs else "both" if harness.command else "neither"
        raise user_error(
            f"{key}.harness",
            found=found,
            expected="a command or a program, one of them",
            remedy="Write harness: {command: [python, agent.py]}, or harness: {program: agent.py:solve}.",
        )
    _check_parser(harness, key)
    if harness.program is not None:
        given = ["a base URL", "a key", "the problem"]
        return Harness(harness, _coroutine(harness.program, f"{key}.harness.program", {}, given, {}))
    _check_command(harness, key)
    return Harness(harness, None)


def _check_parser(harness: HarnessSection, key: str) -> None:
    if harness.tool_parser is not None and harness.tool_parser not in (known := parsers()):
        raise user_error(
            f"{key}.harness.tool_parser",
            found=harness.tool_parser,
            expected=f"one that SGLang has: {', '.join(sorted(known))}",
            remedy="Choose that of the model's family.",
        )


def _check_command(harness: HarnessSection, key: str) -> None:
    if harness.directory is not None and not os.path.isdir(harness.directory):
        raise user_error(f"{key}.harness.directory", harness.directory, "a folder", "Correct the path.")
    program = harness.command[0]
    if os.sep in program:
        # A relative one, which no file says, is relative to where it runs.
        looked = os.path.join(os.path.abspath(harness.directory or "."), program)
        there = "a folder is" if os.path.isdir(looked) else "a file without leave to run is"
        expected = f"a program that can be run; {there if os.path.exists(looked) else 'nothing is'} there"
    else:
        looked, expected = program, f"a program in PATH, which is {os.environ.get('PATH', os.defpath)}"
    if shutil.which(looked) is None:
        raise user_error(f"{key}.harness.command", looked, expected, "Correct its path, or install it.")


def _coroutine(
    name: str, key: str, built_in: dict[str, str], given: list[str], kwargs: dict[str, Any]
) -> Callable[..., Awaitable[Any]]:
    """Load an async function that takes these arguments. Raises UserError, as `load_environment` does."""
    call, label = named_object(name, key, built_in), name.rpartition(":")[2]
    if not inspect.iscoroutinefunction(call):
        raise user_error(
            key,
            found=name,
            expected="an async function, as it waits for the model",
            remedy=f"Write async def {label}({', '.join(one.split()[-1].lower() for one in given)}): ...",
        )
    signature = inspect.signature(call)
    try:
        signature.bind(*[None] * len(given), **kwargs)
    except TypeError as error:
        raise user_error(
            f"{key.removesuffix('.function')}.kwargs" if key.endswith(".function") else key,
            found=f"{label}({', '.join(signature.parameters)})",
            expected=f"a function of {', '.join([*given, *kwargs])}; {error}",
            remedy="Correct kwargs, or the function's parameters.",
        ) from error
    return call

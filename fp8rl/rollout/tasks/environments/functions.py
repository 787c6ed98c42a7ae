"""Loads the function of an environment by the name in the spec."""

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

BUILT_IN = {SINGLE_TURN: "fp8rl.rollout.tasks.environments.functions:single_turn", HARNESS: ""}
_EXAMPLES = {
    "calculator": "examples/environments.py, and name environments.py:calculator",
    "guess": "examples/environments.py, and name environments.py:guess",
    "python": "examples/python_tool.py and examples/limited.py, and name python_tool.py:python",
    "openenv": "examples/openenv.py, and name openenv.py:openenv",
    "verifiers": "examples/verifiers_task.py, and run it by function=harness (docs/agents.md)",
}
"""Environments that were built in once, and the files that have them now."""


async def single_turn(conversation: Conversation) -> None:
    """Let the model answer the question."""
    await conversation.sample()


def load_environment(config: EnvironmentSection) -> Callable[[Conversation], Awaitable[Any]]:
    """Load the function that `config` names, with its `kwargs`. For `harness` load its program. Raises UserError: there
    is no such function, its module cannot be imported, it is not `async`, or it cannot be called with a conversation
    and `kwargs`."""
    if config.function == HARNESS:
        return _harness(config)
    if (example := _EXAMPLES.get(config.function)) is not None:
        expected = "a function of a file, as this is now an example"
        raise user_error("environment.function", config.function, expected, f"Copy {example}.")
    if config.harness is not None:
        found, expected = f"a program beside function={config.function}", f"function={HARNESS}, which runs it"
        remedy = f"Set environment.function={HARNESS}, or remove environment.harness."
        raise user_error("environment.harness", found, expected, remedy)
    environment = _coroutine(config.function, "environment.function", BUILT_IN, ["a conversation"], config.kwargs)
    return partial(environment, **config.kwargs)


def _harness(config: EnvironmentSection) -> Harness:
    harness = config.harness or HarnessSection()
    if config.kwargs or bool(harness.command) == (harness.program is not None):
        found = "kwargs" if config.kwargs else "both" if harness.command else "neither"
        remedy = "Write harness: {command: [python, agent.py]}, or harness: {program: agent.py:solve}."
        raise user_error("environment.harness", found, "either a command or a program", remedy)
    if harness.tool_parser is not None and harness.tool_parser not in (known := parsers()):
        expected = f"one that SGLang has: {', '.join(sorted(known))}"
        remedy = "Choose the format of the model's family."
        raise user_error("environment.harness.tool_parser", harness.tool_parser, expected, remedy)
    if harness.program is not None:
        given = ["a base URL", "a key", "the problem"]
        return Harness(harness, _coroutine(harness.program, "environment.harness.program", {}, given, {}))
    if harness.directory is not None and not os.path.isdir(harness.directory):
        raise user_error("environment.harness.directory", harness.directory, "a folder", "Correct the path.")
    program = harness.command[0]
    if os.sep in program:  # a path that is still relative is relative to where it runs
        program = os.path.join(os.path.abspath(harness.directory or "."), program)
    if shutil.which(program) is None:
        expected = f"a program that can be run, by its path or in PATH, which is {os.environ.get('PATH', os.defpath)}"
        raise user_error("environment.harness.command", program, expected, "Correct its path, or install it.")
    script = (*harness.command, "")[1]
    file = os.path.abspath(os.path.join(harness.directory or ".", script))
    interpreted = os.path.basename(program).startswith(("python", "bash", "sh")) and script.endswith((".py", ".sh"))
    if interpreted and not os.path.exists(file):
        raise user_error("environment.harness.command", script, f"a file at {file}", "Correct its path.")
    return Harness(harness, None)


def _coroutine(
    name: str, key: str, built_in: dict[str, str], given: list[str], kwargs: dict[str, Any]
) -> Callable[..., Awaitable[Any]]:
    """Load an async function that takes the arguments `given` and `kwargs`. Raises as `load_environment` does."""
    call, label = named_object(name, key, built_in), name.rpartition(":")[2]
    if not inspect.iscoroutinefunction(call):
        remedy = f"Write async def {label}({', '.join(one.split()[-1].lower() for one in given)}): ..."
        raise user_error(key, name, "an async function, because it waits for the model", remedy)
    signature = inspect.signature(call)
    try:
        signature.bind(*[None] * len(given), **kwargs)
    except TypeError as error:
        key = "environment.kwargs" if key == "environment.function" else key
        found, expected = f"{label}({', '.join(signature.parameters)})", f"a function of {', '.join([*given, *kwargs])}"
        remedy = "Correct kwargs, or the function's parameters."
        raise user_error(key, found, f"{expected}; {error}", remedy) from error
    return call

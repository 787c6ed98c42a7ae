"""Finds the function of an environment by its name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from numerics.errors import user_error
from rollout.environments.config import EnvironmentConfig
from rollout.environments.conversation import Conversation
from rollout.named_functions import named_object, signature_of

Environment = Callable[[Conversation], Awaitable[Any]]

BUILT_IN = {
    "single_turn": "rollout.environments.single_turn:single_turn",
    "calculator": "rollout.environments.calculator:calculator",
    "python": "rollout.environments.python:python",
    "guess": "rollout.environments.guess:guess",
}


def load_environment(config: EnvironmentConfig, key: str = "environment") -> Environment:
    """The function that `config` names, with its `kwargs`.

    Raises:
        UserError: naming `key`: there is no such function, its module cannot be imported, it is not `async`, or it
            cannot be called with a conversation and `kwargs`.
    """
    call = named_object(config.function, f"{key}.function", BUILT_IN)
    if not inspect.iscoroutinefunction(call):
        raise user_error(
            f"{key}.function",
            found=config.function,
            expected="an async function, as it waits for the model",
            remedy=f"Write async def {config.label}(conversation): ...",
        )
    signature = signature_of(call, config.function, f"{key}.function")
    try:
        signature.bind(None, **config.kwargs)
    except TypeError as error:
        raise user_error(
            f"{key}.kwargs",
            found=f"{config.label}({', '.join(signature.parameters)})",
            expected=f"a function of {', '.join(['a conversation', *config.kwargs])}; {error}",
            remedy="Correct kwargs, or the function's parameters.",
        ) from error
    return partial(call, **config.kwargs)

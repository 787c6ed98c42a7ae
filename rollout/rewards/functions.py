"""From the name of a reward function to something that can be called: found, imported, and its signature looked at.

A function names what it wants to see as its parameters:

    one answer        question, answer (its text), reference (the data's), fields (the data's further columns),
                      finished, tokens (their number)
    a whole group     question, answers, reference, fields, finished, tokens: lists but for what is of the problem

and returns a number or named numbers; for a group, a list of these. It may be `async`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from numerics.errors import UserError, user_error
from rollout.rewards.builtin import BUILT_IN
from rollout.rewards.config import RewardConfig

OFFERED = ("question", "answer", "answers", "reference", "fields", "finished", "tokens")
Parts = dict[str, float]
"""What a function says of one answer; the name is empty where it returned a plain number."""


class RewardValueError(Exception):
    """A reward function returned something else than numbers."""


@dataclass(frozen=True)
class RewardFunction:
    """asks: its parameters out of `OFFERED`. of_group: it judges all answers of a prompt in one call."""

    config: RewardConfig
    call: Callable[..., Any]
    asks: tuple[str, ...]

    @property
    def of_group(self) -> bool:
        return "answers" in self.asks

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call)

    def asked(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """What it wants to see of all that it could ask for."""
        return {name: offered[name] for name in self.asks}

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        """What it returns, of all that it could ask for."""
        return self.call(**self.asked(offered), **self.config.kwargs)

    def parts(self, returned: Any, answers: int) -> list[Parts]:
        """Its verdict on each of the answers that a call was about. Raises RewardValueError."""
        if not self.of_group:
            return [_parts(returned)]
        if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != answers:
            raise RewardValueError(f"found {_brief(returned)}, expected a list of {answers} rewards, one per answer")
        return [_parts(value) for value in returned]


def load_function(config: RewardConfig, key: str) -> RewardFunction:
    """The function that `config` names.

    Raises:
        UserError: naming `key`: there is no such function, its module cannot be imported, or it cannot be called with
            what is offered and `kwargs`.
    """
    call = _found(config.function, f"{key}.function")
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError) as error:
        raise user_error(
            f"{key}.function",
            found=config.function,
            expected="a function",
            remedy="Name a function whose parameters Python can see.",
        ) from error
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if unknown := [name for name in config.kwargs if (name not in named and not takes_any) or name in OFFERED]:
        raise user_error(
            f"{key}.kwargs",
            found=unknown[0],
            expected=f"parameters of {config.function} besides {', '.join(OFFERED)}: {', '.join(named)}",
            remedy="Correct kwargs, or give the function such a parameter.",
        )
    asks = tuple(name for name in OFFERED if name in named)
    missing = [
        n for n in named if n not in (*OFFERED, *config.kwargs) and parameters[n].default is inspect.Parameter.empty
    ]
    if missing or ("answer" in asks) == ("answers" in asks):
        raise user_error(
            f"{key}.function",
            found=f"{config.function}({', '.join(parameters)})",
            expected=f"a function of answer, or of answers for a whole group, and any of {', '.join(OFFERED)}"
            + (f"; kwargs give no {', '.join(missing)}" if missing else ""),
            remedy="Rename its parameters, give them defaults, or set them in kwargs.",
        )
    return RewardFunction(config, call, asks)


def _found(name: str, key: str) -> Callable[..., Any]:
    where, colon, function = name.rpartition(":")
    if not colon:
        if name not in BUILT_IN:
            raise user_error(
                key,
                found=name,
                expected=f"{', '.join(BUILT_IN)}, package.module:name or path/to/file.py:name",
                remedy="Correct the name, or say where your function is.",
            )
        where, _, function = BUILT_IN[name].function.rpartition(":")
    try:
        module = _module_of_file(where) if where.endswith(".py") else _module(where)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a module may do anything while it is imported, sys.exit() included
        raise user_error(
            key,
            found=name,
            expected=f"a module that can be imported; this one ends in {type(error).__name__}: {error}",
            remedy=f"Correct it, or where it is looked for: in {os.getcwd()} and where Python looks.",
        ) from error
    call = getattr(module, function, None)
    if not callable(call):
        names = [
            n
            for n, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        raise user_error(
            key,
            found=name,
            expected=f"a function of {where}, which has {', '.join(names) or 'none'}",
            remedy="Correct the name after the colon.",
        )
    found: Callable[..., Any] = call
    return found


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _module_of_file(path: str) -> Any:
    name = "fp8rl_reward_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _parts(value: Any) -> Parts:
    if isinstance(value, Mapping) and value:
        return {str(name): _number(part) for name, part in value.items()}
    return {"": _number(value)}


def _number(value: Any) -> float:
    # NumPy's and torch's scalars convert, text does not.
    if isinstance(value, str | bytes | None) or not (isinstance(value, Real) or hasattr(value, "__float__")):
        raise RewardValueError(f"found {_brief(value)}, expected a number or named numbers")
    number = float(value)
    if not math.isfinite(number):
        raise RewardValueError(f"found {number}, expected a finite number")
    return number


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"

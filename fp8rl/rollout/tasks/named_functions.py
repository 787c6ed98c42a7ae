"""Imports users' functions and classes by the names in a spec."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from fp8rl.numerics.core.errors import UserError, shown, user_error
from fp8rl.numerics.core.files import module_of_file


def named_object(name: str, key: str, built_in: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function or class with this name: a built-in name, `package.module:name`, or `path/to/file.py:name`.

    built_in: for each built-in name `package.module:name`. Raises UserError, which names `key`: there is no such
    function, or its module cannot be imported.
    """
    where, colon, function = name.rpartition(":")
    if not colon:
        if name not in built_in:
            meant = "".join(f"Did you mean {near}? " for near in difflib.get_close_matches(name, built_in, n=1))
            expected = f"{', '.join(built_in)}, package.module:name or path/to/file.py:name"
            raise user_error(key, name, expected, f"{meant}Correct the name, or say where your function is.")
        where, _, function = built_in[name].rpartition(":")
    try:
        if where.endswith(".py"):
            module = module_of_file(where, key)
        else:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            module = importlib.import_module(where)
        call = getattr(module, function, None)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # whatever a module may raise while it is imported or asked, sys.exit() included
        expected = f"a module that can be imported; this one ends in {type(error).__name__}: {error}"
        remedy = f"Correct it, or move it: it was searched in {os.getcwd()} and on Python's path."
        raise user_error(key, name, expected, remedy) from error
    if not callable(call):
        names = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        expected = f"a function or class of {where}, which has {', '.join(names) or 'none'}"
        raise user_error(key, name, expected, "Correct the name after the colon.")
    found: Callable[..., Any] = call
    try:
        inspect.signature(found)
    except ValueError as error:  # a function written in C may have none
        remedy = "Write a function of yours that calls it."
        raise user_error(key, name, "a function whose parameters Python can tell", remedy) from error
    return found


# The numbers that a user's function returns: one, or some with names.

Numbers = dict[str, float]
"""Numbers by name. The name of a plain number is empty."""


class ReturnError(Exception):
    """A user's function returned a value that is not allowed."""


def named_numbers(value: Any) -> Numbers:
    """Return the numbers that a function returned. Raises ReturnError if a value is no finite number."""
    if isinstance(value, Mapping) and value:
        return {str(name): _number(part) for name, part in value.items()}
    return {"": _number(value)}


def is_finite(number: float) -> bool:
    """Return True if a number is finite in FP32, the type in which algorithms compute: it does not round to 2^128."""
    return abs(number) < 2.0**128 - 2.0**103


def brief(value: object) -> str:
    """Return a value with its type as a short text, for a message."""
    return f"{type(value).__name__} {shown(value, 80)}"


def _number(value: Any) -> float:
    # NumPy's and torch's scalars convert, text does not.
    if isinstance(value, str | bytes | None) or not (isinstance(value, Real) or hasattr(value, "__float__")):
        raise ReturnError(f"found {brief(value)}, expected a number or named numbers")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not is_finite(number):
        raise ReturnError(f"found {number}, expected a finite number in FP32")
    return number

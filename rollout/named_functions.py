"""A user's function, found by the name that an experiment gives it, and imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numerics.errors import UserError, user_error


def named_object(name: str, key: str, built_in: Mapping[str, str]) -> Callable[..., Any]:
    """The function that `name` stands for: one of ours, `package.module:name`, or `path/to/file.py:name`.

    built_in: ours, `package.module:name` by name.

    Raises:
        UserError: naming `key`: there is no such function, or its module cannot be imported.
    """
    where, colon, function = name.rpartition(":")
    if not colon:
        if name not in built_in:
            raise user_error(
                key,
                found=name,
                expected=f"{', '.join(built_in)}, package.module:name or path/to/file.py:name",
                remedy="Correct the name, or say where your function is.",
            )
        where, _, function = built_in[name].rpartition(":")
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
    name = "fp8rl_user_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

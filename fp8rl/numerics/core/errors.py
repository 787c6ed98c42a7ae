"""Reports wrong values in a spec, a data file or a model directory (`UserError`), and prints text to a terminal.
Control characters in text from a user, a model or a server are replaced before the text is printed.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ParamSpec, TextIO

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal, except tabs and ends of lines, or that turn the direction of the text."""
P = ParamSpec("P")


class UserError(ValueError):
    """Wrong input. The command line prints the message alone and exits with code 2.

    The message names the key, the value found, the value expected and the remedy; :func:`user_error` builds it. The
    attributes `key`, `found`, `expected` and `remedy` hold these parts; they are empty if the error was made from a
    whole message.
    """

    key = found = expected = remedy = ""


def user_error(key: str, found: object, expected: str, remedy: str) -> UserError:
    """Return the error for `key`. found: the value found (strings are quoted). remedy: an imperative sentence."""
    error = UserError(f"{key}: found {shown(found)}, expected {expected}. {remedy}")
    error.key, error.found, error.expected, error.remedy = key, shown(found), expected, remedy
    return error


def shown(value: object, limit: int = 160) -> str:
    """Return `value` as a user would write it, cut to `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def listed(names: Iterable[object], between: str = ", ", limit: int = 400) -> str:
    """Return names joined by `between`, cut to `limit` characters."""
    text = between.join(map(str, names))
    return text if len(text) <= limit else f"{text[:limit]}..."


def raise_first(refusals: Iterable[UserError]) -> None:
    """Raise the first error of a generator of rules, if there is one. A rule may rely on the rules before it."""
    for refusal in refusals:
        raise refusal


def refusing(rules: Callable[P, Iterator[UserError]]) -> Callable[P, None]:
    """Turn a generator of errors, one for each broken rule, into a function that raises the first error."""

    @functools.wraps(rules)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        raise_first(rules(*args, **kwargs))

    return check


def printable(text: str, instead: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Return the text with `instead` in place of each character that controls a terminal; lines and tabs stay.

    Half of a surrogate pair, which a path may have and no terminal prints, becomes a question mark.
    """
    return _OBEYED.sub(instead, text).encode("utf-8", "replace").decode()


def say(text: object, to: TextIO | None = None) -> None:
    """Print a line at once, to the standard output by default."""
    print(printable(str(text)), file=to or sys.stdout, flush=True)


def say_error(text: object) -> None:
    """Print a line at once to the standard error."""
    say(text, sys.stderr)


def typed(command: str) -> str:
    """Return how to call a command of this environment: by its name if the shell finds it, else by its path."""
    file, found = Path(sys.executable).with_name(command), shutil.which(command)
    return command if found is not None and os.path.realpath(found) == os.path.realpath(file) else os.path.relpath(file)

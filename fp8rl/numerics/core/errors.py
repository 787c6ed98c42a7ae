"""The one error that is the user's to mend: a wrong value in a spec, a data file or a model directory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec

P = ParamSpec("P")


class UserError(ValueError):
    """Wrong input. The command line prints the message alone and exits with code 2.

    The message names the key, the value found, the value expected and the remedy; :func:`user_error` builds it. The
    attributes `key`, `found`, `expected` and `remedy` hold these parts; they are empty in an error that was given its
    message whole.
    """

    key = found = expected = remedy = ""


def user_error(key: str, found: object, expected: str, remedy: str) -> UserError:
    """Return the error for `key`: `found` is the value found (strings are quoted), `remedy` an imperative sentence."""
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
    """Raise the first refusal of a generator of rules, if there is one. A rule may rely on the rules before it."""
    for refusal in refusals:
        raise refusal


def refusing(rules: Callable[P, Iterator[UserError]]) -> Callable[P, None]:
    """Make a generator of rules a check, which raises the first refusal."""

    @functools.wraps(rules)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        raise_first(rules(*args, **kwargs))

    return check

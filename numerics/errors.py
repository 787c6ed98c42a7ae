"""The one error that is the user's to mend: a wrong value in a spec, a data file or a model directory."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong input. The command line prints the message alone and exits with code 2.

    The message names the key, the value found, the value expected and the remedy; :func:`user_error` builds it.

    Attributes:
        key, found, expected, remedy: these parts; empty in an error that was given its message whole.
    """

    key = found = expected = remedy = ""


def user_error(key: str, *, found: object, expected: str, remedy: str) -> UserError:
    """The error for `key`: `found` is the offending value (strings are quoted), `remedy` an imperative sentence."""
    error = UserError(f"{key}: found {shown(found)}, expected {expected}. {remedy}")
    error.key, error.found, error.expected, error.remedy = key, shown(found), expected, remedy
    return error


def shown(value: object, limit: int = 160) -> str:
    """`value` as a user would write it, cut to `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."

"""The one error that is the user's to mend: a wrong value in a spec, a data file or a model directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")


class UserError(ValueError):
    """Wrong input. The command line prints the message alone and exits with code 2.

    The message names the key, the value found, the value expected and the remedy; :func:`user_error` builds it. The
    attributes `key`, `found`, `expected` and `remedy` hold these parts; they are empty in an error that was given its
    message whole.
    """

    key = found = expected = remedy = ""


def user_error(key: str, *, found: object, expected: str, remedy: str) -> UserError:
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
    """Return names in a row, cut to `limit` characters."""
    text = between.join(map(str, names))
    return text if len(text) <= limit else f"{text[:limit]}..."


@dataclass(frozen=True)
class Rule(Generic[S]):
    """Something that a spec may not say, as a row of a table. Each text is given, or made from the subject that breaks
    the rule: an experiment, or a model in a layout."""

    key: str | Callable[[S], str]
    when: Callable[[S], object]
    """It is true of a subject that breaks the rule."""
    found: object | Callable[[S], object]
    expected: str | Callable[[S], str]
    remedy: str | Callable[[S], str]

    def refusal(self, subject: S) -> UserError | None:
        """Return the error of a subject that breaks the rule; None if it keeps it."""
        if not self.when(subject):
            return None
        return user_error(
            self.key(subject) if callable(self.key) else self.key,
            found=self.found(subject) if callable(self.found) else self.found,
            expected=self.expected(subject) if callable(self.expected) else self.expected,
            remedy=self.remedy(subject) if callable(self.remedy) else self.remedy,
        )


def check_rules(rules: Iterable[Rule[S]], subject: S) -> None:
    """Raise `UserError` for the first rule that the subject breaks; those behind it may rely on it."""
    for rule in rules:
        refusal = rule.refusal(subject)
        if refusal is not None:
            raise refusal

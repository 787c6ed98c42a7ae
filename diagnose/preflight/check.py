"""One thing that a preflight looked at, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8rl.numerics.errors import UserError

Agreement = Literal["spec", "bytes", "logprobs"]
"""Same spec, same bytes, same log-probabilities."""


@dataclass(frozen=True)
class Check:
    """One thing that both sides must agree on, and whether they do.

    Attributes:
        agreement: the agreement that it belongs to.
        found, expected: as text. remedy: what to do, empty where nothing is wrong.
    """

    agreement: Agreement
    name: str
    ok: bool
    found: str
    expected: str
    remedy: str = ""


def judged(agreement: Agreement, name: str, ok: bool, *, found: str, expected: str, remedy: str) -> Check:
    """A check that keeps its remedy only if it failed."""
    return Check(agreement, name, ok, found, expected, "" if ok else remedy)


def refused(agreement: Agreement, name: str, error: UserError) -> Check:
    """The check that failed with `error`."""
    found = f"{error.key} = {error.found}" if error.key else str(error)
    return Check(agreement, name, False, found, error.expected, error.remedy)

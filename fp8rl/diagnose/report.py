"""The report of a diagnosis: facts, tables, findings and a verdict, as JSON with a schema and on a terminal."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import TypeAdapter
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.numerics.core.errors import UserError

SCHEMA = 1
"""The version of the JSON. It grows when a key changes its meaning or is removed."""
Grade = Literal["good", "warning", "bad"]
_STYLES: dict[Grade, str] = {"good": "bold green", "warning": "bold yellow", "bad": "bold red"}


class Report(ABC):
    """Base of the reports' dataclasses. A report's JSON has the fields, `schema`, `ok` and the `derived` keys."""

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Nothing is wrong."""

    def derived(self) -> dict[str, Any]:
        """Return further keys of the JSON, computed from the fields."""
        return {}

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_json(self) -> str:
        values = {"schema": SCHEMA, "ok": self.ok} | self.derived() | self.plain()
        return json.dumps(values, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a report. Raises ValueError if its schema is not `SCHEMA`."""
        values = json.loads(text)
        if values.get("schema") != SCHEMA:
            raise ValueError(f"schema: found {values.get('schema')}, expected {SCHEMA}")
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True)
class Difference:
    """abs(d) of two log-probabilities of the same tokens, in nats; a number is None if no token is left."""

    tokens: int
    """The number of tokens with finite d; means and fractions are over these."""
    nonfinite: int
    """The number of tokens whose d is not finite."""
    mean: float | None
    p99: float | None
    max: float | None
    exact_frac: float | None
    """The fraction of the tokens with d == 0."""
    p50: float | None = None
    k3_kl: float | None = None
    """KL(second || first) by the estimate k3, per token (`rl.mismatch`)."""

    @property
    def zero(self) -> bool:
        """Every token has d == 0."""
        return self.nonfinite == 0 and self.max == 0.0

    def __str__(self) -> str:
        """Write it as `|d| mean 0, p99 0, max 0, exact 1 on 640 tokens`."""
        if self.mean is None or self.exact_frac is None:
            return f"no finite d, {self.nonfinite} that are not"
        rest = f", {self.nonfinite} not finite" if self.nonfinite else ""
        return (
            f"|d| mean {shown_number(self.mean)}, p99 {shown_number(self.p99)}, max {shown_number(self.max)}, "
            f"exact {self.exact_frac:.4g} on {self.tokens} tokens{rest}"
        )


def shown_number(value: float | None) -> str:
    """Write a number as `1.23e-04`; zero is `0` and None is `none`."""
    return "none" if value is None else "0" if value == 0 else f"{value:.2e}"


@dataclass(frozen=True)
class Remark:
    """One thing about a machine or spec that its user should know."""

    blocks: bool
    """The spec cannot run before this is mended. Any other remark is on lost speed, or on what is not known to work."""
    key: str
    found: str
    expected: str
    remedy: str

    @classmethod
    def refusal(cls, error: UserError) -> Self:
        """Make a remark of an error. An error that has only a message gets it as `remedy`, without a key."""
        return cls(True, error.key, error.found, error.expected, error.remedy if error.key else str(error))

    def shown(self, blocking: str, other: str) -> Text:
        """Render the remark after the label of its kind."""
        text = graded(f"{blocking if self.blocks else other:<10}", "bad" if self.blocks else "warning")
        what = f"{self.key}: found {self.found}, expected {self.expected}. " if self.key else ""
        text.append(f"{what}{self.remedy}", style="not bold")
        return text


def graded(text: str, grade: Grade) -> Text:
    return Text(text, style=_STYLES[grade])


def grid(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, numbers: int | None = None, title: str = ""
) -> Table:
    """Make a table. It has a frame if it has a title; the columns from index `numbers` on are numbers."""
    table = Table(title=title) if title else Table(box=None, pad_edge=False)
    for index, heading in enumerate(columns):
        right = numbers is not None and index >= numbers
        table.add_column(heading, justify="right" if right else "left", overflow="ellipsis" if title else "fold")
    for row in rows:
        table.add_row(*row)
    return table

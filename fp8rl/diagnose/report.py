"""The report of a diagnosis: findings and the facts behind them, on a terminal or as JSON with a schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self

from pydantic_core import to_jsonable_python
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.record.console import format_difference
from fp8rl.rollout.engine.protocol import LIBRARIES
from fp8rl.weight_sync.manifest import some_of

SCHEMA = 3
"""The version of the JSON. It grows when a key changes its meaning or is removed."""
Grade = Literal["ok", "note", "warning", "error"]
_STYLES: dict[Grade, str] = {"ok": "bold green", "note": "bold", "warning": "bold yellow", "error": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was found about a machine, a spec or a run, and what to do about it."""

    key: str
    """A key of the spec, or the name of what was checked; empty if `found` is a whole message."""
    found: str
    expected: str = ""
    remedy: str = ""
    grade: Grade = "error"
    """`error`: it cannot run, or something differs. `warning`: it runs slower, or may not work."""
    names: tuple[str, ...] = ()
    """The Hugging Face names of the tensors, or the places of the ops, that the finding is about."""

    @classmethod
    def of_error(cls, error: UserError) -> Self:
        """Make a finding of an error. If the error has only a message, `found` is the message and `key` is empty."""
        return cls(error.key, error.found or str(error), error.expected, error.remedy)

    def __str__(self) -> str:
        named = f"{self.key}: " if self.key else ""
        about = f" ({some_of(self.names)})" if self.names else ""
        if self.grade == "ok":
            return f"{named}{self.found}{about}"
        found = f"found {self.found}, expected {self.expected}{about}." if self.expected else f"{self.found}{about}"
        return f"{named}{found} {self.remedy}".rstrip()


@dataclass(frozen=True)
class Report:
    """What a command has found. Its JSON has `schema`, and all fields except the terminal's."""

    command: str
    subject: str
    """The run, capsule, spec or model that was looked at; empty: this machine."""
    findings: tuple[Finding, ...]
    """The most important first. Of findings that explain a difference, the first is the likeliest."""
    facts: Mapping[str, Any]
    """What was read or measured, in JSON as `plain` gives it."""
    versions: Mapping[str, str] = field(
        default_factory=lambda: {
            name: installed_version(name) or "not installed" for name in (*LIBRARIES, "megatron-core")
        }
    )
    """The versions of fp8rl and of the libraries that it computes with."""
    tables: tuple[RenderableType, ...] = field(default=(), compare=False)
    """The facts for the terminal."""
    verdict: str = field(default="", compare=False)
    """The last line for the terminal."""

    @property
    def ok(self) -> bool:
        """Nothing differs and nothing prevents a run, so the exit code is 0."""
        return all(finding.grade != "error" for finding in self.findings)

    def to_json(self) -> str:
        names = ("command", "subject", "versions", "findings", "facts")
        values = {"schema": SCHEMA} | {name: plain(getattr(self, name)) for name in names}
        return json.dumps(values, indent=1, allow_nan=False)

    def __rich__(self) -> RenderableType:
        """Render the tables, then the findings, then the verdict."""
        found = Table.grid(padding=(0, 2, 0, 0))
        for each in self.findings:
            found.add_row(graded(each.grade, each.grade), Text(str(each), overflow="fold"))
        lines = [line for part in self.tables for line in (part, Text())]
        return Group(*lines, *([found] if self.findings else []), graded(self.verdict, "ok" if self.ok else "error"))


def plain(value: Any) -> Any:
    """Return a fact as JSON values: a dataclass is an object, and a number that is not finite is null."""
    return to_jsonable_python(value, inf_nan_mode="null")


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Difference:
    """abs(d) between two log-probabilities of the same tokens, in nats. A number is None if no token has a finite d."""

    tokens: int
    """The number of tokens with finite d. Means and fractions are over these tokens."""
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
    return "none" if value is None else format_difference(value)


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

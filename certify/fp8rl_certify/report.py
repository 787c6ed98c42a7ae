"""The base class of a report, which is JSON with a schema, and the numbers in it."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from pydantic import TypeAdapter

SCHEMA = 1
"""Version of the JSON. It grows when a key changes its meaning or is removed."""


class Report(ABC):
    """Base class of a dataclass of findings. Its JSON has the fields, `schema`, `ok` and the keys of `derived`."""

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether nothing is wrong."""

    @abstractmethod
    def derived(self) -> dict[str, Any]:
        """Return further keys of the JSON, computed from the fields."""

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return json.dumps({"schema": SCHEMA, "ok": self.ok} | self.derived() | fields, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a report from its JSON. Raises ValueError for another schema."""
        values = json.loads(text)
        if values.get("schema") != SCHEMA:
            raise ValueError(f"schema: found {values.get('schema')}, expected {SCHEMA}")
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True)
class Difference:
    """Statistics of abs(d) in nats, where d is the difference of two log-probabilities of a token. A statistic is None
    if no token has a finite d."""

    tokens: int
    """Number of tokens with finite d: the denominator."""
    nonfinite: int
    """Number of tokens without a finite d."""
    mean: float | None
    p99: float | None
    max: float | None
    exact_frac: float | None
    """The share of tokens with d == 0."""
    p50: float | None = None
    k3_kl: float | None = None
    """KL(second || first) by the estimate k3, per token."""


def shown_number(value: float | None) -> str:
    """Format a number as `1.23e-04`; 0 for zero, `none` for None."""
    return "none" if value is None else "0" if value == 0 else f"{value:.2e}"

"""The JSON of what a diagnosis found."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from typing import Any, Self

from pydantic import TypeAdapter

SCHEMA = 1
"""The version of the JSON; it grows when a key changes its meaning or goes."""


class Report(ABC):
    """Base of the dataclasses of findings. Their JSON has the fields, `schema`, `ok` and what is `derived`."""

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether nothing is wrong."""

    def derived(self) -> dict[str, Any]:
        """What the JSON says besides, computed from the fields."""
        return {}

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return json.dumps({"schema": SCHEMA, "ok": self.ok} | self.derived() | fields, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError for another schema."""
        values = json.loads(text)
        if values.get("schema") != SCHEMA:
            raise ValueError(f"schema: found {values.get('schema')}, expected {SCHEMA}")
        return TypeAdapter(cls).validate_python(values)

"""What the rows of a dump are read into, and how each way of reading checks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8rl.diagnose.certify.dump.row import DumpRow, Sampling, checked_row
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.errors import user_error

SCHEMA_KEYS = frozenset(DumpRow.model_fields)


@dataclass(frozen=True)
class Dump:
    """What a file holds.

    kind: what wrote it, in words. rows: with at least one token that the model has sampled. places: of each row in its
        file, in words.
    sampling: of rows that do not say theirs, where the file or its run does.
    unread: keys that were not looked at.
    model: directory of the weights, where the dump knows it. checkpoint: whose weights are loaded over those of the
        directory. numerics: of the run that it is from.
    """

    kind: str
    rows: list[DumpRow]
    places: list[str]
    sampling: Sampling | None = None
    unread: list[str] = field(default_factory=list)
    model: Path | None = None
    checkpoint: Path | None = None
    numerics: NumericsConfig | None = None


def whole(path: Path, kind: str, found: Iterator[tuple[str, dict[str, Any]]], sampling: Sampling | None = None) -> Dump:
    """The dump of plain rows, each with its place in words."""
    every: list[tuple[str, DumpRow]] = []
    unread: dict[str, None] = {}
    for place, values in found:
        every.append((place, checked_row(values, f"{place} of {path}")))
        unread |= dict.fromkeys(key for key in values if key not in SCHEMA_KEYS)
    used = [(place, row) for place, row in every if row.sampled]
    if not used:
        raise user_error(
            "DUMP",
            found=f"{path} with {len(every)} rows" + (", and no token that was sampled" if every else ""),
            expected="at least one answer",
            remedy="Write rows of token ids and log-probabilities; docs/certify.md has the schema.",
        )
    return Dump(kind, [row for _, row in used], [place for place, _ in used], sampling, list(unread))

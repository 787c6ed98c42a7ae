"""Problems as the data have them: JSON lines in GSM8K's shape."""

from __future__ import annotations

import json
from pathlib import Path

from numerics.errors import UserError, user_error
from numerics.reading import read_bytes
from rollout.tasks import Problem


def load_problems(path: str | Path, key: str = "data") -> list[Problem]:
    """The problems of a JSONL file in file order; further keys are kept as its fields.

    Raises:
        UserError: the file is missing or empty, or a line is broken. The message names `key` and the line's number.
    """
    path = Path(path)
    remedy = "Correct the path; a relative one is relative to the spec file that it is written in."
    lines = read_bytes(path, key, "an existing JSONL file", remedy).splitlines(keepends=True)
    problems = [_parse_line(line, number, path, key) for number, line in enumerate(lines, start=1)]
    if not problems:
        raise user_error(
            key,
            found=f"{path} without a line",
            expected="at least one problem",
            remedy='Add lines such as {"question": "2+3=?", "answer": "#### 5"}.',
        )
    return problems


def _parse_line(line: bytes, number: int, path: Path, key: str) -> Problem:
    where = f"{key}: line {number} of {path}"
    remedy = f"Correct or remove line {number}."
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise user_error(where, found=line, expected="UTF-8 text", remedy=remedy) from error
    except (ValueError, RecursionError) as error:  # besides bad syntax: numbers of thousands of digits, deep nesting
        found = line.decode("utf-8").rstrip("\n")
        raise user_error(where, found=found, expected=f"valid JSON ({error})", remedy=remedy) from error
    if not isinstance(record, dict):
        raise user_error(where, found=record, expected="a JSON object", remedy=remedy)
    for field in ("question", "answer"):
        if field not in record:
            raise UserError(f"{where}: found no {field!r}, expected question and answer. {remedy}")
        if not _is_text(record[field]):
            raise user_error(f"{where}: {field}", found=record[field], expected="non-empty text", remedy=remedy)
    return Problem(record.pop("question"), record.pop("answer"), fields=record)


def _is_text(value: object) -> bool:
    """Non-blank text that UTF-8 can encode; JSON escapes may spell half of a surrogate pair, which it cannot."""
    return isinstance(value, str) and bool(value.strip()) and value.encode("utf-8", "replace").decode() == value

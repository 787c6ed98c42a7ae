"""Text that others wrote, as values: what would break a program further on is refused where it is read."""

from __future__ import annotations

import json
import math
from typing import Any

DEEPEST = 100
"""Lists and objects in one another. Python has a stack for a thousand calls, of which templates take some for each."""

_MOST_DIGITS = 300


def parse_json(data: str | bytes, finite: bool = True) -> Any:
    """The value that a JSON text stands for; bytes are UTF-8. finite: numbers are; else Python's `NaN` and `Infinity`
    are, too, as fp8rl itself writes them.

    Raises:
        ValueError: it is no JSON or no text, or has a number that no double reaches; it is nested more than `DEEPEST`
            deep.
    """
    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        number = _finite if finite else float
        value = json.loads(text, parse_float=number, parse_constant=number, parse_int=_whole)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, and no text
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:20]}")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:  # which no double reaches, and of thousands of which Python makes no number
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects in one another, more than {DEEPEST} deep")

"""What a user's function has returned: a number, or named numbers."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from numbers import Real
from typing import Any

Numbers = dict[str, float]
"""Numbers by name; the name is empty where a function returned a plain number."""


class ReturnError(Exception):
    """A user's function returned something else than it may."""


def named_numbers(value: Any) -> Numbers:
    """The numbers that a function returned. Raises ReturnError: it returned none, or one that is not finite."""
    if isinstance(value, Mapping) and value:
        return {str(name): _number(part) for name, part in value.items()}
    return {"": _number(value)}


def is_finite(number: float) -> bool:
    """Return whether a number is finite in FP32, in which algorithms compute."""
    try:
        struct.pack("<f", number)
    except OverflowError:
        return False
    return math.isfinite(number)


def brief(value: object) -> str:
    """A value with its type, short enough for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _number(value: Any) -> float:
    # NumPy's and torch's scalars convert, text does not.
    if isinstance(value, str | bytes | None) or not (isinstance(value, Real) or hasattr(value, "__float__")):
        raise ReturnError(f"found {brief(value)}, expected a number or named numbers")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not is_finite(number):
        raise ReturnError(f"found {number}, expected a finite number in FP32")
    return number

"""The reward `format`: answers of a certain form."""

from __future__ import annotations

import re


def format(answer: str, finished: bool, pattern: str) -> float:
    """1 if the model ended the answer and all of it matches the regular expression `pattern`, with `.` for any
    character, else 0."""
    return float(finished and re.fullmatch(pattern, answer, re.DOTALL) is not None)

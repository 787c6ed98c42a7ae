"""The reward `integer`: the exact integer at the end of an answer."""

from __future__ import annotations

import re

INTEGER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})")


def integer(answer: str, reference: str, finished: bool) -> float:
    """1 if the model ended the answer, and it closes with `####` and the integer that closes the reference; else 0."""
    gold = final_integer(reference)
    return float(finished and gold is not None and final_integer(answer) == gold)


def final_integer(text: str) -> int | None:
    """The integer between the last `####` and the very end of `text`; at most one space before it, none after."""
    _, marker, tail = text.rpartition("####")
    tail = tail.removeprefix(" ")
    if not marker or not INTEGER.fullmatch(tail):
        return None
    return int(tail.replace(",", ""))

"""The reward `length`: a price on long answers."""

from __future__ import annotations


def length(answer: str, tokens: int, free: int) -> float:
    """0 up to `free` tokens, and less by 1 for each `free` tokens more."""
    return min(0.0, 1.0 - tokens / free)

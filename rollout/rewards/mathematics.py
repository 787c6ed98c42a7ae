"""The reward `math`: an answer whose last expression math-verify finds equal to the reference."""

from __future__ import annotations

import logging

from rollout.rewards.integer import final_integer


def math(answer: str, reference: str, finished: bool) -> float:
    """1 if the model ended the answer and its last expression equals the reference's result (after `####`, if there is
    one), else 0. An answer that breaks math-verify is wrong.

    Raises:
        ValueError: `reference` holds no expression that math-verify can read.
    """
    if not finished:
        return 0.0
    gold = final_integer(reference)
    if gold is not None and final_integer(answer) == gold:
        return 1.0
    from math_verify import parse, verify

    _, marker, tail = reference.rpartition("####")
    result = tail.strip() if marker else reference
    # The caller's deadline replaces math-verify's own.
    expected = parse(f"${result}$", parsing_timeout=None) or parse(result, parsing_timeout=None)
    if not expected:
        raise ValueError(f"found {reference!r}, expected a reference with an expression that math-verify can read")
    try:
        return float(verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None))
    except Exception:  # sympy raises nearly anything on adversarial text, and such an answer is wrong
        return 0.0


def prepare() -> None:
    """Do what the first comparison of a process spends seconds on."""
    logging.disable(logging.CRITICAL)
    math("$\\frac{1}{2}$", "0.5", finished=True)

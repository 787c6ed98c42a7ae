"""The child process of `rollout.rewards`: reads `[text, gold]` as JSON lines, answers one word per line."""

from __future__ import annotations

import json
import logging
import resource
import sys

from math_verify import parse, verify

MEMORY_LIMIT = 4 * 2**30  # 9^9^9^9 must fail here, not exhaust the machine


def compare(text: str, gold: str) -> str:
    """`equal` or `different`; `unreadable` if `gold` holds no expression, `failed` if math-verify breaks."""
    # The parent's deadline replaces math-verify's own.
    expected = parse(f"${gold}$", parsing_timeout=None) or parse(gold, parsing_timeout=None)
    if not expected:
        return "unreadable"
    found = parse(text, parsing_timeout=None)
    return "equal" if verify(expected, found, timeout_seconds=None) else "different"


def main() -> None:
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    compare("$\\frac{1}{2}$", "0.5")  # the first comparison imports for seconds, which are not the answer's
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            status = compare(*json.loads(line))
        except Exception:
            status = "failed"  # sympy raises nearly anything on adversarial text, and such an answer is wrong
        print(status, flush=True)


if __name__ == "__main__":
    main()

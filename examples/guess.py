"""The guessing game: `python -m examples.guess --out examples/data` writes its file.

A question such as `2-8?` names seven digits, one of which is hidden. Three guesses with a hint after each find any of
them, by halving; three guesses without looking at the hints find three of seven.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DIGITS, WIDTH = 10, 7


def problems() -> list[dict[str, str]]:
    """Every window of seven digits with every digit hidden in it."""
    return [
        {"question": f"{low}-{low + WIDTH - 1}?", "answer": f"#### {hidden}"}
        for low in range(DIGITS - WIDTH + 1)
        for hidden in range(low, low + WIDTH)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.guess", description="Write the guessing game.")
    parser.add_argument("--out", type=Path, required=True, help="folder for guess.jsonl")
    out: Path = parser.parse_args().out
    lines = [json.dumps(problem, separators=(",", ":")) + "\n" for problem in problems()]
    (out / "guess.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{out / 'guess.jsonl'}: {len(lines)} lines")


if __name__ == "__main__":
    main()

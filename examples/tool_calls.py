"""Chains such as `9+4-5=?` that are worked out by calls of a tool: `python -m examples.tool_calls --out examples/data`
writes the problems, and a warm start that shows the model how tools are called.

The teacher calls `add` twice, each time in a turn of its own, and says the result in a third. A chain of the warm start
is three lines: a chat up to each of the model's turns, and that turn.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any


def call(a: int, b: int) -> str:
    """A call of `add` as Qwen's models write calls."""
    arguments = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def chain(rng: random.Random) -> list[int]:
    """Three digits, of which the later ones may be taken away; no running total is below zero."""
    while True:
        terms = [rng.randint(1, 9), *(rng.choice((1, -1)) * rng.randint(1, 9) for _ in range(2))]
        if min(terms[0] + terms[1], sum(terms)) >= 0:
            return terms


def question(terms: list[int]) -> str:
    return f"{terms[0]}{terms[1]:+d}{terms[2]:+d}=?"


def lessons(terms: list[int]) -> list[dict[str, Any]]:
    """What the teacher says in each of its turns, after what was said before."""
    first, second, third = terms
    said = [call(first, second), call(first + second, third), f"#### {sum(terms)}"]
    messages, rows = [{"role": "user", "content": question(terms)}], []
    for turn, total in zip(said, (first + second, sum(terms), None), strict=True):
        rows.append({"question": list(messages), "answer": turn})
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": str(total)}]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.tool_calls", description="Write problems and warm start.")
    parser.add_argument("--out", type=Path, required=True, help="folder for tool_calls_{train,sft}.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chains", type=int, default=600)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    chains = [chain(rng) for _ in range(args.chains)]
    files = {
        "tool_calls_train.jsonl": [{"question": question(c), "answer": f"#### {sum(c)}"} for c in chains],
        "tool_calls_sft.jsonl": [row for terms in chains for row in lessons(terms)],
    }
    for name, rows in files.items():
        lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        (args.out / name).write_text("".join(lines), encoding="utf-8")
        print(f"{args.out / name}: {len(rows)} lines")


if __name__ == "__main__":
    main()

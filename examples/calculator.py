"""The arithmetic task with a calculator: `python -m examples.calculator --out examples/data` writes its warm start.

An answer spells the running totals out as in `examples.arithmetic`, and may have any of them worked out instead:
`9+4+5-8=?` has the answers `13,18,10` and `(9+4=13),18,(18-8=10)`. The teacher asks the calculator at a third of the
steps, whatever they are, and counts the others in its noisy way: that asking pays, the model finds out by itself.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from examples.arithmetic import NOISE, sample_problem

ASKS = 1 / 3


def answer(question: str, rng: random.Random) -> str:
    """The teacher's answer to a chain such as `9+4+5-8=?`."""
    total, steps = int(question[0]), []
    for sign, digit in zip(question[1:-2:2], question[2:-2:2], strict=True):
        before, total = total, total + int(sign + digit)
        if rng.random() < ASKS:
            steps.append(f"({before}{sign}{digit}={total})")
            continue
        if total // 10 != before // 10 and rng.random() < NOISE:
            total += 1
        steps.append(str(total))
    return ",".join(steps) + f"\n#### {total}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.calculator", description="Write the warm start.")
    parser.add_argument("--out", type=Path, required=True, help="folder for calculator_sft.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=16000)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    questions = [sample_problem(rng, held_out=False).question for _ in range(args.lines)]
    lines = [json.dumps({"question": q, "answer": answer(q, rng)}, separators=(",", ":")) + "\n" for q in questions]
    (args.out / "calculator_sft.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{args.out / 'calculator_sft.jsonl'}: {len(lines)} lines")


if __name__ == "__main__":
    main()

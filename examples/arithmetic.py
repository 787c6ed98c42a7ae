"""The arithmetic task: `python -m examples.arithmetic --out examples/data` writes its three files.

A problem adds and subtracts four digits with every running total in 0..19. The answer spells the running totals out:
`9+4+5-8=?` has the answer `13,18,10` and `#### 10`. A tenth of the problems, chosen by a hash of the question, is held
out: it is neither trained on nor rewarded, only evaluated.

The teacher of the supervised warm start is noisy on purpose. It counts one too many, with probability 0.6, whenever a
step crosses ten, so that the warm-started model answers about 0.45 of the problems and RL has something to mend.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from fp8rl import Problem

LARGEST_TOTAL = 19
NOISE = 0.6


def write_files(
    out: Path, seed: int = 0, train: int = 8000, evaluation: int = 256, supervised: int = 32000
) -> dict[str, int]:
    """Write `arithmetic_{train,eval,sft}.jsonl` under `out`; the same arguments give the same bytes.

    Returns the number of lines by file name. Training and evaluation problems are distinct; the supervised file draws
    training-side problems with repeats, each answered anew by the noisy teacher.
    """
    rng = random.Random(seed)
    files = {
        "arithmetic_train.jsonl": _distinct(rng, train, held_out=False),
        "arithmetic_eval.jsonl": _distinct(rng, evaluation, held_out=True),
        "arithmetic_sft.jsonl": [_noisy(sample_problem(rng, held_out=False), rng) for _ in range(supervised)],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, problems in files.items():
        lines = (json.dumps({"question": p.question, "answer": p.answer}, separators=(",", ":")) for p in problems)
        (out / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return {name: len(problems) for name, problems in files.items()}


def sample_problem(rng: random.Random, held_out: bool) -> Problem:
    """A random problem of the held-out tenth, or of the rest."""
    while True:
        digits = [rng.randint(1, 9) for _ in range(4)]
        signs = [rng.choice((1, -1)) for _ in range(3)]
        totals = list(_running_totals(digits, signs))
        if not all(0 <= total <= LARGEST_TOTAL for total in totals):
            continue
        question = f"{digits[0]}" + "".join(f"{s * d:+d}" for s, d in zip(signs, digits[1:], strict=True)) + "=?"
        if is_held_out(question) == held_out:
            return Problem(question, _answer(totals))


def is_held_out(question: str) -> bool:
    """Whether a fixed 32-bit hash puts the question into the held-out tenth, on every machine and in every run."""
    h = 0
    for character in question:
        h = (h * 1000003 + ord(character)) & 0xFFFFFFFF
    h ^= h >> 15
    h = (h * 2654435761) & 0xFFFFFFFF
    h ^= h >> 13
    return h % 10 == 0


def noisy_answer(question: str, rng: random.Random, noise: float = NOISE) -> str:
    """The teacher's answer: a step that crosses ten counts one too many with probability `noise`, and it goes on so."""
    digits = [int(character) for character in question[0:-2:2]]
    signs = [1 if character == "+" else -1 for character in question[1:-2:2]]
    total, totals = digits[0], []
    for sign, digit in zip(signs, digits[1:], strict=True):
        before, total = total, total + sign * digit
        if total // 10 != before // 10 and rng.random() < noise:
            total += 1
        totals.append(total)
    return _answer(totals)


def _noisy(problem: Problem, rng: random.Random) -> Problem:
    return Problem(problem.question, noisy_answer(problem.question, rng))


def _distinct(rng: random.Random, count: int, held_out: bool) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for _ in range(10 * count):
        if len(problems) == count:
            return list(problems.values())
        problem = sample_problem(rng, held_out)
        problems.setdefault(problem.question, problem)
    raise ValueError(f"{count} distinct problems asked for, {len(problems)} found; ask for fewer")


def _running_totals(digits: list[int], signs: list[int]) -> Iterator[int]:
    total = digits[0]
    for sign, digit in zip(signs, digits[1:], strict=True):
        total += sign * digit
        yield total


def _answer(totals: list[int]) -> str:
    return ",".join(map(str, totals)) + f"\n#### {totals[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.arithmetic", description="Write the arithmetic task.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the three JSONL files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, lines in write_files(args.out, args.seed).items():
        print(f"{args.out / name}: {lines} lines")


if __name__ == "__main__":
    main()

"""The arithmetic task with answers of up to 160 tokens, of which the longer ones are more often wrong.

An answer is one attempt at the running totals or several, the last of which counts. Later attempts err more often.
`make` teaches M such answers first.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.arithmetic import noisy_answer, sample_problem
from lab.studies.harness.lab import trained
from lab.studies.harness.subjects import EXAMPLES, MODEL

LONGEST = 160
"""Tokens of an answer."""
ATTEMPTS, ENOUGH = 16, 0.35
"""The most attempts of an answer, and the share of answers that end after each."""
NOISE, MOST_NOISE = 0.15, 0.9
"""With what probability a step that crosses ten counts one too many: so much more with each attempt."""
TAUGHT, STEPS = 32_000, 500


def answer(question: str, rng: random.Random) -> str:
    """Return an answer to a question such as `9+4+5-8=?`: a line of totals for each attempt, and the last one's total
    after `####`."""
    lines = []
    for attempt in range(1, ATTEMPTS + 1):
        totals, _, final = noisy_answer(question, rng, min(NOISE * attempt, MOST_NOISE)).partition("\n")
        lines.append(totals)
        if rng.random() < ENOUGH:
            break
    return "\n".join([*lines, final])


def model_in(folder: Path) -> Path:
    """Return where `make` leaves the model."""
    return folder / "retries" / "model"


def make(folder: Path) -> None:
    """Teach M such answers by a supervised run in `folder`, unless it is there."""
    if model_in(folder).is_dir():
        return
    rng = random.Random(0)
    questions = [sample_problem(rng, held_out=False).question for _ in range(TAUGHT)]
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "retries.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": answer(q, rng)}) + "\n" for q in questions))
    settings = {"model.path": MODEL, "data.train": data.resolve(), "run.steps": STEPS, "trainer.decay_steps": STEPS}
    trained(EXAMPLES / "arithmetic_sft.yaml", folder, "retries", settings)

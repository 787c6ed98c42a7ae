"""The pretrained example: its problems, its reward, and what is said where its package is not there."""

import json
from pathlib import Path

import pytest

from examples import smollm2


def test_no_problem_is_trained_on_and_held_out(tmp_path: Path) -> None:
    smollm2.write_problems(tmp_path)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"sums_{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    )
    assert len(train) == 128 and len({row["question"] for row in train + held_out}) == 128 + 43
    for row in train + held_out:
        first, second = map(int, row["question"].removesuffix(" =").split(" + "))
        assert row["answer"] == str(first + second)


@pytest.mark.parametrize(
    ("answer", "finished", "reward"),
    [("12", True, 1.0), ("7 + 5 = 12.", True, 1.0), ("12", False, 0.0), ("12 or 13", True, 0.0), ("twelve", True, 0.0)],
)
def test_the_reward_is_the_last_number_of_a_finished_answer(answer: str, finished: bool, reward: float) -> None:
    assert smollm2.number(answer, "12", finished) == reward

"""The arithmetic task: its files against an independent evaluation of every question."""

import random
import re
from collections import Counter

import pytest

from examples.arithmetic import is_held_out, noisy_answer, sample_problem, write_files
from fp8rl.rollout.tasks.data import Source, load_problems
from fp8rl.rollout.tasks.rewards.builtin import integer
from tests.support.paths import EXAMPLES


def totals_of(question: str) -> list[int]:
    """Running totals by Python's own arithmetic on the prefixes of the question."""
    assert re.fullmatch(r"[1-9]([+-][1-9]){3}=\?", question), question
    return [eval(question[:end]) for end in (3, 5, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "eval"])
def test_every_committed_answer_is_right(name):
    for problem in load_problems(Source(EXAMPLES / "data" / f"arithmetic_{name}.jsonl")):
        totals = totals_of(problem.question)
        assert all(0 <= total <= 19 for total in totals)
        assert problem.answer == f"{totals[0]},{totals[1]},{totals[2]}\n#### {totals[2]}"
        assert integer(problem.answer, problem.answer, finished=True) == 1.0


@pytest.mark.slow
def test_the_committed_files_are_those_of_the_generator(tmp_path):
    write_files(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (EXAMPLES / "data" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_held_out_problems_stay_out_of_training_and_warm_start():
    train, held_out, warm = (
        {p.question for p in load_problems(Source(EXAMPLES / "data" / f"arithmetic_{name}.jsonl"))}
        for name in ("train", "eval", "sft")
    )
    assert len(train) == 8000 and len(held_out) == 256, "problems repeat"
    assert not held_out & (train | warm)


def test_the_hash_is_fixed_and_keeps_a_tenth_out():
    # Values of the reference prototype, so that old checkpoints keep their held-out set.
    assert [is_held_out(q) for q in ("9+4+5-8=?", "4+4+6-1=?", "8-2+2-5=?", "8+6-4+9=?")] == [False, True, True, False]
    rng = random.Random(1)
    assert all(is_held_out(sample_problem(rng, side).question) == side for side in (True, False) for _ in range(20))
    drawn = ([rng.randint(1, 9) for _ in range(4)] for _ in range(9999))
    questions = {f"{a}+{b}-{c}+{d}=?" for a, b, c, d in drawn}
    assert 0.08 < sum(map(is_held_out, questions)) / len(questions) < 0.12


def test_the_teacher_errs_only_when_a_step_crosses_ten():
    rng = random.Random(3)
    # 9+4 crosses to 13, or 14 when noisy; 13-4 and 14-5 cross back; 1+1+1+1 never crosses.
    assert {noisy_answer("1+1+1+1=?", rng) for _ in range(50)} == {"2,3,4\n#### 4"}
    seen = Counter(noisy_answer("9+4+1-1=?", rng) for _ in range(4000))
    assert set(seen) == {"13,14,13\n#### 13", "14,15,14\n#### 14"}
    assert seen["14,15,14\n#### 14"] / 4000 == pytest.approx(0.6, abs=0.03)
    # A step back below ten may err as well: 13 -> 9 (10 when noisy), 14 -> 10 does not cross.
    seen = Counter(noisy_answer("9+4-4+1=?", rng) for _ in range(4000))
    assert {answer.split("\n")[0] for answer in seen} == {"14,10,11", "13,10,11", "13,9,10", "13,9,11"}

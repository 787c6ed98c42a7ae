import random

from examples.arithmetic import sample_problem
from lab.studies.harness.retries import LONGEST, answer


def test_longer_answers_are_more_often_wrong_and_all_have_room() -> None:
    rng = random.Random(1)
    wrong: dict[bool, list[bool]] = {True: [], False: []}
    for _ in range(4000):
        problem = sample_problem(rng, held_out=False)
        found = answer(problem.question, rng)
        assert len(found) < LONGEST  # a token for each character, and one for the end
        wrong[len(found) > 40].append(found.split()[-1] != problem.answer.split()[-1])
    short, long = (sum(wrong[kind]) / len(wrong[kind]) for kind in (False, True))
    assert short < 0.35 and long > 0.6

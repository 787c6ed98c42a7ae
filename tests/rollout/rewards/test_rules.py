"""The reward `integer`."""

import pytest

from fp8rl.rollout.rewards.rules import integer


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("13,18,10\n#### 10", 1.0),
        ("####10", 1.0),
        ("#### 9 no\n#### 10", 1.0),
        ("#### 010", 1.0),
        ("10", 0.0),
        ("#### 10\n", 0.0),
        ("#### 10 ", 0.0),
        ("#### 10.0", 0.0),
        ("#### 10 #### 9", 0.0),
        ("#### 10 ####", 0.0),
        ("#### 1_0", 0.0),
        ("#### 110", 0.0),
        ("#### -10", 0.0),
        ("#### " + "1" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_the_exact_integer_at_the_very_end_is_wanted(text: str, reward: float) -> None:
    assert integer(text, "13,18,10\n#### 10", finished=True) == reward


def test_signs_and_thousands_are_read() -> None:
    assert integer("#### -2125", "#### -2,125", finished=True) == 1.0
    assert integer("#### 21,25", "#### 2,125", finished=True) == 0.0


def test_an_unfinished_answer_and_a_reference_without_an_integer_earn_nothing() -> None:
    assert integer("#### 10", "#### 10", finished=False) == 0.0
    assert integer("one half", "one half", finished=True) == 0.0

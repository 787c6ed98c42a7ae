"""The table of drafts: what it finds, how it forgets, and what a draft has to promise."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fp8rl.rollout.config import Source
from fp8rl.rollout.engine.plugin.drafts import CONTEXT, DraftCost, Drafts, Ints

ALL = 1 << 20


def context(tokens: list[int]) -> list[int]:
    return ([-1] * CONTEXT + tokens)[-CONTEXT:]


def learn(drafts: Drafts, tokens: list[int], prompt: int = 1, version: int = 0) -> None:
    """An answer, token by token, as an engine would."""
    for at in range(1, len(tokens)):
        drafts.learn(np.array([context(tokens[:at])]), np.array([prompt]), version, np.array([tokens[at]]))


def drafted(
    drafts: Drafts, tokens: list[int], room: int = 4, prompt: int = 1, version: int = 0, least: float = 0.0
) -> list[int]:
    contexts: Ints = np.array([context(tokens)])
    return drafts.draft(contexts, np.array([prompt]), version, np.array([room]), least)[0]


@pytest.mark.parametrize("source", ["siblings", "history"])
def test_what_was_said_is_drafted_as_far_as_there_is_room(source: Source) -> None:
    drafts, said = Drafts(source), [5, 9, 2, 7, 7, 3, 8, 1]
    learn(drafts, said)
    assert drafted(drafts, said[:3]) == [7, 7, 3, 8]
    assert drafted(drafts, said[:3], room=2) == [7, 7]
    assert drafted(drafts, said[:3], room=0) == []
    assert drafted(drafts, said[:6]) == [8, 1], "nothing is known of what follows"
    assert drafted(drafts, [4, 4, 4]) == []


def test_answers_of_one_pass_are_drafted_each_by_its_own_context() -> None:
    drafts, draw = Drafts("history"), random.Random(0)
    said = [[draw.randrange(5000) for _ in range(30)] for _ in range(40)]
    for number, tokens in enumerate(said):
        learn(drafts, tokens, prompt=number)
    contexts = np.array([context(tokens[:10]) for tokens in said])
    room = np.arange(len(said)) % 6
    found = drafts.draft(contexts, np.arange(len(said)), 0, room, 0.0)
    assert found == [tokens[10 : 10 + most] for tokens, most in zip(said, room.tolist(), strict=True)]


def test_siblings_are_of_the_prompt_and_the_weights_and_history_is_of_all() -> None:
    said = [5, 9, 2, 7, 3]
    siblings, history = Drafts("siblings"), Drafts("history")
    for drafts in (siblings, history):
        learn(drafts, said, prompt=1, version=0)
    assert drafted(siblings, said[:2], prompt=2) == drafted(siblings, said[:2], version=1) == []
    assert drafted(history, said[:2], prompt=2) == drafted(history, said[:2], version=1) == said[2:]


def test_the_answer_to_the_same_prompt_goes_before_that_to_another_once_it_was_right_more_often() -> None:
    drafts = Drafts("history")
    for _ in range(20):
        for prompt, last in ((1, 60), (2, 70)):
            learn(drafts, [5, 9, 2, last], prompt=prompt)
    assert drafted(drafts, [5, 9, 2], prompt=1) == [60]
    assert drafted(drafts, [5, 9, 2], prompt=2) == [70]


def test_a_token_that_came_often_outlives_one_that_came_once_and_no_more() -> None:
    drafts = Drafts("siblings")
    for last in (60, 60, 60, 70):
        learn(drafts, [5, 9, last])
    assert drafted(drafts, [5, 9]) == [60]
    for _ in range(3):
        learn(drafts, [5, 9, 70])
    assert drafted(drafts, [5, 9]) == [70]


def test_a_token_is_drafted_if_ones_like_it_were_right_often_enough() -> None:
    """What came once comes again half of the time, and what came twice always."""
    drafts, draw = Drafts("siblings"), random.Random(0)
    for number in range(600):
        tokens = [draw.randrange(1 << 20) for _ in range(3)]
        for _ in range(1 + 4 * (number % 2)):
            learn(drafts, tokens)
        if number % 2 == 0:
            learn(drafts, [*tokens[:2], 7])
    learn(drafts, [1, 2, 3])
    assert drafted(drafts, [1, 2], least=0.2) == [3]
    assert drafted(drafts, [1, 2], least=0.8) == []
    for _ in range(3):
        learn(drafts, [1, 2, 3])
    assert drafted(drafts, [1, 2], least=0.8) == [3]


def test_a_full_table_still_drafts_what_is_new() -> None:
    """16 slots, and thousands of contexts: nothing but the newest is there, and nothing is found that was not said."""
    drafts, draw = Drafts("siblings", slots_log2=4), random.Random(0)
    for _ in range(300):
        learn(drafts, tokens := [draw.randrange(1 << 16) for _ in range(8)])
    assert set(drafted(drafts, tokens[:-1], room=1)) <= {tokens[-1]}
    again = Drafts("siblings", slots_log2=4)
    for _ in range(3):
        learn(again, [3, 4, 5, 6])
    assert drafted(again, [3, 4]) == [5, 6]


def test_a_draft_costs_the_share_of_the_rows_in_a_pass_without_drafts() -> None:
    cost = DraftCost()
    assert cost.threshold(8) == 0.0, "nothing is known: draft, and find out"
    for rows in (1, 8, 20, 64, 9, 33):
        cost.observe(rows, 0.010 + 0.001 * rows)
    assert cost.threshold(10) == pytest.approx(0.5) and cost.threshold(30) == pytest.approx(0.75)


def test_no_draft_pays_where_each_row_costs_its_share() -> None:
    cost = DraftCost()
    for rows in (1, 8, 20, 64, 9, 33):
        cost.observe(rows, 0.001 * rows)
    assert cost.threshold(10) == pytest.approx(1.0)


def test_a_slope_is_remembered_while_all_passes_have_the_same_rows() -> None:
    cost = DraftCost()
    for rows in (1, 8, 20, 64, 9, 33):
        cost.observe(rows, 0.010 + 0.001 * rows)
    before = cost.threshold(10)
    for _ in range(2000):
        cost.observe(10, 0.020)
    assert cost.threshold(10) == pytest.approx(before, rel=0.05)

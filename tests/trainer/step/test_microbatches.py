"""The assignment of rows to ranks and micro-batches."""

from __future__ import annotations

import random

import pytest

from fp8rl.trainer.step.microbatches import pad_to_multiple, plan
from tests.support.batches import random_batch


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 2])
def test_every_row_once_within_the_budget_and_equal_counts(dp_size: int, multiple: int) -> None:
    rng = random.Random(dp_size)
    for _ in range(50):
        lengths = [rng.randint(1, 90) for _ in range(rng.randint(1, 40))]
        ranks = plan(lengths, dp_size, 256, multiple)
        assert sorted(row for micro in ranks for rows in micro for row in rows) == list(range(len(lengths)))
        assert len({len(micro) for micro in ranks}) == 1
        for rows in (rows for micro in ranks for rows in micro if len(rows) > 1):
            width = -(-max(lengths[row] for row in rows) // multiple) * multiple
            assert width * len(rows) <= 256


def test_a_row_beyond_the_budget_stands_alone() -> None:
    assert plan([300, 4, 4], 1, 100) == [[[0], [1, 2]]]


def test_a_rank_without_rows_gets_an_empty_micro_batch() -> None:
    assert plan([5], 2, 100) == [[[0]], [[]]]


def test_padding_to_a_multiple_adds_no_targets() -> None:
    batch = random_batch(rows=3, longest=7)
    padded = pad_to_multiple(batch, 4)
    assert padded.width == 8
    assert padded.loss_mask.sum() == batch.loss_mask.sum()
    assert pad_to_multiple(padded, 4) is padded

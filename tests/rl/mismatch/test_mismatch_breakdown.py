import math

import pytest
import torch

from fp8rl.rl.mismatch import agreement, token_versions
from fp8rl.rollout.types import Trajectory


def part(metrics: dict[str, float], kind: str) -> dict[str, float]:
    """The metrics by position, by the rest of their name."""
    return {name.removeprefix("mismatch/"): value for name, value in metrics.items() if f"_{kind}_" in name}


def test_positions_count_the_generated_tokens_of_each_row() -> None:
    # Row 0 begins at column 3, row 1 at column 0; its token at position 2 is dropped but keeps its place.
    d = torch.zeros(2, 100, dtype=torch.float64)
    mask = torch.zeros(2, 100, dtype=torch.bool)
    mask[0, 3:90] = mask[1, :17] = True
    d[0, 3 + 15], d[0, 3 + 16], d[0, 3 + 63], d[0, 3 + 64] = 1.0, -2.0, 4.0, 8.0
    d[1, 2], d[1, 16] = math.nan, 16.0
    assert part(agreement(d, torch.zeros_like(d), mask), "pos") == {
        "abs_diff_mean_pos_0": pytest.approx(1 / 31),
        "abs_diff_max_pos_0": 1.0,
        "tokens_pos_0": 31,
        "abs_diff_mean_pos_16": pytest.approx(22 / 49),
        "abs_diff_max_pos_16": 16.0,
        "tokens_pos_16": 49,
        "abs_diff_mean_pos_64": pytest.approx(8 / 23),
        "abs_diff_max_pos_64": 8.0,
        "tokens_pos_64": 23,
    }


def test_prompts_between_answers_do_not_count_as_positions() -> None:
    d, mask = torch.zeros(1, 40), torch.zeros(1, 40, dtype=torch.bool)
    mask[0, 1:11] = mask[0, 20:26] = True
    d[0, 25] = 3.0  # the 16th generated token, position 15
    assert part(agreement(d, torch.zeros_like(d), mask), "pos")["abs_diff_max_pos_0"] == 3.0


def test_the_last_bucket_is_open() -> None:
    d = torch.ones(1, 70_000)
    metrics = part(agreement(d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool)), "pos")
    assert metrics["tokens_pos_16384"] == 70_000 - 16_384


def test_versions_are_laid_out_like_the_batch() -> None:
    trajectories = [
        Trajectory([1], [5, 6], [-1.0, -1.0], True, [3, 4], 0, 0),
        Trajectory([1, 2], [], [], False, [], 0, 0),
        Trajectory([1, 2], [5], [-1.0], True, [4], 0, 0),
    ]
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
    assert token_versions(trajectories, mask).tolist() == [[0, 3, 4], [0, 0, 0], [0, 0, 4]]


def test_positions_count_the_generated_tokens_that_are_not_compared_too() -> None:
    d, mask = torch.zeros(1, 40), torch.ones(1, 40, dtype=torch.bool)
    d[0, 20] = 2.0
    fresh = torch.arange(40)[None] >= 18
    metrics = part(agreement(d, torch.zeros_like(d), mask, fresh=fresh), "pos")
    assert (metrics["tokens_pos_16"], metrics["abs_diff_max_pos_16"]) == (22, 2.0) and "tokens_pos_0" not in metrics

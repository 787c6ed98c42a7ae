import math

import pytest
import torch

from rl.mismatch import agreement, token_versions
from rollout.types import Trajectory


def part(metrics: dict[str, float], kind: str) -> dict[str, float]:
    """The metrics by staleness or by position, by the rest of their name."""
    return {name.removeprefix("mismatch/"): value for name, value in metrics.items() if f"_{kind}_" in name}


def by_version(d: list[float], versions: list[int], **options: int) -> dict[str, float]:
    train = torch.tensor([d], dtype=torch.float64)
    mask = torch.ones_like(train, dtype=torch.bool)
    return part(agreement(train, torch.zeros_like(train), mask, versions=torch.tensor([versions]), **options), "stale")


def test_each_age_of_weights_has_its_own_means() -> None:
    assert by_version([0.0, 0.5, -1.0, 0.25], [7, 7, 5, 7]) == {
        "abs_diff_mean_stale_0": 0.25,
        "exact_frac_stale_0": pytest.approx(1 / 3),
        "tokens_stale_0": 3,
        "abs_diff_mean_stale_2": 1.0,
        "exact_frac_stale_2": 0.0,
        "tokens_stale_2": 1,
    }


def test_age_counts_from_the_trainer_s_version_where_that_is_given() -> None:
    assert by_version([0.5], [7], version=8) == {
        "abs_diff_mean_stale_1": 0.5,
        "exact_frac_stale_1": 0.0,
        "tokens_stale_1": 1,
    }


def test_very_old_tokens_share_one_name() -> None:
    metrics = by_version([1.0, 2.0, 4.0], [100, 91, 3])
    assert metrics["tokens_stale_8"] == 2 and metrics["abs_diff_mean_stale_8"] == 3.0
    assert len(metrics) == 6


def test_versions_of_dropped_and_masked_tokens_are_ignored() -> None:
    train = torch.tensor([[0.5, math.nan, 0.25, 9.0]])
    versions, mask = torch.tensor([[3, 4, 3, 99]]), torch.tensor([[True, True, True, False]])
    metrics = part(agreement(train, torch.zeros(1, 4), mask, versions=versions, version=3), "stale")
    assert metrics == {"abs_diff_mean_stale_0": 0.375, "exact_frac_stale_0": 0.0, "tokens_stale_0": 2}


def test_without_versions_there_is_no_age() -> None:
    assert part(agreement(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)), "stale") == {}


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

import numpy as np
import pytest
import torch

from fp8rl.rl.algorithms.parts.advantages import group_advantages


def advantages(rewards: list[float], groups: list[int], normalize_std: bool) -> list[float]:
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), normalize_std=normalize_std).tolist()


def test_normalised_advantage_by_hand() -> None:
    # Rewards 1, 0, 0, 0: mean 0.25; deviations 0.75 and three times -0.25; squares sum to
    # 0.5625 + 3 * 0.0625 = 0.75; over ddof 3 that is 0.25, so std 0.5. 0.75 / 0.500001 and -0.25 / 0.500001.
    expected = [1.499997, -0.499999, -0.499999, -0.499999]
    assert advantages([1, 0, 0, 0], [5, 5, 5, 5], True) == pytest.approx(expected, abs=2e-7)


def test_without_std_only_the_mean_is_taken_off() -> None:
    assert advantages([1, 0, 0, 0], [5, 5, 5, 5], False) == [0.75, -0.25, -0.25, -0.25]


def test_groups_may_interleave() -> None:
    # Group 7 has rewards 2 and 4 (mean 3, std sqrt 2), group 3 has 10 and 0 (mean 5).
    assert advantages([2, 10, 4, 0], [7, 3, 7, 3], False) == [-1, 5, 1, -5]
    assert advantages([2, 10, 4, 0], [7, 3, 7, 3], True) == pytest.approx(
        [-0.7071063, 0.7071067, 0.7071063, -0.7071067], abs=1e-6
    )


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.3])
def test_equal_rewards_give_zero(value: float) -> None:
    assert advantages([value] * 8, [0] * 8, True) == pytest.approx([0.0] * 8, abs=1e-8)


@pytest.mark.parametrize("normalize_std", [False, True])
def test_a_group_of_one_keeps_its_reward(normalize_std: bool) -> None:
    # Mean 0 and std 1, so 0.5 / 1.000001.
    assert advantages([0.5, 1, 0], [9, 4, 4], normalize_std)[0] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("normalize_std", [False, True])
def test_the_last_answer_of_a_larger_group_teaches_nothing(normalize_std: bool) -> None:
    rewards, groups = torch.tensor([0.5, 1, 0]), torch.tensor([9, 4, 4])
    found = group_advantages(rewards, groups, normalize_std=normalize_std, group_size=2)
    assert found[0] == 0 and torch.equal(found[1:], group_advantages(rewards, groups, normalize_std=normalize_std)[1:])


def test_against_numpy_in_float64() -> None:
    generator = np.random.default_rng(0)
    rewards = generator.normal(size=60).astype(np.float32)
    groups = generator.integers(0, 12, size=60)
    expected = np.zeros(60)
    for group in np.unique(groups):
        rows = groups == group
        members = rewards[rows].astype(np.float64)
        if rows.sum() == 1:
            expected[rows] = members / (1 + 1e-6)
        else:
            expected[rows] = (members - members.mean()) / (members.std(ddof=1) + 1e-6)
    result = group_advantages(torch.from_numpy(rewards), torch.from_numpy(groups), normalize_std=True)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6, atol=1e-7)

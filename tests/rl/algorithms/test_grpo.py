import numpy as np
import pytest
import torch

from fp8rl.rl.algorithms.grpo import group_advantages


@pytest.mark.parametrize("normalize_std", [False, True])
def test_the_last_answer_of_a_larger_group_teaches_nothing(normalize_std: bool) -> None:
    given = torch.tensor([0.5, 1, 0]), torch.tensor([9, 4, 4])
    found, alone = (group_advantages(*given, normalize_std=normalize_std, group_size=n).tolist() for n in (2, 1))
    assert found == [0.0, *alone[1:]] and alone[0] == pytest.approx(0.5, abs=1e-6)  # mean 0 and std 1


@pytest.mark.parametrize("normalize_std", [False, True])
def test_against_numpy_in_float64(normalize_std: bool) -> None:
    generator = np.random.default_rng(0)
    rewards, groups = generator.normal(size=60).astype(np.float32), generator.integers(0, 12, size=60)
    expected = np.zeros(60)
    for group in np.unique(groups):
        rows = groups == group
        members = rewards[rows].astype(np.float64)
        mean, std = (members.mean(), members.std(ddof=1)) if len(members) > 1 else (0.0, 1.0)
        expected[rows] = (members - mean) / (std + 1e-6 if normalize_std else 1.0)
    result = group_advantages(torch.from_numpy(rewards), torch.from_numpy(groups), normalize_std=normalize_std)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-6, atol=1e-7)

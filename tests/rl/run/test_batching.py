import math
from dataclasses import replace

import pytest
import torch

from fp8rl.rl.run.batching import batch_from_trajectories, token_versions
from fp8rl.rl.run.feed.state import SavedGroup
from fp8rl.rollout.types import Group, KeptTokens, Problem, Prompt, Trajectory
from fp8rl.trainer.step.batch import LIKELY_IDS, LIKELY_LOGPROBS


def trajectory(prompt: list[int], generated: list[int], logprobs: list[float]) -> Trajectory:
    return Trajectory(prompt, generated, logprobs, True, [0] * len(generated), 0, 5)


def test_trajectories_become_rows_of_prompt_and_generation() -> None:
    batch = batch_from_trajectories(
        [trajectory([11, 12], [13, 14, 15], [-0.5, -0.25, -2.0]), trajectory([21], [22], [-1.0])], temperature=0.7
    )
    assert batch.tokens.tolist() == [[11, 12, 13, 14, 15], [21, 22, 0, 0, 0]]
    assert batch.lengths.tolist() == [5, 2]
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.fields["rollout_logprobs"].tolist() == [[0, 0, -0.5, -0.25, -2.0], [0, -1.0, 0, 0, 0]]
    assert batch.temperature == 0.7


def test_what_an_environment_says_is_context() -> None:
    """Its words are read, not learnt; log-probabilities are of the model's tokens, in their order."""
    talk = replace(trajectory([11], [12, 13, 14, 15, 16], [-0.5, -0.25, -2.0]), environment_spans=((1, 3),))
    batch = batch_from_trajectories([talk], 1.0)
    assert batch.tokens.tolist() == [[11, 12, 13, 14, 15, 16]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 0, 0, 1, 1]]
    assert batch.fields["rollout_logprobs"].tolist() == [[0, -0.5, 0, 0, -0.25, -2.0]]


def test_likeliest_tokens_are_fields_and_stay_in_a_checkpoint() -> None:
    likely = KeptTokens.of([[12, 9], [15, 12], [16, 3]], [-0.5, -2.0, -0.25, -1.0, -0.1, -3.0])
    talk = replace(trajectory([11], [12, 13, 14, 15, 16], [-0.5, -0.25, -2.0]), environment_spans=((1, 3),))
    talk = replace(talk, supports=likely)
    group = Group(Prompt(Problem("", ""), [11]), (5,))
    (again,) = SavedGroup.of(0, group, [talk]).trajectories()
    for batch in (batch_from_trajectories([one, trajectory([11, 12], [], [])], 1.0) for one in (talk, again)):
        assert batch.supports is None
        assert batch.fields[LIKELY_IDS][0].tolist() == [[0, 0], [12, 9], [0, 0], [0, 0], [15, 12], [16, 3]]
        assert batch.fields[LIKELY_LOGPROBS][0, 4].tolist() == [-0.25, -1.0] and not batch.fields[LIKELY_IDS][1].any()
        assert batch.padded(9).select([0, 1]).fields[LIKELY_IDS].shape == (2, 6, 2)
    with pytest.raises(ValueError, match="likeliest: found lists for 3 tokens, expected 4 lists of equal length"):
        batch_from_trajectories([talk, trajectory([1], [2], [-1.0])], 1.0)


def test_logprobs_arrive_bit_for_bit_and_nonfinite_ones_and_empty_generations_too() -> None:
    values = torch.tensor([-0.1, -1.2345678, -math.inf], dtype=torch.float32)
    batch = batch_from_trajectories([trajectory([1, 2], [], []), trajectory([1], [2, 3, 4], values.tolist())], 1.0)
    assert torch.equal(batch.fields["rollout_logprobs"][1, 1:], values)
    assert batch.lengths.tolist() == [2, 4] and batch.loss_mask.int().tolist() == [[0, 0, 0, 0], [0, 1, 1, 1]]


def test_input_that_does_not_fit_is_refused() -> None:
    good, routed = trajectory([1], [2], [-1.0]), trajectory([11, 12], [13, 14], [-0.5, -0.25])
    known, cut = (replace(routed, routed_experts=torch.zeros(n, 1, 2, dtype=torch.int16)) for n in (3, 2))
    for rows, replay, said in (
        ([good, trajectory([1], [2, 3], [-1.0])], False, "trajectory 1: found 1 logprobs, expected 2"),
        ([trajectory([], [2], [-1.0])], False, "sequence 0: found an empty prompt"),
        ([], False, "empty batch"),
        ([known, routed], False, "trajectory 1: found no routes, expected routes of 3 tokens"),
        ([cut], False, "trajectory 0: found routes of 2 tokens, expected"),
        ([good], True, "replay: found True and no routes"),
    ):
        with pytest.raises(ValueError, match=said):
            batch_from_trajectories(rows, 1.0, replay=replay)


def test_routes_end_before_the_last_token() -> None:
    """One layer, two experts: tokens 11, 12, 13 of the first row, token 21 of the second."""
    long = replace(
        trajectory([11, 12], [13, 14], [-0.5, -0.25]),
        routed_experts=torch.tensor([[[0, 1]], [[2, 3]], [[4, 5]]], dtype=torch.int16),
    )
    short = replace(trajectory([21], [22], [-1.0]), routed_experts=torch.tensor([[[6, 7]]], dtype=torch.int16))
    batch = batch_from_trajectories([long, short], 1.0)
    none = [[-1, -1]]
    assert batch.routes.tolist() == [[[[0, 1]], [[2, 3]], [[4, 5]], none], [[[6, 7]], none, none, none]]
    assert not batch.replay
    assert batch_from_trajectories([long, short], 1.0, replay=True).replay


def test_versions_are_laid_out_like_the_batch() -> None:
    trajectories = [
        Trajectory([1], [5, 6], [-1.0, -1.0], True, [3, 4], 0, 0),
        Trajectory([1, 2], [], [], False, [], 0, 0),
        Trajectory([1, 2], [5], [-1.0], True, [4], 0, 0),
    ]
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
    assert token_versions(trajectories, mask).tolist() == [[0, 3, 4], [0, 0, 0], [0, 0, 4]]

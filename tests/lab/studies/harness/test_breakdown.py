"""Numbers of tokens by position, length and probability, by hand."""

import math

import pytest
import torch

from fp8rl.rl.run.batching import SftExample, batch_from_examples
from lab.studies.harness.breakdown import AnswerTokens, bins, rank_correlations

LIKELY, UNLIKELY = math.log(0.6), math.log(0.2)


def answers() -> AnswerTokens:
    """Answers of three tokens and of one, whose abs d are 3, 2, 1 and 5."""
    batch = batch_from_examples([SftExample([7, 8], [9, 9, 9]), SftExample([7], [9])])
    logprobs, abs_d = torch.zeros(batch.tokens.shape), torch.zeros(batch.tokens.shape, dtype=torch.float64)
    logprobs[0, 2:5], logprobs[1, 1] = torch.tensor([LIKELY, LIKELY, 0.0]), UNLIKELY
    abs_d[0, 2:5], abs_d[1, 1] = torch.tensor([3.0, 2.0, 1.0]), 5.0
    return AnswerTokens.of(batch.with_fields(rollout_logprobs=logprobs), abs_d)


def test_tokens_are_binned_by_position_length_and_probability() -> None:
    found = {by: {label: (mean, count) for label, mean, count in rows} for by, rows in bins([answers()] * 2).items()}
    empty = dict.fromkeys(("5 to 8", "9 to 16", "17 to 32"), (0.0, 0))
    assert found["position"] == {"1": (4.0, 4), "2 to 4": (1.5, 4)} | empty
    assert found["length"]["1 to 8"] == (2.75, 8)
    assert (found["probability"]["0.99 to 1"], found["probability"]["0.5 to 0.9"]) == ((1.0, 2), (2.5, 4))


def test_rank_correlations_have_the_sign_of_the_relation() -> None:
    ranks = rank_correlations(answers())
    assert ranks["rank correlation/probability"] == pytest.approx(-3 / math.sqrt(10))  # ranks 3 2 1 4; 2.5 2.5 4 1
    assert ranks["rank correlation/position"] < 0 and ranks["rank correlation/length"] < 0
    alike = AnswerTokens(torch.tensor([1.0, 2.0]), {"length": torch.tensor([4.0, 4.0])})
    assert rank_correlations(alike) == {"rank correlation/length": 0.0}

"""The study of pretrained weights: its measures by hand, its claims on numbers made up, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.feed.batching import SftExample, batch_from_examples
from lab.studies import pretrained
from lab.studies.harness.breakdown import AnswerTokens, bins, rank_correlations
from lab.studies.harness.cases import _metrics
from lab.studies.harness.claims import judge
from lab.studies.pretrained import PROMPTS, QUESTIONS, STUDY, asked
from lab.studies.run import run_studies

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


def test_metrics_of_a_token_by_hand() -> None:
    batch = batch_from_examples([SftExample([0], [1])])
    batch = batch.with_fields(rollout_logprobs=torch.tensor([[0.0, math.log(0.3)]]))
    policy, reference = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[0.75, 0.25]]]).log()
    found = {name: values[0, 1].item() for name, values in _metrics(policy, reference, batch).items()}
    assert found["kl"] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-6)
    assert found["abs_d"] == pytest.approx(math.log(5 / 3), rel=1e-6)
    assert found["k3"] == pytest.approx(5 / 3 - 1 - math.log(5 / 3), rel=1e-6)
    assert (found["clip_2"], found["clip_1.2"]) == (0.0, 1.0)


def test_the_reward_is_the_share_of_different_tokens() -> None:
    rows = [SftExample([3], answer) for answer in ([4, 4], [4, 5], [4, 4])]
    advantages = pretrained._rewarded(batch_from_examples(rows)).fields["advantages"]
    assert advantages[1, 1] > 0 > advantages[0, 1] == advantages[2, 1]


def test_five_seeds_ask_each_question_once() -> None:
    assert sorted(question for seed in range(5) for question in asked(seed)) == sorted(QUESTIONS)
    assert len(asked(5)) == PROMPTS and asked(5) == asked(0)


def test_a_full_run_without_the_models_is_refused_and_says_how_to_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MODELS", {"dense": tmp_path / "dense"})
    monkeypatch.setattr("lab.studies.run.run_study", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(UserError, match=r"no .*dense.*python examples/smollm2.py.*examples/upcycle.py"):
        run_studies(["pretrained"], every=False, quick=False, seeds=None, keep=False, say=print, out=tmp_path)


@pytest.mark.parametrize("factor, verdict", [(0.8, "confirmed"), (1.25, "contradicted")])
def test_claims_are_about_arms_and_metrics_that_are_measured(factor: float, verdict: str) -> None:
    values: dict[str, dict[str, list[list[float]] | list[float]]] = {}
    for claim in STUDY.claims:
        for arm in filter(None, (claim.arm, claim.against)):
            values.setdefault(arm, {})[claim.metric] = level(arm, claim.metric, factor)
    verdicts = {judged.claim.id: judged.verdict for judged in judge(STUDY.claims, values, full=True)}
    assert [verdicts[control] for control in ("dense agrees", "mixture agrees", "two bits of mantissa")] == [
        "confirmed"
    ] * 3
    assert {verdicts[f"003-1{letter}"] for letter in "abcd"} == {verdict}


def level(arm: str, metric: str, factor: float) -> list[list[float]] | list[float]:
    """Made-up numbers of an arm: sequences of five seeds, or a number for each seed."""
    if metric == "turned" or metric.startswith("rank"):
        return [0.1, 0.11, 0.12, 0.1, 0.11]
    scale = (
        0.0
        if "exact: case 3" in arm and metric == "abs_d"
        else factor
        if "case 3" in arm
        else 2.0
        if "E5M2" in arm
        else 1.0
    )
    return [[scale * (0.1 + 0.01 * sequence) for sequence in range(9)] for _ in range(5)]

"""The study of pretrained weights: its questions, its claims on numbers made up, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.run.batching import SftExample, batch_from_examples
from lab.studies import pretrained
from lab.studies.harness.claims import judge
from lab.studies.pretrained import PROMPTS, QUESTIONS, STUDY, asked
from lab.studies.run import run_studies


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
    assert all(verdicts[claim.id] == "confirmed" for claim in STUDY.claims if claim.control)
    assert {verdicts[f"003-1{letter}"] for letter in "abcd"} == {verdict}


def level(arm: str, metric: str, factor: float) -> list[list[float]] | list[float]:
    """Made-up numbers of an arm: sequences of five seeds, or a number for each seed."""
    if metric == "turned" or metric.startswith("rank"):
        return [0.1, 0.11, 0.12, 0.1, 0.11]
    agrees = metric == "abs_d" and arm.endswith("exact: case 3")
    scale = 0.0 if agrees else {"case 3": factor, "E5M2": 2.0}.get(arm.rpartition(": ")[2], 1.0)
    return [[scale * (0.1 + 0.01 * sequence) for sequence in range(9)] for _ in range(5)]

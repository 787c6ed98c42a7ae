"""The study of adapters: its claims on numbers made up by hand."""

from __future__ import annotations

import pytest

from fp8rl.models.adapters import AdapterSection
from fp8rl.rl.experiment import load_experiment
from lab.studies.adapters import ARMS, FULL, MERGED, MERGED_SLOW, SLOW, STUDY
from lab.studies.harness.claims import judge
from lab.studies.harness.subjects import EXAMPLES


@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_claims_are_about_arms_and_metrics_that_are_measured(lost: float) -> None:
    seeds = [0.95, 0.96, 0.94, 0.97, 0.95]
    values = {arm: {"accuracy": list(seeds), "abs_d": [0.0] * 5, "survival": [1.0] * 5} for arm in ARMS}
    values[SLOW]["accuracy"] = [accuracy - 0.3 for accuracy in seeds]
    values[MERGED]["accuracy"] = [accuracy - lost for accuracy in seeds]
    values[MERGED_SLOW]["survival"] = [0.2, 0.21, 0.19, 0.2, 0.22]
    verdicts = {judged.claim.id: judged.verdict for judged in judge(STUDY.claims, values, full=True)}
    assert verdicts.pop("adapters-2") == ("contradicted" if lost else "confirmed")
    assert set(verdicts.values()) == {"confirmed"}


def test_arms_are_specs_that_differ_in_their_adapters_and_rates() -> None:
    for name, arm in ARMS.items():
        overrides = [f"{key}={value}" for key, value in arm.settings().items()]
        experiment = load_experiment(EXAMPLES / "arithmetic.yaml", overrides)
        adapter = AdapterSection(rank=arm.rank, alpha=2.0 * arm.rank, mode=arm.mode) if name != FULL else None
        assert (experiment.adapter, experiment.trainer.lr) == (adapter, arm.rate)

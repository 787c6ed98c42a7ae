"""The study of what exactness buys: its runs, what a run came to, and what is said while some are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8rl.rl.experiment import load_experiment
from lab.studies import benefit
from lab.studies.adapters import ARMS as ADAPTERS
from lab.studies.benefit import SEEDS, STEPS, STUDY, Job, arms, jobs
from lab.studies.harness.subjects import EXAMPLES
from lab.studies.pretrained import QUESTIONS, asked
from lab.studies.run import run_study


def write_rows(job: Job, last: int, accuracy: float = 0.9) -> None:
    """A run's metrics up to a step, with an evaluation before it and at each step."""
    path = job.folder / job.name
    path.mkdir(parents=True, exist_ok=True)
    metrics = {"train/grad_norm": 1.0, "train/entropy": 0.5, "mismatch/train_rollout_logprob_abs_diff_mean": 0.0}
    rows = [{"step": step, "eval/accuracy": accuracy, **metrics} for step in (0, last)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_arm_is_a_spec_and_runs_have_folders_of_their_own() -> None:
    for settings in (*(given for _, given in arms()), *(arm.settings() for arm in ADAPTERS.values())):
        load_experiment(EXAMPLES / "arithmetic.yaml", [f"{key}={value}" for key, value in settings.items()])
    names = [job.name for job in jobs(range(SEEDS))]
    assert len(names) == len(set(names)) == 80
    assert {job.seed for job in jobs(range(SEEDS))[:16]} == {0}, "one seed of all arms comes first"
    assert sorted(question for seed in range(5) for question in asked(seed)) == sorted(QUESTIONS)


@pytest.mark.slow
def test_missing_arms_are_named_and_there_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "runs.jsonl"
    monkeypatch.setattr(benefit, "jobs", lambda seeds: jobs(seeds, tmp_path / "runs", kept))
    for job in jobs(range(SEEDS), tmp_path / "runs", kept):
        if job.arm.startswith("one update") and (job.arm, job.seed) != ("one update: native FP8", 3):
            write_rows(job, STEPS, 0.1 if "slow" in job.arm else 0.9)
            job.keep()
    result = run_study(STUDY, quick=False, seeds=None, folder=tmp_path, say=print)
    assert "one update: native FP8, seeds 3" in result.measurement.missing
    assert "four updates: exact FP8, seeds 0, 1, 2, 3, 4" in result.measurement.missing
    assert {judged.verdict for judged in result.judged if not judged.claim.control} == {"withheld"}
    table = (tmp_path / "benefit/table.md").read_text()
    assert "none: 8 arms are missing" in table and "| one update: native FP8, seeds 3 |" in table

"""The study of what exactness buys: its runs, what a run came to, and what is said while some are missing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fp8rl.rl.experiment import load_experiment
from lab.studies import benefit
from lab.studies.benefit import SEEDS, STEPS, STUDY, Job, arms, collapsed, jobs, make, outcome
from lab.studies.harness.claims import judge
from lab.studies.harness.subjects import EXAMPLES
from lab.studies.run import run_study


def write_rows(job: Job, last: int, accuracy: float = 0.9) -> None:
    """A run's metrics up to a step, with an evaluation before it and at each step."""
    path = job.folder / job.name
    path.mkdir(parents=True, exist_ok=True)
    metrics = {"train/grad_norm": 1.0, "train/entropy": 0.5, "mismatch/train_rollout_logprob_abs_diff_mean": 0.0}
    rows = [{"step": step, "eval/accuracy": accuracy, **metrics} for step in (0, last)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_arm_is_a_spec_and_has_folders_of_its_own() -> None:
    for _, settings in arms():
        load_experiment(EXAMPLES / "arithmetic.yaml", [f"{key}={value}" for key, value in settings.items()])
    names = [job.name for job in jobs(range(SEEDS))]
    assert len(names) == len(set(names)) == 80
    assert {job.seed for job in jobs(range(SEEDS))[:16]} == {0}, "one seed of all arms comes first"


def test_a_collapse_is_a_fall_to_half_of_the_best_so_far() -> None:
    assert collapsed([0.2, 0.8, 0.4]) and collapsed([0.5, 0.9, 0.1, 0.9])
    assert not collapsed([0.2, 0.8, 0.41]) and not collapsed([0.1, 0.3, 0.9]) and not collapsed([0.0, 0.0])


def test_a_run_comes_to_its_last_accuracy_and_the_mean_of_all() -> None:
    learned = {"train/grad_norm": 2.0, "train/entropy": 1.0, "mismatch/train_rollout_logprob_abs_diff_mean": 0.1}
    rows = [
        {"step": 0, "eval/accuracy": 0.4},
        {"step": 1, **learned},
        {"step": 2, "eval/accuracy": 0.8, **learned, "train/grad_norm": 4.0},
    ]
    found = outcome(rows)
    assert (found["accuracy"], found["area"], found["grad_norm"]) == (0.8, pytest.approx(0.6), 3.0)
    assert (found["accuracy/0"], found["accuracy/2"]) == (0.4, 0.8)


def test_a_finished_run_is_not_run_again_and_an_unfinished_one_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []

    def trained(*run: object, resume: bool) -> None:
        began.append((run[2], resume))
        write_rows(next(job for job in (unfinished, new) if job.name == run[2]), STEPS)

    monkeypatch.setattr(benefit, "trained", trained)
    finished, unfinished, new = jobs([0], tmp_path, tmp_path / "runs.jsonl")[:3]
    write_rows(finished, STEPS)
    finished.keep()
    write_rows(unfinished, 40)
    for job in (finished, unfinished, new):
        make(job, time.time() - 1)
    assert began == [], "the time is over"
    for job in (finished, unfinished, new):
        make(job, time.time() + 60)
    assert began == [(unfinished.name, True), (new.name, False)]
    assert [job.outcome() for job in (unfinished, new)] == [finished.outcome()] * 2, "kept, wherever its folder is"


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


def test_claims_are_about_arms_and_metrics_that_are_measured() -> None:
    values = {
        arm: {"accuracy": [0.9, 0.91, 0.92, 0.9, 0.91], "area": [0.8] * 5, "collapsed": [0.0] * 5} for arm, _ in arms()
    }
    values["one update: exact FP8"]["abs_d"] = [0.0] * 5
    values["one update: exact FP8, slow"]["accuracy"] = [0.1, 0.12, 0.11, 0.1, 0.13]
    verdicts = {judged.claim.id: judged.verdict for judged in judge(STUDY.claims, values, full=True)}
    assert (verdicts["same arm twice"], verdicts["too slow"], verdicts["benefit-9"]) == ("confirmed",) * 3
    assert (verdicts["benefit-7a"], verdicts["benefit-7b"]) == ("confirmed", "contradicted")

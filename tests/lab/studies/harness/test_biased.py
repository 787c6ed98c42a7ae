"""Biased engines, and the runs that have them."""

import os
import subprocess
import sys

import pytest
import torch

from fp8rl.rl.experiment import load_experiment
from lab.studies.drift import SEEDS, arms, jobs, outcome
from lab.studies.harness.biased import GRID, environment, to_e2m1
from lab.studies.harness.subjects import EXAMPLES


def test_weights_of_four_bits_have_sixteen_values_a_group_and_are_the_nearest() -> None:
    codes = (20 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0))).to(torch.float8_e4m3fn)
    for group, rounded in zip(codes.float().view(-1, 32), to_e2m1(codes).float().view(-1, 32), strict=True):
        scale = group.abs().max() / 6
        nearest = min(GRID, key=lambda value: abs(value - float(group[0].abs() / scale)))
        assert len(rounded.abs().unique()) <= len(GRID) and rounded.abs().max() == group.abs().max()
        assert abs(rounded[0].abs() - nearest * scale) <= 0.07 * nearest * scale, "E4M3 has steps of 1/8"


@pytest.mark.slow
def test_only_the_engine_of_a_biased_run_draws_from_other_logits() -> None:
    assert environment(None) == os.environ
    told = "from fp8rl.rollout.engine.plugin import sampling; print(sampling.narrowed.__qualname__)"
    for plugin, name in (({}, "narrowed"), ({"FP8RL_PLUGIN": "{}"}, "install")):
        options = {"env": environment("head") | plugin, "capture_output": True, "text": True}
        run = subprocess.run([sys.executable, "-c", told], **options)  # type: ignore
        assert run.stdout.startswith(name), run.stderr


def test_every_arm_of_drift_is_a_spec_and_a_run_of_its_own() -> None:
    for _, settings, _ in arms():
        if "teacher.path" not in settings:  # which a run of the study makes, as it does a model
            own = [f"{key}={value}" for key, value in settings.items() if key != "model.path"]
            load_experiment(EXAMPLES / "arithmetic.yaml", own)
    names = [job.name for job in jobs(range(SEEDS))]
    assert len(names) == len(set(names)) == 5 * len(list(arms()))


def test_a_run_that_falls_to_half_of_its_best_span_has_collapsed() -> None:
    def run(*spans: float) -> list[dict[str, float]]:
        steps = [reward for reward in spans for _ in range(20)]
        return [{"step": 0, "eval/accuracy": 0.5}] + [
            {"step": step, "rollout/reward_mean": reward, "eval/accuracy": reward}
            for step, reward in enumerate(steps, 1)
        ]

    fell, rose = outcome(run(0.2, 0.8, 0.3)), outcome(run(0.2, 0.5, 0.8))
    assert (fell["collapsed"], rose["collapsed"]) == (1.0, 0.0)
    assert fell["left"] == 0.3 / 0.8 and abs(rose["gain"] - 0.6) < 1e-9 and rose["reward/40"] == 0.5

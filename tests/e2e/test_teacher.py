"""A run that learns from a teacher as well as from rewards. The teacher is the model that the policy starts from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from fp8rl.rl.record.metrics_log import read_metrics
from fp8rl.trainer.config import TrainerSection
from tests.support.live_runs import finished
from tests.support.paths import EXAMPLES
from tests.support.ranks import run_on_ranks
from tests.support.recompute import taught_step

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_teacher_says_what_the_trainer_would_at_its_weights_bit_for_bit(tmp_path: Path, stacks: None) -> None:
    start = EXAMPLES / "models/tiny_qwen3_moe"
    settings = ["run.steps=2", "rollout.prompts_per_step=8", "rollout.group_size=4", "eval.problems=0"]
    taught = [f"teacher.path={start}", "algorithm.reward_weight=1.0"]
    run = finished(tmp_path, *settings, *taught, example="arithmetic_opd")
    assert "A = teacher_weight (teacher's logprob - sg(logprob)) + reward_weight A of grpo" in run.log.read_text()

    first, second = ([json.loads(line) for line in path.read_text().splitlines()] for path in rollouts(run.path))
    assert all(answer["teacher_logprobs"] == answer["rollout_logprobs"] for answer in first), "it is the policy"
    _, one, two = read_metrics(run.metrics)
    assert one["train/teacher_kl"] == 0.0 and one["mismatch/exact_frac"] == two["mismatch/exact_frac"] == 1.0

    # The policy has moved, and the teacher has not.
    assert two["train/teacher_kl"] != 0.0
    assert all(answer["teacher_logprobs"] != answer["rollout_logprobs"] for answer in second)
    again = partial(taught_step, run.path, start, second)
    ((metrics, scores),) = run_on_ranks(TrainerSection(), tmp_path / "again", again)
    assert scores == [answer["teacher_logprobs"] for answer in second]
    assert metrics == {name: one[name] for name in metrics} and "train/teacher_kl" in metrics


def rollouts(run: Path) -> list[Path]:
    return [run / f"rollouts/step_{step}.jsonl" for step in (1, 2)]

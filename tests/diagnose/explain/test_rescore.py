"""What is said of a capsule that was scored again; real capsules are in tests/e2e/test_gates.py."""

import dataclasses
import json
from contextlib import closing

import pytest
import torch

from fp8rl.diagnose.explain import drift, reported
from fp8rl.diagnose.explain.rescore import Rescored
from fp8rl.diagnose.report import Report
from fp8rl.diagnose.subject import Subject
from fp8rl.rl.guard.capsule import Capsule, read_capsule
from fp8rl.rl.record.metrics_log import MetricsLog
from tests.support.commands import invoke, shown
from tests.support.scored_batches import CapsuleRun, scored_batch


@pytest.fixture
def capsule(tmp_path) -> Capsule:
    seen = scored_batch([0.0, 0.0], [0.5, -1.0])
    return read_capsule(CapsuleRun.make(tmp_path).write(4, ["because"], seen, [1, 0], weights=False))


def rescored(capsule: Capsule, change: float = 0.0, mode: str = "exact") -> Rescored:
    """A rescoring in which the first sampled token of the first row came out `change` nats higher."""
    capsule = dataclasses.replace(capsule, numerics=dataclasses.replace(capsule.numerics, mode=mode))
    logprobs = capsule.scored.logprobs.clone()
    logprobs[0, 2] += change
    seen = dataclasses.replace(capsule.scored, logprobs=logprobs)
    return Rescored(capsule, seen, seen.metrics())


def report_of(again: Rescored) -> Report:
    capsule = again.capsule
    subject = Subject("demo step_4", capsule.path, capsule.experiment, capsule.numerics, capsule=capsule)
    return reported(subject, again, None)


def test_exact_mode_accepts_no_difference_at_all(capsule: Capsule) -> None:
    assert rescored(capsule).reproduced
    ulp = rescored(capsule, change=1e-6)
    assert not ulp.reproduced and ulp.facts()["equal_tokens"] == 3
    capsule.about.metrics["mismatch/exact_frac"] = 0.75
    assert not rescored(capsule).reproduced


def test_native_mode_measures_a_difference(capsule: Capsule) -> None:
    assert rescored(capsule, 0.02, "native").reproduced, "0.005 in the mean of four tokens"
    assert not rescored(capsule, 0.08, "native").reproduced


def test_a_logprob_that_is_no_number_is_reproduced_by_none_else(capsule: Capsule) -> None:
    seen = dataclasses.replace(capsule.scored, logprobs=capsule.scored.logprobs.clone())
    seen.logprobs[0, 2] = torch.nan
    broken = dataclasses.replace(
        capsule, scored=seen, about=capsule.about.model_copy(update={"metrics": seen.metrics()})
    )
    assert rescored(broken).reproduced
    lost = Rescored(capsule, seen, seen.metrics())
    assert not lost.reproduced
    facts = json.loads(report_of(lost).to_json())["facts"]
    assert facts["scored_again"]["largest_change"] is None and facts["compared"] is None


def test_the_table_begins_with_the_worst_token(capsule: Capsule) -> None:
    report = report_of(rescored(capsule, change=0.25))
    said = shown(report)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert [(row[0], row[1], row[-1]) for row in rows[:2]] == [("1", "3", "-1.00e+00"), ("1", "2", "5.00e-01")]
    assert "because" in said and "error  trainer: found 3 of 4 recorded log-probabilities come out again" in said
    assert not report.ok and report_of(rescored(capsule)).ok
    assert "mismatch/train_rollout_logprob_abs_diff_mean: recorded" in said


def test_bad_input_is_one_message_and_exit_code_2(capsule: Capsule, tmp_path) -> None:
    code, said = invoke("explain", "--quick", tmp_path)
    assert code == 2 and said.startswith("error: RUN|CAPSULE: found ") and said.count("\n") == 1
    assert "expected the directory of a run or of a capsule" in said
    code, said = invoke("rescore", capsule.path)  # its former name
    first, second = said.splitlines()
    assert first == "`fp8rl rescore` is now `fp8rl explain --quick`; the next release drops the old name"
    assert code == 2 and second.startswith("error: --model: found 'nothing, for a capsule without weights'")
    (capsule.path / "tensors.safetensors").unlink()
    code, said = invoke("explain", capsule.path, "--json")
    assert code == 2 and "tensors.safetensors: found 'no such file'" in said


@pytest.mark.parametrize(
    ("bias", "context", "expected"),
    [(0.001, 0.002, "mismatch/bias: noise: the persistent part of d is 0.001 nats in up to 32 steps until 4; noise"),
     (0.02, 0.002, "mismatch/bias: found bias: the persistent part of d is 0.02 nats in up to 32 steps until 4; noise"),
     (0.001, 0.02, "mismatch/context_bias: found bias: the persistent part of d is 0.02 nats in up to 32 steps until")],
)  # fmt: skip
def test_the_metrics_of_a_run_say_noise_or_bias(capsule: Capsule, bias: float, context: float, expected: str) -> None:
    with closing(MetricsLog(capsule.path.parents[1] / "metrics.jsonl", last=-1)) as log:
        log.append(1, {"mismatch/bias": 0.0, "mismatch/bias_noise": 0.0})
        log.append(4, _persisting(bias, context))
        log.append(5, _persisting(0.5, 0.5))  # after the capsule's step
    (finding,) = [each for each in report_of(rescored(capsule)).findings if each.key.startswith("mismatch/")]
    assert str(finding).startswith(expected)
    assert finding.grade == ("warning" if max(bias, context) == 0.02 else "ok")
    native = dataclasses.replace(capsule.numerics, mode="native")
    report = reported(Subject("demo", capsule.path.parents[1], capsule.experiment, native), None, None)
    assert report.ok and report.verdict == "nothing differs now, but the metrics of the run show a bias"
    note, persistent, _ = report.findings
    assert "bias: the persistent part of d is 0.5 nats in up to 32 steps until 5" in persistent.found
    assert "use numerics.mode=exact" in persistent.remedy
    assert "op by op" in note.expected and note.grade == "note"


def _persisting(bias: float, context: float) -> dict[str, float]:
    named = {"bias": bias, "context_bias": context, "bias_noise": 0.003, "context_bias_noise": 0.004}
    return {f"mismatch/{name}": value for name, value in named.items()}


def test_a_run_without_a_difference_is_neither_noise_nor_bias(capsule: Capsule) -> None:
    assert drift(Subject("demo", capsule.path, capsule.experiment, capsule.numerics, capsule=capsule)) is None

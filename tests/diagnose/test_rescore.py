"""The command `fp8rl rescore` and the exit code of a stopped run; real rescorings are in tests/e2e/test_gates.py."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from fp8rl.diagnose.rescore import Rescored, print_rescored
from fp8rl.rl.guard.capsule import Capsule, read_capsule
from tests.support.commands import invoke
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


def test_exact_mode_accepts_no_difference_at_all(capsule: Capsule) -> None:
    assert rescored(capsule).reproduced
    ulp = rescored(capsule, change=1e-6)
    assert not ulp.reproduced and ulp.to_dict()["equal_tokens"] == 3
    metrics = dict(capsule.metrics, **{"mismatch/exact_frac": 0.75})
    assert not rescored(dataclasses.replace(capsule, metrics=metrics)).reproduced


def test_native_mode_measures_a_difference(capsule: Capsule) -> None:
    assert rescored(capsule, 0.02, "native").reproduced, "0.005 in the mean of four tokens"
    assert not rescored(capsule, 0.08, "native").reproduced


def test_a_logprob_that_is_no_number_is_reproduced_by_none_else(capsule: Capsule) -> None:
    seen = dataclasses.replace(capsule.scored, logprobs=capsule.scored.logprobs.clone())
    seen.logprobs[0, 2] = torch.nan
    broken = dataclasses.replace(capsule, scored=seen, metrics=seen.metrics())
    assert rescored(broken).reproduced
    lost = Rescored(capsule, seen, seen.metrics())
    assert not lost.reproduced and lost.to_dict()["largest_change"] is None
    json.dumps(lost.to_dict(), allow_nan=False)


def test_the_table_begins_with_the_worst_token(capsule: Capsule) -> None:
    output = io.StringIO()
    print_rescored(rescored(capsule, change=0.25), Console(width=120, file=output))
    said = output.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert [(row[0], row[1], row[-1]) for row in rows[:2]] == [("1", "3", "-1.00e+00"), ("1", "2", "5.00e-01")]
    assert "because" in said and "NOT reproduced: 3 of 4 trainer logprobs" in said
    assert "mismatch/train_rollout_logprob_abs_diff_mean: recorded" in said


def test_bad_input_is_one_message_and_exit_code_2(capsule: Capsule, tmp_path) -> None:
    code, said = invoke("rescore", tmp_path)
    assert code == 2 and said.startswith("error: capsule: found ") and said.count("\n") == 1
    code, said = invoke("rescore", capsule.path)
    assert code == 2 and said.startswith("error: --model: found 'nothing, for a capsule without weights'")
    (capsule.path / "tensors.safetensors").unlink()
    code, said = invoke("rescore", capsule.path, "--json")
    assert code == 2 and "tensors.safetensors: found 'no such file'" in said

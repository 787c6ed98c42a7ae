"""What `fp8rl eval` is going to ask, and what it refuses before anything starts."""

import json
from pathlib import Path

import pytest

from fp8rl import UserError
from fp8rl.evaluating import EVERY_PROBLEM, read_evaluated
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.guard.guard import GateState
from fp8rl.trainer.checkpoint.files import About, write_about
from tests.support.paths import EXAMPLES, new_run

MODEL = EXAMPLES / "models/tiny_qwen3_moe"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data file in the current directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("sums.jsonl")
    path.write_text(json.dumps({"question": "1+1=?", "answer": "#### 2"}) + "\n")
    return path


def test_a_model_is_asked_every_problem_of_a_file(data: Path) -> None:
    served = read_evaluated(MODEL, [str(data)], ["rewards=[{function: math}]"])
    experiment = served.experiment
    (one,) = experiment.eval.sets
    assert (one.name, Path(one.path), one.problems) == ("sums", data.absolute(), None)
    assert experiment.eval.problems == EVERY_PROBLEM and experiment.data.eval is None
    assert experiment.rewards.functions[0].function == "math"
    assert experiment.model.directory == MODEL and served.numerics == experiment.numerics_config()
    assert experiment.rollout.max_new_tokens == experiment.rollout.context_length - len(["user", *"1+1=?", "assistant"])


@pytest.mark.slow
def test_a_run_is_asked_its_own_sets_or_others_with_keys_of_their_own(data: Path) -> None:
    run = new_run(Path("it"))
    spec = load_experiment(EXAMPLES / "arithmetic.yaml", ["numerics.trainer=bf16", "eval.problems=7"])
    run.experiment.write_text(spec.to_yaml())
    run.model.symlink_to(MODEL)
    served = read_evaluated(run.path, [], [])
    experiment = served.experiment
    assert experiment.model.directory == run.model and served.numerics.trainer == "bf16"
    assert experiment.data.eval == spec.data.eval and experiment.eval.problems == 7
    several = "{name: many, path: sums.jsonl, samples: 4, temperature: 0.7, pass_at: [1, 4]}"
    experiment = read_evaluated(run.path, [several, str(data)], ["rollout.max_new_tokens=9"]).experiment
    assert [one.name for one in experiment.eval.sets] == ["many", "sums"]
    assert experiment.eval.sets[0].pass_at == (1, 4) and experiment.rollout.max_new_tokens == 9


def test_a_run_whose_gate_fell_back_to_bf16_is_asked_in_bf16(data: Path) -> None:
    run = new_run(Path("it"))
    spec = load_experiment(EXAMPLES / "arithmetic.yaml")
    run.experiment.write_text(spec.to_yaml())
    run.model.symlink_to(MODEL)
    run.checkpoint(4).mkdir(parents=True)
    write_about(run.checkpoint(4), About(4, {"standing": GateState(bf16=True).to_dict()}, {}))
    plain = spec.numerics_config()
    assert read_evaluated(run.path, [], []).numerics == plain.in_bf16() != plain
    assert read_evaluated(run.path, [], ["numerics.preset=fp8_block_pow2"]).numerics == plain


@pytest.mark.parametrize(
    ("sets", "overrides", "expected"),
    [([], [], "--set: found none"), (["{name: [}"], [], "--set: found "), (["{name: it}"], [], "eval.sets.0.path"),
     (["sums.jsonl", "sums.jsonl"], [], "found two sets called sums"),
     (["sums.jsonl"], ["eval.problems=0"], "--set: found none")],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(data: Path, sets: list[str], overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        read_evaluated(MODEL, sets, overrides)

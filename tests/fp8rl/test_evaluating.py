"""What `fp8rl eval` asks and refuses; commands on models of the hub, in the cache under a name and a commit."""

import json
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from fp8rl import UserError, evaluating
from fp8rl.diagnose.doctor.conditions import data_found
from fp8rl.diagnose.subject import read_subject
from fp8rl.evaluating import EVERY_PROBLEM, read_evaluated
from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.experiment.contents import fetched
from fp8rl.rl.guard.capsule import read_capsule
from fp8rl.rl.guard.guard import GateState
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.types import Endpoint, EngineDiedError, Group, SamplingParams, Trajectory
from fp8rl.trainer.checkpoint.files import About, write_about
from tests.support.paths import EXAMPLES, new_run
from tests.support.scored_batches import CapsuleRun, scored_batch

MODEL = EXAMPLES / "models/tiny_qwen3_moe"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_a_run_is_asked_its_own_sets_or_others_with_keys_of_their_own(data, capsys) -> None:
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
    assert "left out" not in capsys.readouterr().err, "of the training data, which an evaluation does not read"


def test_a_run_whose_gate_fell_back_to_bf16_is_asked_in_bf16(data: Path) -> None:
    run = new_run(Path("it"))
    spec = load_experiment(EXAMPLES / "arithmetic.yaml")
    run.experiment.write_text(spec.to_yaml())
    run.model.symlink_to(MODEL)
    run.checkpoint(4).mkdir(parents=True)
    write_about(run.checkpoint(4), About(4, {"standing": asdict(GateState(bf16=True))}, {}))
    plain = spec.numerics_config()
    assert read_evaluated(run.path, [], []).numerics == plain.in_bf16() != plain
    assert read_evaluated(run.path, [], ["numerics.preset=fp8_block_pow2"]).numerics == plain


@pytest.mark.parametrize(
    ("sets", "overrides", "expected"),
    [([], [], "--set: found no data"), (["{name: [}"], [], "--set: found "), (["{name: it}"], [], "eval.sets.0.path"),
     (["sums.jsonl", "sums.jsonl"], [], "found two sets called sums"),
     (["sums.jsonl"], ["eval.problems=0"], "--set: found no data")],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(data: Path, sets: list[str], overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        read_evaluated(MODEL, sets, overrides)


def test_an_engine_that_dies_ends_the_evaluation_with_the_end_of_its_log(data: Path, monkeypatch) -> None:
    server = Engine(RolloutSection(), "engine.log")
    server.endpoint, server._process = Endpoint("http://127.0.0.1:9", "a", "b"), subprocess.Popen("false")
    server.log_path.write_text("no memory")
    monkeypatch.setattr(evaluating, "serve", lambda *_: nullcontext(server))
    with pytest.raises(EngineDiedError, match="ended with status 1, expected it to run. The end of .*\nno memory"):
        evaluating.evaluate(read_evaluated(MODEL, [str(data)], []), server.log_path, print)


def test_failures_of_rewards_are_said(data: Path, monkeypatch) -> None:
    async def sampled(groups: list[Group], sampling: SamplingParams) -> list[Trajectory]:
        each = enumerate(groups)
        return [Trajectory(one.prompt.token_ids, [5], [-0.5], True, [0], n, one.seeds[0]) for n, one in each]

    Path("mine.py").write_text("def score(answer, reference):\n    raise KeyError('none')\n")
    data.write_text(3 * data.read_text())
    server = nullcontext(SimpleNamespace(generate_in_any_loop=sampled))
    monkeypatch.setattr(evaluating, "serve", lambda *_: server)
    subject, said = read_evaluated(MODEL, [str(data)], ['rewards=[{function: "mine.py:score"}]']), []
    assert evaluating.evaluate(subject, data, said.append)["eval/sums/accuracy"] == 0
    assert "KeyError: 'none'" in said[-2] and said[-1] == "2 more rewards failed"


NAME, COMMIT = "owner/tiny", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where NAME lies at COMMIT in a cache as a download leaves one, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache/models--owner--tiny"
    shutil.copytree(MODEL, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


@pytest.fixture
def experiment(snapshot: Path) -> Experiment:
    found = fetched(load_experiment(EXAMPLES / "arithmetic.yaml", [f"model.path={NAME}"]))
    assert (found.model.path, found.model.revision, found.model.directory) == (NAME, COMMIT, snapshot)
    return found


@pytest.mark.slow
def test_doctor_reads_its_tokenizer(experiment: Experiment) -> None:
    assert next(each.problems for each in data_found(experiment)) > 0


def test_an_explanation_of_a_run_takes_the_model_that_it_left(experiment: Experiment, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo")
    run.path.mkdir()
    run.experiment.write_text(experiment.to_yaml())
    shutil.copytree(MODEL, run.model)
    assert read_subject(run.path).experiment.model.directory == run.model


def test_a_capsule_begins_with_its_own_weights(experiment: Experiment, tmp_path: Path) -> None:
    capsule = read_capsule(CapsuleRun.make(tmp_path).write(4, [], scored_batch([0.0]), [0]))
    capsule = replace(capsule, experiment=experiment)
    assert capsule.weights is not None and capsule.beginning(capsule.weights).model.directory == capsule.weights


def test_evaluation_renders_with_its_tokenizer(snapshot: Path) -> None:
    served = read_evaluated(Path(NAME), [str(EXAMPLES / "data/arithmetic_eval.jsonl")], [])
    assert served.experiment.model.directory == snapshot

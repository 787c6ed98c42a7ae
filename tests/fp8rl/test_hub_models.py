"""Commands on models of the hub, which are known by a name and a commit and lie in the cache."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from fp8rl.diagnose.doctor.conditions import data_found
from fp8rl.diagnose.subject import read_subject
from fp8rl.evaluating import read_evaluated
from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.experiment.contents import fetched
from fp8rl.rl.guard.capsule import read_capsule
from fp8rl.rl.record.run_dir import RunDir
from tests.support.paths import EXAMPLES
from tests.support.scored_batches import CapsuleRun, scored_batch

MODEL = EXAMPLES / "models/tiny_qwen3_moe"


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


def test_an_attribution_of_a_run_takes_the_model_that_it_left(experiment: Experiment, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo")
    run.path.mkdir()
    run.experiment.write_text(experiment.to_yaml())
    shutil.copytree(MODEL, run.model)
    assert read_subject(run.path, "attribute").experiment.model.directory == run.model


def test_a_capsule_begins_with_its_own_weights(experiment: Experiment, tmp_path: Path) -> None:
    capsule = read_capsule(CapsuleRun.make(tmp_path).write(4, [], scored_batch([0.0]), [0]))
    capsule = replace(capsule, experiment=experiment)
    assert capsule.weights is not None and capsule.beginning(capsule.weights).model.directory == capsule.weights


def test_evaluation_renders_with_its_tokenizer(snapshot: Path) -> None:
    served = read_evaluated(Path(NAME), [str(EXAMPLES / "data/arithmetic_eval.jsonl")], [])
    assert served.experiment.model.directory == snapshot

"""What docs/extending.md shows is what there is, and does what it says."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from rl.experiment import load_experiment
from rl.experiment.preconditions.data import check_data
from rl.experiment.preconditions.tokenizer import load_tokenizer
from rl.run.feed.problems import training_problems
from rollout.environments.functions import load_environment
from rollout.rewards.functions import load_function
from tests.support.conversations import EOS, Stage
from tests.support.paths import EXAMPLES, ROOT


def test_the_documented_environment_is_the_example_and_plays_as_it_says() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    for name in ("second_chance.py", "second_chance.yaml"):
        assert (EXAMPLES / name).read_text() in page
    assert len((EXAMPLES / "second_chance.py").read_text().splitlines()) <= 15
    experiment = load_experiment(EXAMPLES / "second_chance.yaml")
    environment = load_environment(experiment.environment)
    play = Stage(AutoTokenizer.from_pretrained(experiment.model.path))
    right, wrong = "1,3\n#### 3" + EOS, "4" + EOS
    assert play(environment, right).outcome == {"reward": 1.0, "turns": 1.0}
    assert play(environment, wrong, right).outcome == {"reward": 0.5, "turns": 2.0}
    assert play(environment, wrong, wrong).outcome == {"reward": 0.0, "turns": 2.0}


@pytest.mark.slow
def test_the_documented_algorithm_is_the_example_and_joins_by_being_there(tmp_path: Path) -> None:
    """In a copy of the package, with the advantages of a hand-worked case."""
    assert (EXAMPLES / "median.py").read_text() in (ROOT / "docs/extending.md").read_text()
    assert len((EXAMPLES / "median.py").read_text().splitlines()) <= 40
    shutil.copytree(ROOT / "rl", tmp_path / "rl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(EXAMPLES / "median.py", tmp_path / "rl/algorithms")
    program = f"""
import torch
from rl.experiment import load_experiment
overrides = ["algorithm.name=median", "algorithm.clip_high=0.3"]
algorithm = load_experiment({str(EXAMPLES / "arithmetic.yaml")!r}, overrides).algorithm
print(algorithm.clip_high, algorithm.formula)
rewards, groups = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0]), torch.tensor([0, 1, 0, 0, 1])
print(algorithm.trajectory_advantages(rewards, groups).tolist())
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.startswith("0.3 ") and "A = R - median" in said
    assert said.splitlines()[-1] == "[0.0, -0.5, -1.0, 2.0, 0.5]"


def test_the_documented_reward_is_the_example_and_judges_as_it_says() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    for name in ("shows_its_work.py", "custom_reward.yaml"):
        assert (EXAMPLES / name).read_text() in page
    assert len((EXAMPLES / "shows_its_work.py").read_text().splitlines()) <= 15
    ours, own = load_experiment(EXAMPLES / "custom_reward.yaml").rewards.functions
    assert (ours.function, own.weight) == ("integer", 0.2)
    function = load_function(own, "rewards.functions.1")
    offered = {"question": "9+4+5-8=?", "answer": "13,18,10\n#### 10", "reference": "", "finished": True, "tokens": 9}
    assert function(offered) == {"shown": 0.5}
    assert function(offered | {"answer": "13\n#### 10"}) == {"shown": 0.5 / 3}


def test_the_documented_data_are_the_example_and_are_read_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_cache: None
) -> None:
    page = (ROOT / "docs/extending.md").read_text()
    for name in ("short_chains.py", "two_sources.yaml"):
        assert (EXAMPLES / name).read_text() in page
    monkeypatch.setattr(sys, "argv", ["short_chains.py", str(tmp_path / "made.parquet")])
    runpy.run_path(str(EXAMPLES / "short_chains.py"))
    made = pyarrow.parquet.read_table(tmp_path / "made.parquet")
    assert made == pyarrow.parquet.read_table(EXAMPLES / "data/short_chains.parquet")
    spec = load_experiment(EXAMPLES / "two_sources.yaml")
    check_data(spec, load_tokenizer(spec.model.path, "model.path"))
    drawn = training_problems(spec).of_step(1, 400)
    short = [problem for problem in drawn if "crosses_ten" in problem.fields]
    assert len({problem.question for problem in short}) == len(short) == pytest.approx(100, abs=2), "a quarter"
    assert short[0].messages == ({"role": "user", "content": short[0].question},)

"""What docs/extending.md shows is what there is, and does what it says."""

import runpy
import shutil
import subprocess
import sys

import pyarrow.parquet
import pytest
import torch
import yaml
from ray import cloudpickle
from transformers import AutoTokenizer

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.algorithms.policy_gradient import PolicyGradient
from fp8rl.rl.experiment import load_experiment, parse_experiment
from fp8rl.rl.experiment.preconditions.data import check_data
from fp8rl.rl.experiment.preconditions.model import check_algorithm
from fp8rl.rl.experiment.preconditions.tokenizer import load_tokenizer
from fp8rl.rl.run.feed.problems import training_problems
from fp8rl.rollout.tasks.environments.functions import load_environment
from fp8rl.rollout.tasks.rewards import load_function
from tests.support.conversations import EOS, Stage
from tests.support.dry_run import dry_run
from tests.support.paths import EXAMPLES, ROOT

OWN = """
from pydantic import Field
from fp8rl import PolicyGradient

class Own(PolicyGradient):
    quantile: float = Field(default=0.5, le=1.0)

    def trajectory_advantages(self, rewards, groups):
        return rewards - self.quantile
"""


@pytest.mark.parametrize(
    ("page", "files"),
    [("extending", "second_chance.py second_chance.yaml median.py median.yaml"),
     ("extending", "shows_its_work.py custom_reward.yaml two_sources.yaml"),
     ("agents", "agent.py agent.yaml agents_sdk.py tool_calls.yaml")],
)  # fmt: skip
def test_what_a_page_shows_is_the_example(page: str, files: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    assert [name for name in files.split() if (EXAMPLES / name).read_text() not in text] == []


def test_the_documented_environment_plays_as_the_page_says() -> None:
    experiment = load_experiment(EXAMPLES / "second_chance.yaml")
    environment = load_environment(experiment.environment)
    play = Stage(AutoTokenizer.from_pretrained(experiment.model.path))
    right, wrong = "1,3\n#### 3" + EOS, "4" + EOS
    assert play(environment, right).outcome == {"reward": 1.0, "turns": 1.0}
    assert play(environment, wrong, right).outcome == {"reward": 0.5, "turns": 2.0}
    assert play(environment, wrong, wrong).outcome == {"reward": 0.0, "turns": 2.0}


@pytest.mark.slow
def test_the_documented_algorithm_learns_as_the_page_says() -> None:
    experiment = load_experiment(EXAMPLES / "median.yaml", ["algorithm.clip_high=0.3"])
    algorithm = experiment.algorithm
    assert isinstance(algorithm, PolicyGradient) and algorithm.clip_high == 0.3
    assert algorithm.name == f"{EXAMPLES / 'median.py'}:Median" and "median of the group" in experiment.formula
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0]), torch.tensor([0, 1, 0, 0, 1])
    assert algorithm.trajectory_advantages(rewards, groups).tolist() == [0.0, -0.5, -1.0, 2.0, 0.5]
    dry_run(experiment.algorithm, 3)
    again = parse_experiment(yaml.safe_load(experiment.to_yaml())).algorithm
    assert again.model_dump() == algorithm.model_dump() and "quantile" in again.model_dump()


@pytest.mark.slow
def test_an_algorithm_of_ones_own_travels_to_processes_that_have_not_its_file(tmp_path) -> None:
    shutil.copy(EXAMPLES / "median.py", tmp_path / "own.py")
    overrides = [f"algorithm={{name: '{tmp_path / 'own.py'}:Median', quantile: 0.25}}"]
    algorithm = load_experiment(EXAMPLES / "arithmetic.yaml", overrides).algorithm
    (tmp_path / "sent").write_bytes(cloudpickle.dumps(algorithm))
    (tmp_path / "own.py").unlink()
    program = f"""
import pickle, torch
algorithm = pickle.load(open({str(tmp_path / "sent")!r}, "rb"))
print(algorithm.trajectory_advantages(torch.tensor([0.0, 4.0]), torch.tensor([0, 0])).tolist())
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[-1.0, 3.0]"


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        ("class Own: pass", "", "expected a subclass of fp8rl.PolicyGradient"),
        ("from fp8rl import PolicyGradient\nclass Other(PolicyGradient): pass", "", "which has Other"),
        ("import nowhere", "", "a module that can be imported; this one ends in ModuleNotFoundError"),
        (OWN, "algorithm.quantil=0.5", "Did you mean algorithm.quantile?"),
        (OWN, "algorithm.quantile=2.0", "algorithm.quantile: found 2.0, expected a number less than or equal to 1"),
        ("from fp8rl import PolicyGradient\nclass Own(PolicyGradient): pass", "", "expected def trajectory_advan"),
        (OWN.replace("trajectory_adv", "trajectory_av"), "", "Own with def trajectory_avantages', expected def"),
    ],
    ids=[*("no-algorithm", "another-name", "import", "key", "value", "no-advantages", "misspelt")],
)
def test_an_algorithm_of_ones_own_is_looked_at_before_anything_starts(tmp_path, text, override, expected) -> None:
    (tmp_path / "own.py").write_text(text)
    overrides = [f"algorithm.name={tmp_path / 'own.py'}:Own", override]
    with pytest.raises(UserError, match="^algorithm") as error:
        spec = load_experiment(EXAMPLES / "arithmetic.yaml", [each for each in overrides if each])
        check_algorithm(spec.algorithm)
    assert expected in str(error.value)


def test_the_documented_reward_judges_as_the_page_says() -> None:
    ours, own = load_experiment(EXAMPLES / "custom_reward.yaml").rewards.functions
    assert (ours.function, own.weight) == ("integer", 0.2)
    function = load_function(own, "rewards.functions.1")
    offered = {"question": "9+4+5-8=?", "answer": "13,18,10\n#### 10", "reference": "", "finished": True, "tokens": 9}
    assert function(offered) == {"shown": 0.5}
    assert function(offered | {"answer": "13\n#### 10"}) == {"shown": 0.5 / 3}


@pytest.mark.slow
def test_the_documented_data_are_read_as_the_page_says(tmp_path, monkeypatch, data_cache) -> None:
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


def test_the_documented_game_of_gymnasium_plays_as_the_page_says() -> None:
    experiment = load_experiment(EXAMPLES / "blackjack.yaml")
    environment = load_environment(experiment.environment)
    play = Stage(AutoTokenizer.from_pretrained(experiment.model.path))
    dealt = {"fields": {"seed": 3}}
    hit = play(environment, "1" + EOS, "0" + EOS, **dealt)
    assert play.tokenizer.decode(hit.prompt_ids) == "<|user|>7,10,0<|assistant|>"
    assert "<|user|>17,10,0<|assistant|>" in play.tokenizer.decode(hit.token_ids), "a card more, the same each time"
    assert hit.outcome["steps"] == 2.0 and hit.outcome["reward"] in (-1.0, 0.0, 1.0)
    assert play(environment, "7" + EOS, **dealt).outcome == {"reward": -1.0, "steps": 1.0, "unread": 1.0}

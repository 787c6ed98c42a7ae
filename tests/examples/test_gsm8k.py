"""The GSM8K spec, over problems of our own making in the data set's shape."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from fp8rl.rl.experiment import Experiment, load_experiment
from fp8rl.rl.experiment.preconditions.data import check_data
from fp8rl.rl.experiment.preconditions.tokenizer import load_tokenizer
from fp8rl.rl.run.evaluation import held_out
from fp8rl.rl.run.feed.problems import training_problems
from fp8rl.rollout.tasks.data import load_problems
from fp8rl.rollout.tasks.rewards.builtin import integer
from fp8rl.rollout.types import prompt_ids
from tests.support.paths import EXAMPLES

SAMPLE = EXAMPLES / "data/gsm8k_sample.jsonl"
# As Qwen3's, whose argument closes the thoughts before they begin.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = shutil.copytree(EXAMPLES / "models/tiny_qwen3_moe", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def main(tmp_path: Path) -> Path:
    """The folder `main` of the data set as it is downloaded."""
    folder = tmp_path / "main"
    folder.mkdir()
    for split in ("train", "test"):
        shutil.copy(SAMPLE.with_suffix(".parquet"), folder / f"{split}-00000-of-00001.parquet")
    return folder


def over(main: Path, model: Path) -> Experiment:
    sampled = f"{{name: sampled, path: {main}, split: test, samples: 8, temperature: 1.0, pass_at: [1, 8]}}"
    paths = [f"model.path={model}", f"data.train.path={main}", f"data.eval.path={main}"]
    return load_experiment(EXAMPLES / "planned/gsm8k.yaml", [*paths, "eval.problems=6", f"eval.sets=[{sampled}]"])


def test_the_sample_has_the_shape_of_gsm8k() -> None:
    lines = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    assert pyarrow.parquet.read_table(SAMPLE.with_suffix(".parquet")).to_pylist() == lines
    for line in lines:
        assert list(line) == ["question", "answer"]
        *steps, last = line["answer"].split("\n")
        assert steps and any("<<" in step and "=" in step and ">>" in step for step in steps)
        assert last.startswith("#### ") and integer(line["answer"], line["answer"], finished=True) == 1.0


def test_the_spec_takes_the_data_set_as_it_is_downloaded(main: Path, model: Path, data_cache: None) -> None:
    spec, tokenizer = over(main, model), load_tokenizer(model, "model.path")
    remarks: list[str] = []
    check_data(spec, tokenizer, remarks.append)
    first, second = remarks
    assert first.startswith("All 6 evaluated problems of data.eval are") and "of eval.sets.0 are" in second
    lines = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    problems = load_problems(spec.data.training[0])
    assert [(problem.question, problem.answer) for problem in problems] == [tuple(line.values()) for line in lines]
    prompt = tokenizer.decode(prompt_ids(tokenizer, problems[0]))
    assert prompt.startswith("<|system|>Solve the problem step by step.") and prompt.endswith("<think></think>")
    drawn = training_problems(spec).of_step(1, 6)
    assert sorted(problem.question for problem in drawn) == sorted(line["question"] for line in lines)
    greedy, sampled = held_out(spec, tokenizer)
    assert [len(group.seeds) for group in greedy.groups] == [1] * 6
    assert [len(group.seeds) for group in sampled.groups] == [8] * 6 and sampled.sampling.max_new_tokens == 1024

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fp8rl.rl.experiment import Experiment, parse_experiment
from fp8rl.rl.experiment.contents import SAMPLED_BEYOND, contents

EMPTY = "words.py package/__init__.py package/play.py agents/agent.py agents/runner.py table/.cache/lock".split()
EXTRA = {"name": "extra", "path": "eval/extra.jsonl", "rewards": ["strict.py:strict"]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for everything that a spec names, and the current directory."""
    for name, text in {
        **dict.fromkeys(("train.jsonl", "eval/held_out.jsonl", "eval/extra.jsonl"), "{}\n"),
        "table/part-0.parquet": "columns",
        "reward.py": "import words\ndef right(answer): return words.count(answer)",
        "strict.py": "def strict(answer): return 0",
        "agents/agent.sh": "echo",
        "model/config.json": "{}",
        "model/chat_template.jinja": "{{ messages }}",
        **dict.fromkeys(("model/model.safetensors", "teacher/model.safetensors"), "weights"),
        **dict.fromkeys(EMPTY, ""),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def experiment(**changes: Any) -> Experiment:
    return parse_experiment(
        {
            "model": {"path": "model"},
            "data": {"train": ["train.jsonl", "table"], "eval": "eval/held_out.jsonl"},
            "eval": {"sets": [EXTRA | {"rewards": [{"function": "strict.py:strict"}]}]},
            "rewards": [{"function": "reward.py:right"}, {"function": "integer"}],
            "environment": {"function": "package.play:play"},
            **changes,
        }
    )


HARNESS = {
    "function": "harness",
    "harness": {"command": ["sh", "agent.sh", "x" * 300, "agent.py", "-m", "runner"], "directory": "agents"},
}


@pytest.mark.parametrize(
    ("file", "key"),
    [
        *((f"agents/{name}", "environment.harness.command") for name in ("agent.sh", "agent.py", "runner.py")),
        *((name, "") for name in ("words.py", "table/.cache/lock", "table/cache-1.arrow", "model/README.md")),
        ("table/part-0.parquet", "data.train.1"),
        ("eval/held_out.jsonl", "data.eval"),
        ("eval/extra.jsonl", "eval.sets.0"),
        ("reward.py", "rewards.functions.0.function"),
        ("package/play.py", "environment.function"),
        ("model/chat_template.jinja", "model.path"),
        ("model/model.safetensors", "model.path"),
    ],
)
def test_other_contents_of_a_file_are_other_contents_of_the_key_that_names_it(home: Path, file: str, key: str) -> None:
    """What a run does not read does not count."""
    own = {"environment": HARNESS} if file.startswith("agents") else {}
    found = changed(partial(experiment, **own), lambda: (home / file).write_text("import os  # other\n"))
    assert found == [key] * bool(key)


def test_files_that_come_go_or_are_renamed_in_a_directory_of_data_count(home: Path) -> None:
    assert changed(experiment, lambda: (home / "table/part-1.parquet").write_text("more")) == ["data.train.1"]
    assert changed(experiment, lambda: (home / "table/part-1.parquet").rename(home / "table/b")) == ["data.train.1"]
    assert changed(experiment, (home / "table/b").unlink) == ["data.train.1"]


def test_only_what_a_run_reads_is_digested(home: Path) -> None:
    assert set(contents(experiment(eval={"problems": 0}))) == {
        "data.train.0",
        "data.train.1",
        "model.path",
        "rewards.functions.0.function",
        "environment.function",
    }
    taught = contents(experiment(algorithm={"name": "opd"}, teacher={"path": "teacher"}))
    assert taught["teacher.path"].said == "teacher"


def test_the_place_of_a_file_is_not_its_contents(home: Path) -> None:
    before = contents(experiment())
    (home / "train.jsonl").rename(home / "moved.jsonl")
    after = contents(experiment(data={"train": ["moved.jsonl", "table"], "eval": "eval/held_out.jsonl"}))
    assert before["data.train.0"].digest == after["data.train.0"].digest
    assert (before["data.train.0"].said, after["data.train.0"].said) == ("train.jsonl", "moved.jsonl")


def test_weights_that_are_trained_further_differ_although_not_all_of_a_large_file_is_read(home: Path) -> None:
    weights = home / "model/model.safetensors"
    with weights.open("wb") as file:
        file.truncate(2 * SAMPLED_BEYOND)

    def train() -> None:
        with weights.open("r+b") as file:
            for place in range(0, 2 * SAMPLED_BEYOND, 1 << 20):
                file.seek(place + 4096)
                file.write(b"1")

    assert changed(experiment, train) == ["model.path"]


def changed(make: Callable[[], Experiment], change: Callable[[], object]) -> list[str]:
    before = contents(make())
    change()
    after = contents(make())
    assert before.keys() == after.keys()
    return [key for key in after if after[key] != before[key]]

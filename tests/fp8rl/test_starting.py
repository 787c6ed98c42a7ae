"""What `fp8rl init` writes is an experiment, and `fp8rl runs` shows what runs have in common and what not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fp8rl.cli import app
from rl.experiment import load_experiment
from rl.experiment.reference import schema_text
from rollout.rewards.functions import load_function
from tests.support.paths import new_run


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_the_first_experiment_is_whole_and_reads_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = invoke("init", tmp_path / "mine")
    assert code == 0 and "fp8rl train spec.yaml" in printed
    monkeypatch.chdir(tmp_path / "mine")
    assert Path("spec.yaml").read_text().startswith("# yaml-language-server: $schema=spec.schema.json\n")
    assert Path("spec.schema.json").read_text() == schema_text()
    assert len(Path("data.jsonl").read_text().splitlines()) == 5
    experiment = load_experiment(Path("spec.yaml"))
    assert Path(experiment.model.path, "model.safetensors").stat().st_size > 1 << 20
    reward = load_function(experiment.rewards.functions[0], "rewards.functions.0")
    problem = json.loads(Path("data.jsonl").read_text().splitlines()[0])
    assert reward({"answer": "13,18,10\n#### 10", "reference": problem["answer"]}) == 1.0
    assert reward({"answer": "13", "reference": problem["answer"]}) == 0.0
    code, printed = invoke("init", ".")
    assert code == 2 and "expected a new folder, or an empty one" in printed


def test_runs_are_listed_and_two_are_compared_in_spec_and_metrics(tmp_path: Path) -> None:
    invoke("init", tmp_path / "mine")
    for name, rate, rewards in (("a", 1e-4, (0.25, 0.5)), ("b", 2e-4, (0.25, 0.75))):
        run = new_run(tmp_path / "runs" / name)
        spec = load_experiment(tmp_path / "mine/spec.yaml", [f"run.name={name}", f"trainer.lr={rate}"])
        run.experiment.write_text(yaml.safe_dump(spec.to_dict()))
        rows = [{"step": step, "rollout/reward_mean": value} for step, value in enumerate(rewards, 1)]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, printed = invoke("runs", "--dir", tmp_path / "runs")
    assert code == 0 and "2/30" in printed and "0.75" in printed
    code, printed = invoke("runs", "a", "b", "--dir", tmp_path / "runs", "--page", tmp_path / "page.html")
    assert code == 0 and "trainer.lr" in printed and "trainer.min_lr" not in printed
    (row,) = [line for line in printed.splitlines() if "rollout/reward_mean" in line]
    assert ["0.375", "0.5", "0.125"] == [part.strip() for part in row.split("│")[3:6]]
    assert "rollout/reward_mean" in (tmp_path / "page.html").read_text()
    assert invoke("runs", "a", "--dir", tmp_path / "runs")[0] == 2
    assert invoke("runs", "--dir", tmp_path / "none")[0] == 2


def test_names_are_shown_as_they_are_and_end_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are markup, a link, or a command to a terminal, of folders, runs, keys and texts."""
    named = tmp_path / "[/b][link=x] \x1b[31m:cat:"
    monkeypatch.setenv("COLUMNS", "400")
    code, printed = invoke("init", named)
    assert code == 0 and "[/b][link=x] [31m:cat:/reward.py" in printed
    experiment = load_experiment(named / "spec.yaml").to_dict()
    for name in ("[/a]", "[b]"):
        run = new_run(named / "runs" / name)
        chat = {"data": experiment["data"] | {"chat_template": {"system": f"[/b]\x1b[2J{name}"}}}
        run.experiment.write_text(yaml.safe_dump(experiment | chat))
        run.metrics.write_text(json.dumps({"step": 1, "rollout/reward_mean": 0.5}) + "\n")
    commands = (
        ("report", run.path),
        ("runs", "--dir", named / "runs"),
        ("runs", "[/a]", "[b]", "--dir", named / "runs", "--page", named / "[page].html"),
    )
    for arguments in commands:
        code, printed = invoke(*arguments)
        assert code == 0 and "[b]" in printed and "\x1b" not in printed, printed
    assert "[/b][2J[b]" in printed
    code, printed = invoke("report", named / "[/none]")
    assert code == 2 and "[/none]" in printed and "\x1b" not in printed


def test_the_shell_can_complete_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # whatever shell the tests run in
    code, printed = invoke("--show-completion", "bash")
    assert code == 0 and "COMPLETE=complete_bash" in printed

"""What `fp8rl init` writes is an experiment, and `fp8rl runs` shows what runs have in common and what not."""

import json
import re
from pathlib import Path

import pytest
import yaml

from fp8rl.commands.runs import SCHEMA
from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import load_experiment, read_resolved
from fp8rl.rollout.tasks.rewards import load_function
from tests.support.commands import invoke
from tests.support.paths import new_run


@pytest.mark.slow
def test_the_first_experiment_is_whole_and_reads_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = invoke("init", tmp_path / "mine")
    assert code == 0 and "fp8rl train spec.yaml" in printed
    monkeypatch.chdir(tmp_path / "mine")
    assert Path("spec.yaml").read_text().startswith("# yaml-language-server: $schema=spec.schema.json\n")
    assert Path("spec.schema.json").read_text() == SCHEMA.read_text()
    assert len(Path("data.jsonl").read_text().splitlines()) == 5
    experiment = load_experiment(Path("spec.yaml"))
    assert Path(experiment.model.path, "model.safetensors").stat().st_size > 1 << 20
    reward = load_function(experiment.rewards.functions[0], "rewards.functions.0")
    problem = json.loads(Path("data.jsonl").read_text().splitlines()[0])
    assert reward({"answer": "13,18,10\n#### 10", "reference": problem["answer"]}) == 1.0
    assert reward({"answer": "13", "reference": problem["answer"]}) == 0.0
    code, printed = invoke("init", ".")
    assert code == 2 and "expected a new folder, or an empty one" in printed


def made_run(base: Path, name: str, rate: float, rows: list[dict[str, float]]) -> None:
    run = new_run(base / "runs" / name)
    own = {"run": {"name": name[0], "steps": 9}, "trainer": {"lr": rate}}
    spec = load_experiment({"model": {"path": "m"}, "data": {"train": "d"}, **own})
    run.experiment.write_text(spec.to_yaml())
    run.metrics.write_text("".join(json.dumps({"step": step} | row) + "\n" for step, row in enumerate(rows, 1)))


LARGEST = "mismatch/train_rollout_logprob_abs_diff_max"


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs `a` and `b[red]`, whose name would be markup."""
    for name, rate, rewards, seconds in (("a", 1e-4, (0.25, 0.5), (9, 2)), ("b[red]", 2e-4, (0.25, 0.75), (9, 4))):
        rows = [
            {"rollout/reward_mean": reward, LARGEST: 0.0, "perf/step_seconds": time, "rollout/tokens": 7.0}
            for reward, time in zip(rewards, seconds, strict=True)
        ]
        for row in rows[: 1 + (name == "a")]:  # both were evaluated after step 1, and one after step 2 as well
            row["eval/hard/accuracy"] = row["rollout/reward_mean"]
        made_run(tmp_path, name, rate, [*rows, {"perf/step_seconds": 3.0, "train/lr": rate}])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table_of(printed: str) -> dict[str, list[str]]:
    """The lines of the printed tables by their first word."""
    return {cells[0]: cells[1:] for line in printed.splitlines() if (cells := line.split())}


@pytest.mark.slow
def test_runs_are_listed_with_one_number_for_the_time_of_a_step(two_runs: Path) -> None:
    code, printed = invoke("runs")
    lines = table_of(printed)
    assert code == 0 and lines["a"] == ["3/9", "0.5", "0", "3"] and lines["b[red]"][-1] == "4"
    code, printed = invoke("runs", "a", "b[red]")
    assert table_of(printed)["perf/step_seconds"] == ["s", "3", "4", "1"]
    assert table_of(printed)["eval/hard/accuracy"] == ["0.25", "0.25", "0"], "of the last step that both evaluated"
    assert invoke("runs", "--dir", two_runs / "none")[0] == 2


def test_a_run_that_cannot_be_read_is_a_line_among_the_others(two_runs: Path) -> None:
    spec = two_runs / "runs/a/spec.yaml"
    for text, said in (("a: [", "valid YAML"), ("model: {}\ndata: {train: d}\n", "model.path: found nothing")):
        spec.write_text(text)
        code, printed = invoke("runs")
        assert code == 0 and table_of(printed)["b[red]"][-1] == "4"
        whole = "".join(printed.split())
        assert "cannotberead:" in whole and said.replace(" ", "") in whole and "runs/a/spec.yaml" in whole
    with pytest.raises(UserError, match=r"runs/a/spec\.yaml: model\.path: found nothing"):
        read_resolved(spec)


def test_two_runs_are_compared_in_what_differs_and_what_always_matters(two_runs, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, printed = invoke("runs", "a", "b[red]", "--page", "page.html")
    lines = table_of(printed)
    assert code == 0 and lines["trainer.lr"] == ["0.0001", "0.0002"] and "trainer.min_lr" not in lines
    assert lines["rollout/reward_mean"] == ["0.375", "0.5", "0.125"]
    assert lines[LARGEST] == ["nats", "0", "0", "0"] and lines["train/lr"][-1] == "0.0001"
    assert "rollout/tokens" not in lines and "1 more are equal (--all)" in " ".join(printed.split())
    assert table_of(invoke("runs", "a", "b[red]", "--all")[1])["rollout/tokens"] == ["tokens", "7", "7", "0"]
    page = Path("page.html").read_text()
    (charts,) = re.findall(r'id="charts">(.*?)</script>', page)
    reward = next(chart for chart in json.loads(charts) if chart["title"] == "Reward")
    assert [(t["name"], t["y"]) for t in reward["traces"]] == [("a", [0.25, 0.5]), ("b[red]", [0.25, 0.75])]
    assert reward["traces"][0]["color"] != reward["traces"][1]["color"]
    assert "trainer.lr" in page and invoke("runs", "--page", "all.html")[0] == 0
    code, printed = invoke("runs", "a")
    assert code == 2 and "found 'one name', expected none or two" in printed
    monkeypatch.setenv("COLUMNS", "60")  # a narrow terminal folds names and cuts none
    printed = invoke("runs", "a", "b[red]")[1]
    assert "…" not in printed and LARGEST in "".join(line.split()[0] for line in printed.splitlines() if line.strip())


@pytest.mark.slow
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
    page = ("--page", named / "[page].html")
    for arguments in (
        ("report", run.path), ("runs", "--dir", named / "runs"),
        ("runs", "[/a]", "[b]", "--dir", named / "runs", *page),
    ):  # fmt: skip
        code, printed = invoke(*arguments)
        assert code == 0 and "[b]" in printed and "\x1b" not in printed, printed
    assert "[/b][2J[b]" in printed
    code, printed = invoke("report", named / "[/none]")
    assert code == 2 and "[/none]" in printed and "\x1b" not in printed

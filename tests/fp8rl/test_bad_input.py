"""Some three hundred bad inputs, always the same ones: each is refused in one sentence, or is none after all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

import fp8rl.diagnose.explain
import fp8rl.evaluating
import fp8rl.rl.run.run
import fp8rl_certify.dump.command
from fp8rl.cli import app
from fp8rl.numerics.core.process import time_limit
from fp8rl.rl.experiment import load_experiment
from fp8rl.rollout.engine.engine import Engine
from fp8rl_certify.dump.reading import read_dump
from fp8rl_certify.dump.reference import facts
from tests.support.commands import result_of
from tests.support.disks import room
from tests.support.odd_input import KINDS, TEXTS, changed, flipped, places, with_header
from tests.support.paths import EXAMPLES

pytestmark = pytest.mark.slow

MODEL = EXAMPLES / "models/tiny_qwen3_moe"
SECONDS = 20.0
"""No input keeps a command for so long."""
LONGEST = 4096
"""Characters of a refusal."""
Command = list[str | Path]


class AcceptedError(Exception):
    """The input was taken, and something would be started now."""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("input") / "experiment"
    assert result_of("init", folder).exit_code == 0
    return folder


@pytest.fixture
def folder(experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_cache: None) -> Path:
    """A copy of it, where nothing is started: what would be raises `AcceptedError`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FP8RL_API_KEY", raising=False)
    monkeypatch.setattr(fp8rl.rl.run.run, "open_run", _accept)
    monkeypatch.setattr(fp8rl.diagnose.explain, "explain", _accept)
    monkeypatch.setattr(fp8rl.evaluating, "serve", _accept)
    monkeypatch.setattr(Engine, "start", _accept)
    monkeypatch.setattr(fp8rl_certify.dump.command, "certify_dump", _read_only)
    return _anew(experiment, tmp_path / "it")


def _accept(*_: Any, **__: Any) -> NoReturn:
    raise AcceptedError


def _read_only(dump: Path, weights: Path | None, **_: Any) -> NoReturn:
    found = read_dump(dump, weights)
    facts(weights or found.model or MODEL)
    raise AcceptedError


def _anew(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


def problem_with(command: Command) -> str:
    """What a command did other than refuse its input in one sentence, or take it; empty."""
    with time_limit(SECONDS):
        result = CliRunner().invoke(app, [str(part) for part in command])
    said, error = result.output, result.exception
    if isinstance(error, AcceptedError):
        return ""
    if error is not None and not isinstance(error, SystemExit):
        return f"{type(error).__name__}: {error}"
    if result.exit_code == 2:
        once = sum(line.startswith("error: ") for line in said.splitlines()) == 1 or "Usage: " in said
        return "" if once and len(said) <= LONGEST else f"not one sentence: {said[:200]}"
    return "" if result.exit_code in (0, 1) else f"exit code {result.exit_code}"


def check(commands: Iterator[Command]) -> None:
    found = [(str(command)[:300], what) for command in commands if (what := problem_with(command))]
    assert not found, "\n".join(map(str, found))


def spec_of(folder: Path) -> dict[str, Any]:
    return load_experiment(folder / "spec.yaml").to_dict()


def keys_of(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield above + name
        if isinstance(value, dict):
            yield from keys_of(value, f"{above}{name}.")


def specs_with_other_bytes(folder: Path) -> Iterator[Command]:
    draw, path = Random(1), folder / "spec.yaml"
    whole = path.read_bytes()
    for number in range(30):
        path.write_bytes(flipped(whole, draw))
        yield ["train" if number % 2 else "plan", path]


def specs_with_other_values(folder: Path) -> Iterator[Command]:
    draw, values = Random(2), spec_of(folder)
    for number in range(30):
        (folder / "spec.yaml").write_text(json.dumps(changed(values, draw)))
        yield ["train" if number % 2 else "plan", folder / "spec.yaml"]


def specs_whose_aliases_never_end(folder: Path) -> Iterator[Command]:
    text = (folder / "spec.yaml").read_text()
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    tagged = text.replace("first", "!!str &n first")
    for spec in (bomb + text, text + "x: &x {y: *x}\n", "- " * 3000, "{" * 5000, "a: " * 60, tagged):
        (folder / "spec.yaml").write_text(spec)
        yield ["train", folder / "spec.yaml"]


def overrides(folder: Path) -> Iterator[Command]:
    draw = Random(3)
    keys = [*keys_of(spec_of(folder)), "environment.harness.command", "environment.harness.program", "adapter", "xx"]
    for _ in range(50):
        override = f"{draw.choice(keys)}={draw.choice(TEXTS)}"
        yield ["train", folder / "spec.yaml", "--", draw.choice([override] * 9 + [override[::-1]])]


def sets_of_an_evaluation(folder: Path) -> Iterator[Command]:
    for text in TEXTS[::6]:
        yield ["eval", MODEL, "--set", text]
        yield ["eval", MODEL, "--set", "{path: " + text + "}"]


def lines_of_data(folder: Path) -> Iterator[Command]:
    draw, good = Random(4), {"question": [{"role": "user", "content": "1"}], "answer": "#### 2"}
    for _ in range(20):
        (folder / "data.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(changed(good, draw)) + "\n")
        yield ["train", folder / "spec.yaml"]


def lines_of_a_dump(folder: Path) -> Iterator[Command]:
    draw, good = Random(5), {"tokens": [1, 2, 3, 4], "prompt_length": 2, "logprobs": [-0.1, -0.2], "temperature": 1.0}
    for _ in range(20):
        (folder / "dump.jsonl").write_text(json.dumps(changed(good, draw)) + "\n")
        yield ["certify", folder / "dump.jsonl", "--model", MODEL]


def on_a_model(folder: Path, draw: Random) -> Command:
    others: list[Command] = [["serve", folder / "model"], ["eval", folder / "model", "--set", folder / "data.jsonl"]]
    return draw.choice([["plan", folder / "model"], ["train", folder / "spec.yaml"], *others])


def descriptions_of_models(folder: Path) -> Iterator[Command]:
    draw, path = Random(6), folder / "model/config.json"
    whole = json.loads(path.read_text())
    further = dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config", "text_config", "layer_types"))
    for number in range(40):
        path.write_text(json.dumps(changed(whole | further if number % 2 else whole, draw)))
        yield on_a_model(folder, draw)


def files_of_tokenizers(folder: Path) -> Iterator[Command]:
    draw = Random(7)
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
    for number in range(16):
        _anew(MODEL, folder / "model")
        path = folder / "model" / names[number % 4]
        path.write_bytes(flipped(path.read_bytes(), draw))
        yield on_a_model(folder, draw)


def headers_of_weights(folder: Path) -> Iterator[Command]:
    draw, path = Random(8), folder / "model/model.safetensors"
    whole = path.read_bytes()
    for number in range(16):
        path.write_bytes(whole if number % 4 else flipped(whole[:2000], draw) + whole[2000:])
        if number % 4:
            with_header(path, lambda header: changed(header, draw))
        yield on_a_model(folder, draw)


INPUTS = [specs_with_other_bytes, specs_with_other_values, specs_whose_aliases_never_end, overrides]
INPUTS += [sets_of_an_evaluation, lines_of_data, lines_of_a_dump]
INPUTS += [descriptions_of_models, files_of_tokenizers, headers_of_weights]


@pytest.mark.parametrize("commands", INPUTS)
def test_odd_input_is_refused_or_taken(commands: Callable[[Path], Iterator[Command]], folder: Path) -> None:
    check(commands(folder))


FILES: dict[str, Callable[[Path], Command]] = {
    "spec.yaml": lambda folder: ["train", folder / "spec.yaml"],
    "data.jsonl": lambda folder: ["train", folder / "spec.yaml"],
    "reward.py": lambda folder: ["train", folder / "spec.yaml"],
    "model/config.json": lambda folder: ["plan", folder / "model"],
    "model/tokenizer.json": lambda folder: ["train", folder / "spec.yaml"],
    "model/model.safetensors": lambda folder: ["serve", folder / "model"],
    "model/generation_config.json": lambda folder: ["eval", folder / "model", "--set", folder / "data.jsonl"],
    "bench.json": lambda folder: ["plan", folder / "spec.yaml", "--bench", folder / "bench.json"],
    "dump.pt": lambda folder: ["certify", folder / "dump.pt", "--model", MODEL],
    "dump.safetensors": lambda folder: ["certify", folder / "dump.safetensors", "--model", MODEL],
}


@pytest.mark.parametrize("file", FILES)
def test_other_things_in_place_of_a_file(folder: Path, file: str) -> None:
    def commands() -> Iterator[Command]:
        for make in list(KINDS.values())[len(file) % 2 :: 2]:
            _without(folder / file)
            make(folder / file)
            yield FILES[file](folder)

    check(commands())


def _without(path: Path) -> None:
    if os.path.lexists(path):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def run(folder: Path) -> Path:
    path = folder / "runs/a"
    path.mkdir(parents=True)
    overrides = ["run.name=a", f"run.dir={path.parent}", "run.steps=2"]
    (path / "spec.yaml").write_text(load_experiment(folder / "spec.yaml", overrides).to_yaml())
    rows = [{"step": step, "rollout/reward_mean": 0.5, "perf/step_seconds": 1.0} for step in range(3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "model").symlink_to(folder / "model")
    return path


def test_runs_with_damaged_files(run: Path) -> None:
    draw, kinds = Random(9), list(KINDS.values())
    whole = {name: (run / name).read_bytes() for name in ("spec.yaml", "metrics.jsonl")}

    def commands() -> Iterator[Command]:
        for number in range(24):
            for name, data in whole.items():
                _without(run / name)
                (run / name).write_bytes(data)
            path = run / ("metrics.jsonl" if number % 2 else "spec.yaml")
            if number % 3:
                path.write_bytes(flipped(path.read_bytes(), draw))
            else:
                path.unlink()
                kinds[number % len(kinds)](path)
            every: list[Command] = [["report", run], ["runs", "--dir", run.parent], ["explain", run], ["serve", run]]
            yield draw.choice(
                [*every, ["train", run / "spec.yaml", "--resume"], ["explain", "--quick", run], ["certify", run]]
            )

    check(commands())


@pytest.mark.parametrize(
    "command",
    [["train", "it/spec.yaml", "model.architecture={}"], ["plan", "it/model", "model.architecture={}"],
     ["serve", "it/model", "--architecture", "{}"], ["train", "it/spec.yaml", "rewards=[{{function: {}:name}}]"],
     ["train", "it/spec.yaml", "environment.function={}:name"], ["train", "it/spec.yaml", "algorithm.name={}:name"]],
)  # fmt: skip
def test_a_file_of_the_user_s_that_exits_is_named(folder: Path, command: list[str]) -> None:
    file = folder / "own.py"
    file.write_text("import sys\nsys.exit(0)\n")
    done = result_of(*(part.format(file) for part in command))
    assert (done.exit_code, done.output.count("error: ")) == (2, 1) and str(file) in done.output, done.output


def test_places_where_nothing_can_be_written(run: Path, tmp_path: Path) -> None:
    def commands() -> Iterator[Command]:
        for place in places(tmp_path):
            yield ["init", place]
            yield ["convert", MODEL, place]
            yield ["runs", "--dir", run.parent, "--page", place]
            yield [["certify", "report", "explain", "plan", "serve"][len(str(place)) % 5], place]

    check(commands())
    assert (tmp_path / "file").read_text() == (tmp_path / "full/x").read_text() == "mine"
    assert os.readlink(tmp_path / "nowhere") == "/nowhere/x" and Path("/dev/null").is_char_device()


@pytest.mark.parametrize("kind", ["directory", "pipe", "nowhere"])
def test_a_page_replaces_nothing_else(run: Path, tmp_path: Path, kind: str) -> None:
    KINDS[kind](run / "report.html")
    before = os.lstat(run / "report.html")
    check(iter([["report", run]]))
    assert result_of("report", run).exit_code == 2 and os.lstat(run / "report.html").st_ino == before.st_ino
    dump = tmp_path / "dump.jsonl"
    dump.write_text('{"prompt_ids": [1], "response_ids": [2], "logprobs": [-1.0]}\n')
    for command, mine in (
        (["runs", run, run, "--page"], run / "metrics.jsonl"), (["certify", dump, "--page"], dump),
    ):  # fmt: skip
        whole, result = mine.read_bytes(), result_of(*command, mine)
        assert result.exit_code == 2 and "which is no page" in result.output and mine.read_bytes() == whole


@pytest.mark.parametrize(
    "address",
    ["", "http://x:y", "http://[::1", "auto", "ray://127.0.0.1:1", "127.0.0.1:8265", "http://a b:1", "http://x:1/?x=[/b]"],
)  # fmt: skip
def test_addresses_that_are_none_of_a_dashboard(folder: Path, address: str) -> None:
    result = result_of("submit", folder / "spec.yaml", "--address", address)
    assert result.exit_code == 2 and "expected the dashboard of a Ray cluster" in result.output


def test_a_full_disk_is_one_sentence_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    def left() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if path.is_file()}

    before = left()
    for command in (
        ["init", tmp_path / "mine"], ["convert", MODEL, tmp_path / "out"], ["report", run],
        ["runs", "--dir", run.parent, "--page", tmp_path / "page.html"], ["serve", MODEL],
    ):  # fmt: skip
        with room(500):
            result = result_of(*command)
        assert result.exit_code == 2 and result.output.count("error: ") == 1, (command, result.exception)
        assert "expected room to write it. Free some, or write to another disk" in result.output
        assert left() == before, command

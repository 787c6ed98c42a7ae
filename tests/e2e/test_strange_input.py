"""Generated damage to checkpoints and capsules, and strange paths: each is refused with one message and exit code 2.
What is wrong in a spec, its overrides, its data and models, and in runs that are read: tests/fp8rl/test_bad_input.py.

No case may end in a traceback, run for long, start a process, or leave something behind. A case that turns out to be
sound is one that gets as far as starting both sides, which nothing here does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from fp8rl.cli import app
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.record.events import Event, append_event
from fp8rl.rl.record.metrics_log import MetricsLog
from fp8rl.rl.record.run_dir import RunDir
from tests.support import odd_input
from tests.support.checkpoints import save
from tests.support.paths import new_run
from tests.support.scored_batches import CapsuleRun, scored_batch
from tests.support.tiny_model import TinyModel, write_tiny_model

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("FP8RL_STRANGE_CASES", "60"))
"""The same ones in every run; `FP8RL_STRANGE_CASES=5000 pytest tests/e2e/test_strange_input.py` draws more of them."""
SECONDS = 30.0
"""For a case that takes a tenth of one on a quiet machine."""


class Started(Exception):
    """The input was sound enough to start both sides."""


class Home:
    """A folder with a model, data, a spec, a run with checkpoints, and a capsule, to be damaged one copy at a time."""

    def __init__(self, folder: Path) -> None:
        self.model, self.spec = folder / "model", folder / "spec.yaml"
        self.run, self.capsule = RunDir(folder / "runs" / "run"), folder / "capsule"
        self.data = [folder / "train.jsonl", folder / "eval.jsonl"]

    def make(self) -> None:
        write_tiny_model(self.model, TinyModel(heads=4, kv_heads=2, layers=1))
        for file in self.data:
            file.write_text("".join(f'{{"question": "{n}+4=?", "answer": "#### {n + 4}"}}\n' for n in range(4)))
        sections = {"run": {"dir": "runs", "steps": 9}, "model": {"path": "model"}, "eval": {"problems": 4}}
        self.spec.write_text(yaml.safe_dump({**sections, "data": {"train": "train.jsonl", "eval": "eval.jsonl"}}))
        new_run(self.run.path)
        experiment = load_experiment(self.spec)
        self.run.experiment.write_text(experiment.to_yaml())
        log = MetricsLog(self.run.metrics)
        for step in range(4):
            log.append(step, {"train/loss": 0.1 * step, "mismatch/k3_kl": 0.0, "eval/accuracy": 0.5, "sync/bytes": 5.0})
        log.close()
        append_event(self.run.events, Event(2, "mismatch/k3_kl", 0.2, "above 0.1", "skip_step", None, "skip_step: why"))
        for step in (2, 3):
            save(self.run, experiment, step)
        made = CapsuleRun.make(self.capsule.parent / "other").write(4, ["why"], scored_batch([0.0], [0.5]), [1, 0])
        shutil.copytree(made, self.capsule)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    Home(folder).make()
    return folder


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(*_: object, **__: object) -> None:
        raise Started

    for name in (
        "fp8rl.rl.run.run.LiveRun.open",
        "fp8rl.rl.run.stack.Stack.open",
        "fp8rl.diagnose.rescore.one_trainer",
        "fp8rl.diagnose.preflight.preflight",
        "fp8rl.diagnose.attribution._stack_of",
        "fp8rl.serving.serve",
    ):
        monkeypatch.setattr(name, start)
    before = psutil.Process().children(recursive=True)
    yield
    assert psutil.Process().children(recursive=True) == before


def damaged(draw: random.Random, file: Path) -> None:
    """Other bytes, another value somewhere in JSON, JSON lines or YAML, or something else in the file's place."""
    whole = file.read_bytes()
    if file.suffix in {".json", ".jsonl", ".yaml"} and draw.random() < 0.4:
        lines = whole.decode().splitlines() if file.suffix == ".jsonl" else [whole.decode()]
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(odd_input.changed(yaml.safe_load(lines[at]), draw))
        file.write_text("\n".join(lines) + "\n")
    elif draw.random() < 0.5:
        file.write_bytes(odd_input.flipped(whole, draw))
    else:
        file.unlink()
        draw.choice([*odd_input.KINDS.values()])(file)


def all_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def outcome(home: Path, arguments: list[str]) -> str:
    """`refused`, `done` or `started`; fails for any other end."""
    before, began = all_in(home), time.monotonic()
    result = CliRunner().invoke(app, arguments)
    said = f"fp8rl {' '.join(arguments)[:300]!r}: {result.output[-2000:]}"
    assert time.monotonic() - began < SECONDS, said
    left = {path for path in all_in(home) - before if path.name != "report.html"}
    if isinstance(result.exception, Started):
        return "started"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(said) from result.exception
    assert "Traceback" not in result.output, said
    if result.exit_code == 2:
        assert not left, said
        assert "error: " in result.stderr or "Usage" in result.stderr, said
        return "refused"
    assert result.exit_code == 0 or (arguments[0] == "doctor" and result.exit_code == 1), said
    return "done"


def damaged_runs_to_resume(draw: random.Random, home: Home) -> list[str]:
    run, newest = home.run, home.run.checkpoint(3)
    files = [run.metrics, run.events, run.experiment, newest / "about.json", newest / "state/common.pt"]
    damaged(draw, draw.choice(files))
    return ["train", str(home.spec), "--resume"]


def damaged_capsules(draw: random.Random, home: Home) -> list[str]:
    files = sorted(path for path in home.capsule.rglob("*") if path.is_file())
    damaged(draw, draw.choice(files))
    return [draw.choice(["rescore", "attribute"]), str(home.capsule)]


def strange_paths(draw: random.Random, home: Home) -> list[str]:
    folder = home.spec.parent
    (folder / "loop").symlink_to("loop")
    paths = ["x" * 300, "x/" * 3000, "a\0b", "loop", "loop/x", "spec.yaml/x", "nowhere", ".", "model", "spec.yaml"]
    path = str(folder / draw.choice([*paths, "/dev/null", "/dev/zero"]))
    commands = [
        *([command, path] for command in ("train", "doctor", "report", "serve", "plan", "rescore", "attribute")),
        ["attribute", str(home.capsule), "--out", path],
        ["convert", path, str(folder / "out")],
        ["convert", str(home.model), path],
        ["rescore", str(home.capsule), "--model", path],
        *(["train", str(home.spec), f"{key}={json.dumps(path)}"] for key in ("model.path", "data.train", "run.dir")),
    ]
    return draw.choice(commands)


KINDS: dict[Callable[[random.Random, Home], list[str]], tuple[float, float, float]] = {
    damaged_runs_to_resume: (0.4, 0.43, 0.0),
    damaged_capsules: (0.3, 0.60, 0.0),
    strange_paths: (0.3, 0.57, 1.0),
}
"""What is drawn: its share of the cases; how many must be refused at least, and may be done at most."""


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.__name__)
def test_strange_input_is_refused_or_reported(
    case: Callable[[random.Random, Home], list[str]], sound: Path, tmp_path: Path
) -> None:
    """Each case in a fresh copy of what is sound."""
    share, refused, done = KINDS[case]
    count = round(share * CASES)
    ends: Counter[str] = Counter()
    failures = []
    for seed in range(count):
        home = tmp_path / f"{seed}"
        shutil.copytree(sound, home, symlinks=True)
        arguments = case(random.Random(seed), Home(home))
        try:
            with contextlib.chdir(home):
                ends[outcome(home, arguments)] += 1
        except AssertionError as error:
            failures.append(f"case {seed}: {error}\n{error.__cause__!r}")
        shutil.rmtree(home, ignore_errors=True)
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)
    assert ends["refused"] > refused * count, ends
    assert ends["done"] <= done * count, ends


def test_a_link_is_not_taken_for_a_run(sound: Path, tmp_path: Path) -> None:
    home = Home(Path(shutil.copytree(sound, tmp_path / "home")))
    os.rename(home.run.path, tmp_path / "elsewhere")
    home.run.path.symlink_to(tmp_path / "elsewhere")
    for options in ([], ["--overwrite"], ["--resume"]):
        assert outcome(tmp_path, ["train", str(home.spec), *options]) == "refused"
    assert (tmp_path / "elsewhere/metrics.jsonl").is_file()

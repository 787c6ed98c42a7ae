"""What of a section stays where a later layer names another member of it, and what is said of the rest."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment, load_experiment

VALUES = {"model": {"path": "/m"}, "data": {"train": "/t"}}
GRPO = {"name": "grpo", "clip_high": 0.4, "kl": {"loss": {"coefficient": 0.01}}}
GUESS = {"function": "guess", "timeout_s": 9.0, "kwargs": {"tries": 5}}
EVAL = {"train": "/t", "eval": {"path": "/d", "split": "test", "keys": {"question": "q"}}}
SEVERAL = {"train": ["/t", {"path": "/u", "weight": 2.0}]}


def loaded(folder: Path, sections: dict[str, Any], *overrides: str) -> tuple[Experiment, list[str]]:
    said: list[str] = []
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(VALUES | sections, sort_keys=False))
    return load_experiment(path, overrides, said.append), said


@pytest.mark.parametrize(
    ("sections", "overrides", "same", "said"),
    [
        (
            {"algorithm": GRPO},
            ["algorithm.updates_per_batch=2", "algorithm.name=rloo"],
            {"algorithm": {"name": "rloo", "updates_per_batch": 2}},
            ["algorithm: settings of grpo are left out: clip_high, kl"],
        ),
        (
            {"algorithm": {"name": "/gone.py:Class", "own": 1}},
            ["algorithm.name=sft"],
            {"algorithm": {"name": "sft"}},
            ["algorithm: settings of /gone.py:Class are left out: own"],
        ),
        (
            {"algorithm": {"name": "grpo", "rejection": {"name": "icepop", "low": 0.4}}},
            ["algorithm.rejection.name=mis"],
            {"algorithm": {"name": "grpo", "rejection": {"name": "mis"}}},
            ["algorithm.rejection: settings of icepop are left out: low"],
        ),
        (
            {"environment": GUESS},
            ["environment=calculator"],
            {"environment": "calculator"},
            ["environment: settings of guess are left out: timeout_s, kwargs"],
        ),
        ({"environment": "guess"}, ["environment.timeout_s=9.0"], {"environment": GUESS | {"kwargs": {}}}, []),
        # `rewards: [...]` and then `rewards.workers=4` was a run by the default reward.
        (
            {"rewards": [{"function": "math"}]},
            ["rewards.workers=4"],
            {"rewards": {"functions": [{"function": "math"}], "workers": 4}},
            [],
        ),
        ({}, ["data.train.weight=2.0"], {"data": {"train": {"path": "/t", "weight": 2.0}}}, []),
        (
            {"data": EVAL},
            ["data.eval=/other"],
            {"data": {"train": "/t", "eval": "/other"}},
            ["data.eval: settings of /d are left out: split, keys"],
        ),
        ({"data": EVAL}, ["data.eval.path=/o"], {"data": EVAL | {"eval": EVAL["eval"] | {"path": "/o"}}}, []),  # type: ignore[operator]
        (
            {"data": SEVERAL},
            ["data.train.path=/other"],
            {"data": {"train": "/other"}},
            ["data.train: settings of /u are left out: weight"],
        ),
    ],
)
def test_another_member_replaces_the_section_and_the_settings_that_go_are_said(
    tmp_path: Path, sections: dict[str, Any], overrides: list[str], same: dict[str, Any], said: list[str]
) -> None:
    assert loaded(tmp_path, sections, *overrides) == (loaded(tmp_path, same)[0], said)


@pytest.mark.parametrize("name", ["grp", "absent.py:Class", "3"])
def test_a_name_of_nothing_is_refused_by_its_own_message(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="algorithm.name: found"):
        loaded(tmp_path, {"algorithm": GRPO}, f"algorithm.name={name}")

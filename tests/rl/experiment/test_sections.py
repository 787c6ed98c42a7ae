"""Sections of a spec: what follows from them, and what of one stays where a later layer names another member of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import Experiment, load_experiment
from tests.support.experiments import VALUES, experiment

TAUGHT: dict[str, Any] = {"algorithm": {"name": "opd"}, "teacher": {"path": "/t"}}


@pytest.mark.parametrize(
    ("rollout", "in_flight", "ratio"),
    [
        ({"staleness": 1, "in_flight": True}, True, "bypass"),
        ({"staleness": 2}, True, "bypass"),
        ({"staleness": 0, "in_flight": False}, False, "recompute"),
    ],
)
def test_updates_land_in_flight_where_asked_and_beyond_one_step(rollout: Any, in_flight: bool, ratio: str) -> None:
    """The resolved spec says where the ratio of older tokens comes from."""
    spec = experiment(rollout=rollout)
    assert spec.rollout.updates_in_flight is in_flight and spec.to_dict()["algorithm"]["ratio"] == ratio


def test_a_teachers_engines_are_the_policys_but_for_their_number_and_room() -> None:
    spec = experiment(**TAUGHT | {"rollout": {"engines": 3, "context_length": 100, "hung_after_s": 7.0, "port": 2000}})
    engine = spec.teacher.engine(spec.rollout)
    assert (engine.engines, engine.context_length, engine.hung_after_s, engine.port) == (1, 106, 7.0, None)
    assert spec.engine_ranks == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("sections", "rollout", "k_splits"),
    [
        ({"teacher": {"path": "/t", "precision": "bf16"}}, "bf16", 1),
        ({"trainer": {"tp": 2}}, "fp8", 2),
        ({"teacher": {"path": "/t", "tp": 4}, "trainer": {"tp": 2}}, "fp8", 4),
        ({"numerics": {"router_replay": "replay"}}, "fp8", 1),
        ({"numerics": {"kv": "fp8", "value_scale": 0.25}}, "fp8", 1),
    ],
)
def test_a_teacher_computes_as_the_runs_engines_do(sections: Any, rollout: str, k_splits: int) -> None:
    spec = experiment(**TAUGHT | sections)
    numerics = spec.teacher.numerics(spec)
    assert (numerics.rollout, numerics.k_splits, numerics.router_replay) == (rollout, k_splits, "off")
    assert numerics.mode == spec.numerics.mode and numerics.spec == spec.numerics.config(1).spec
    assert (numerics.kv, numerics.value_scale) == ("bf16", 1.0), "whose scales are the policy's"


RLOO, GONE, MATH = {"name": "rloo", "epochs": 2}, {"name": "/gone.py:Class", "own": 1}, {"function": "math"}
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
        ({"algorithm": GRPO}, "algorithm.epochs=2 algorithm.name=rloo", {"algorithm": RLOO}, "grpo .*: clip_high, kl"),
        ({"algorithm": GONE}, "algorithm.name=sft", {"algorithm": {"name": "sft"}}, "of /gone.py:Class .*: own"),
        ({"environment": GUESS}, "environment=calculator", {"environment": "calculator"}, "guess .*: timeout_s, kw.*"),
        ({"environment": "guess"}, "environment.timeout_s=9.0", {"environment": GUESS | {"kwargs": {}}}, ""),
        # `rewards: [...]` and then `rewards.workers=4` was a run by the default reward.
        ({"rewards": [MATH]}, "rewards.workers=4", {"rewards": {"functions": [MATH], "workers": 4}}, ""),
        ({}, "data.train.weight=2.0", {"data": {"train": {"path": "/t", "weight": 2.0}}}, ""),
        ({"data": EVAL}, "data.eval=/other", {"data": {"train": "/t", "eval": "/other"}}, "of /d .*: split, keys"),
        ({"data": EVAL}, "data.eval.path=/o", {"data": EVAL | {"eval": EVAL["eval"] | {"path": "/o"}}}, ""),  # type: ignore[operator]
        ({"data": SEVERAL}, "data.train.path=/other", {"data": {"train": "/other"}}, "of /u .*: weight"),
    ],
)
def test_another_member_replaces_the_section_and_the_settings_that_go_are_said(
    tmp_path: Path, sections: dict[str, Any], overrides: str, same: dict[str, Any], said: str
) -> None:
    spec, told = loaded(tmp_path, sections, *overrides.split())
    assert spec == loaded(tmp_path, same)[0] and len(told) == bool(said)
    assert re.search(f"{said}$", "".join(told))


@pytest.mark.parametrize("name", ["grp", "absent.py:Class", "3"])
def test_a_name_of_nothing_is_refused_by_its_own_message(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="algorithm.name: found"):
        loaded(tmp_path, {"algorithm": GRPO}, f"algorithm.name={name}")

"""What a spec may say of a teacher, and what its engines are started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rl.experiment import load_experiment
from tests.support.experiments import experiment

TAUGHT: dict[str, Any] = {"algorithm": {"name": "opd"}, "teacher": {"path": "/t"}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({**TAUGHT, "algorithm": {"name": "sft"}}, "teacher: found '/t with algorithm.name=sft"),
        ({**TAUGHT, "teacher": {"path": "/t", "engines": 0}}, "teacher.engines: found 0"),
        ({**TAUGHT, "teacher": {"path": "/t", "precision": "fp4"}}, "teacher.precision: found 'fp4'"),
        ({**TAUGHT, "teacher": {"pth": "/t"}}, "Did you mean teacher.path"),
    ],
)
def test_what_cannot_be_is_refused(sections: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiment(**sections)


def test_its_engines_are_the_policys_but_for_their_number_and_room() -> None:
    spec = experiment(**TAUGHT | {"rollout": {"engines": 3, "context_length": 100, "hung_after_s": 7.0, "port": 2000}})
    assert spec.teacher is not None
    engine = spec.teacher.engine(spec.rollout)
    assert (engine.engines, engine.context_length, engine.hung_after_s, engine.port) == (1, 106, 7.0, None)
    assert spec.engine_ranks == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("sections", "rollout", "k_splits"),
    [
        ({}, "fp8", 1),
        ({"numerics": {"rollout": "bf16"}}, "bf16", 1),
        ({"teacher": {"path": "/t", "precision": "bf16"}}, "bf16", 1),
        ({"trainer": {"tp": 2}}, "fp8", 2),
        ({"teacher": {"path": "/t", "tp": 4}, "trainer": {"tp": 2}}, "fp8", 4),
        ({"numerics": {"router_replay": "replay"}}, "fp8", 1),
    ],
)
def test_it_computes_as_the_runs_engines_do(sections: Any, rollout: str, k_splits: int) -> None:
    spec = experiment(**TAUGHT | sections)
    assert spec.teacher is not None
    numerics = spec.teacher.numerics(spec.numerics, spec.numerics_config().k_splits)
    assert (numerics.rollout, numerics.k_splits, numerics.router_replay) == (rollout, k_splits, "off")
    assert numerics.mode == spec.numerics.mode and numerics.spec == spec.numerics.quant_spec()


def test_its_path_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(
        "model: {path: m}\ndata: {train: d}\nalgorithm: {name: opd}\nteacher: {path: ../teacher}\n"
    )
    found = load_experiment(tmp_path / "spec.yaml").teacher
    assert found is not None and found.path == str(tmp_path.parent / "teacher")

"""Environments by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.tasks.environments import EnvironmentSection
from fp8rl.rollout.tasks.environments.functions import load_environment


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        ("chess", {}, "environment.function: found 'chess', expected single_turn, harness, package.module:name"),
        ("openenv", {}, "found 'openenv', expected a function of a file, as this is now an example. Copy"),
        ("{}:plain", {}, ":plain', expected an async function"),
        ("{}:nothing", {}, "found 'nothing()', expected a function of a conversation; too many positional"),
        ("{}:tells", {"tires": 3}, "found 'tells(conversation, tries)', expected a function of a conversation, tires"),
        ("no.such:thing", {}, "expected a module that can be imported; this one ends in ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(
    tmp_path: Path, function: str, kwargs: dict[str, Any], expected: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def plain(it): ...\nasync def nothing(): ...\nasync def tells(conversation, tries): ...\n")
    with pytest.raises(UserError) as error:
        load_environment(EnvironmentSection(function=function.replace("{}", str(file)), kwargs=kwargs))
    assert expected in str(error.value)

"""Environments that a spec names, functions and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8rl.numerics.core.errors import UserError
from fp8rl.rollout.tasks.environments import EnvironmentSection
from fp8rl.rollout.tasks.environments.functions import load_environment

LIST = {"command": ["ls"]}


@pytest.mark.parametrize(
    ("function", "settings", "expected"),
    [
        ("chess", {}, "environment.function: found 'chess', expected single_turn, harness, package.module:name"),
        ("openenv", {}, "found 'openenv', expected a function of a file, as this is now an example. Copy"),
        ("{}:plain", {}, ":plain', expected an async function"),
        ("{}:nothing", {}, "found 'nothing()', expected a function of a conversation; too many positional"),
        ("{}:tells", {"kwargs": {"tires": 3}}, "(conversation, tries)', expected a function of a conversation, tires"),
        ("no.such:thing", {}, "expected a module that can be imported; this one ends in ModuleNotFoundError"),
        ("harness", {}, "environment.harness: found 'neither', expected either a command or a program"),
        ("harness", {"harness": LIST | {"tool_parser": "x"}}, "harness.tool_parser: found 'x'"),
        ("harness", {"harness": LIST | {"directory": "/no"}}, "harness.directory: found '/no'"),
        ("harness", {"harness": {"command": ["sh", "x.sh", "-e"]}}, "command: found 'x.sh', expected a"),
        ("harness", {"harness": {"program": "json:dumps"}}, "found 'json:dumps', expected an async"),
        ("mine:play", {"harness": LIST}, "a program beside function=mine:play"),
    ],
)
def test_what_cannot_be_an_environment_is_refused_before_anything_starts(
    tmp_path: Path, function: str, settings: dict[str, Any], expected: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def plain(it): ...\nasync def nothing(): ...\nasync def tells(conversation, tries): ...\n")
    with pytest.raises(UserError) as error:
        load_environment(EnvironmentSection(function=function.replace("{}", str(file)), **settings))
    assert expected in str(error.value)

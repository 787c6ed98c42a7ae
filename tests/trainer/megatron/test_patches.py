"""The table of what is changed in Megatron, against what is installed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fp8rl.trainer.megatron import patches
from fp8rl.trainer.megatron.patches import OVERRIDES, problem_of
from tests.support.paths import ROOT

# In a process where nothing is installed yet.
_REFUSED = """
import dataclasses
import torch
from fp8rl.trainer.megatron import patches
first, *others = patches.PATCHES
patches.PATCHES = (*others, dataclasses.replace(first, target="megatron.core.utils.gone"))
patches.OVERRIDES = (dataclasses.replace(patches.OVERRIDES[0], parameters="input_ more"),)
stream = torch.cuda.Stream
try:
    patches.install()
except RuntimeError as error:
    print(error)
assert torch.cuda.Stream is stream
"""


@pytest.mark.slow
def test_one_that_is_not_as_expected_is_named_and_nothing_is_changed() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _REFUSED], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    first, *lines = told.splitlines()
    assert "nothing was changed" in first
    # Every other row is as the installed version has it.
    assert [line.split(": ")[0].strip() for line in lines] == ["megatron.core.utils.gone", OVERRIDES[0].target]
    assert "found the parameters 'input_', expected 'input_ more'" in lines[1]


@pytest.mark.parametrize("row", OVERRIDES, ids=lambda row: row.ours)
def test_overridden_methods_are_those_of_the_installed_version(row: patches.Override) -> None:
    assert problem_of(row) is None
    assert problem_of(dataclasses.replace(row, parameters=row.parameters + " more")) is not None


def test_an_object_becomes_only_what_the_table_names() -> None:
    class Other(dict):
        pass

    with pytest.raises(AssertionError, match="Other"):
        patches.become({}, Other)

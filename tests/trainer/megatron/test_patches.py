"""The table of what is changed in Megatron, against what is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fp8rl.numerics.core.files import changed_signature
from fp8rl.trainer.megatron import patches
from fp8rl.trainer.megatron.patches import LATE_COMPILE, OVERRIDES
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

_IMPORTED = """
import sys
from fp8rl.trainer.megatron import patches
patches.install()
import fp8rl.trainer.roles
watched = {"torch._dynamo", "torch._inductor", "transformers", "megatron.core.models.gpt"}
print(sorted(watched & sys.modules.keys()))
"""


@pytest.mark.slow
def test_one_that_is_not_as_expected_is_named_and_nothing_is_changed() -> None:
    first, *lines = said_by(_REFUSED)
    assert "nothing was changed" in first
    # Every other row is as the installed version has it.
    assert [line.split(": ")[0].strip() for line in lines] == ["megatron.core.utils.gone", OVERRIDES[0].target]
    assert "found the parameters 'input_', expected 'input_ more'" in lines[1]


@pytest.mark.slow
def test_a_rank_imports_no_compiler() -> None:
    """They take two seconds of CPU each."""
    assert said_by(_IMPORTED) == ["['megatron.core.models.gpt']"]


def test_a_function_is_compiled_when_it_is_first_called() -> None:
    decorated = []

    def compiler(function, **options: bool):
        decorated.append((function.__name__, options))
        return lambda number: -function(number)

    late = patches.LATE_COMPILE.make(compiler)

    @late
    def twice(number: int) -> int:
        return 2 * number

    @late(dynamic=True)
    def thrice(number: int) -> int:
        return 3 * number

    assert decorated == [] and (twice(2), twice(3), thrice(1), twice.__name__) == (-4, -6, -3, "twice")
    assert decorated == [("twice", {}), ("thrice", {"dynamic": True})]


OF_2_11 = "model, *, fullgraph=False, dynamic=None, backend='inductor', mode=None, options=None, disable=False"
OF_2_13 = OF_2_11.replace(" disable", " name=None, disable") + (
    ", recompile_limit=None, isolate_recompiles=False, shapes_spec=None"
)


@pytest.mark.parametrize("parameters", [OF_2_11, OF_2_13])
def test_the_trainer_starts_with_each_known_torch_compile(parameters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = eval(f"lambda {parameters}: lambda number: -model(number) if dynamic else number")
    monkeypatch.setattr("torch.compile", release)
    assert changed_signature(LATE_COMPILE.target, LATE_COMPILE.parameters) is None
    with patches.applied(patches.LATE_COMPILE):
        late = torch.compile(lambda number: 2 * number, dynamic=True)
    assert late(2) == -4


def said_by(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("row", OVERRIDES, ids=lambda row: row.ours)
def test_overridden_methods_are_those_of_the_installed_version(row: patches.Override) -> None:
    assert changed_signature(row.target, row.parameters) is None
    assert changed_signature(row.target, row.parameters + " more") is not None

"""`fp8rl doctor` on the example, both sides started once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import pytest
from click.testing import Result

from fp8rl.diagnose.report import Report
from fp8rl.models import read_model
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.run.run import Run, open_pair
from tests.support.commands import report_of, result_of
from tests.support.rig import Rig

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SPEC = "examples/arithmetic.yaml"


@pytest.fixture(scope="module")
def stack(rig: Rig) -> Iterator[Run]:
    rig.only_ray()
    with open_pair(load_experiment(Path(SPEC))) as both:
        yield both
        folder = both.folder
    assert not folder.exists()


@pytest.fixture
def doctor(stack: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, Report]]:
    """Run the command on the stack that is up already."""

    def invoke(*arguments: str) -> tuple[Result, Report]:
        result = result_of("doctor", SPEC, *arguments, "--json")
        assert result.exit_code in (0, 1), (result.output, result.exception)
        return result, report_of(result.stdout)

    monkeypatch.setattr("fp8rl.diagnose.doctor.pair.open_pair", opened_as(stack))
    return invoke


def opened_as(stack: Run) -> Callable[..., AbstractContextManager[Run]]:
    """In place of `open_pair`."""

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[Run]:
        yield stack

    return opened


def test_a_bf16_trainer_beside_an_fp8_engine_fails(stack: Run, doctor: Callable[..., tuple[Result, Report]]) -> None:
    exact = stack.numerics
    stack.numerics = replace(exact, trainer="bf16")
    stack.trainer.apply(methodcaller("set_numerics", stack.numerics))
    result, report = doctor("numerics.trainer=bf16")
    stack.numerics = exact
    stack.trainer.apply(methodcaller("set_numerics", exact))

    assert result.exit_code == 1
    failed = {finding.key: finding for finding in report.findings if finding.grade == "error"}
    assert not any(key.startswith("same bytes") for key in failed)
    compared = failed["same logprobs, trainer against engine"]
    assert (
        "numerics.trainer=fp8 numerics.rollout=fp8" in compared.remedy
        and "same spec, precision of both sides" in failed
    )
    (products,) = [row for row in report.facts["rows"] if row["key"] == "product.weight"]
    assert products["trainer"].keys() == {"bf16"} and products["engine"].keys() == {"e4m3"}
    differences = report.facts["differences"]
    assert differences["trainer against engine"]["mean"] > 1e-3
    # The engine agrees with itself all the same.
    assert differences["prefill against decode"]["max"] == differences["alone against together"]["max"] == 0.0


def test_the_example_passes_with_equal_logprobs_and_no_noise(
    stack: Run, doctor: Callable[..., tuple[Result, Report]]
) -> None:
    result, report = doctor()
    assert {finding.grade for finding in report.findings} <= {"ok", "note"} and result.exit_code == 0
    names = {"same spec, handshake", "same spec, precision of both sides", "same bytes, manifest", "memory"}
    assert {finding.key for finding in report.findings} >= names | {"same logprobs, sampler temperature"}

    compared = {"trainer against engine", "prefill against decode", "alone against together"}
    assert report.facts["differences"].keys() == compared
    for found in report.facts["differences"].values():
        assert found["max"] == found["nonfinite"] == 0 and found["tokens"] > 400

    rows = {row["key"]: row for row in report.facts["rows"]}
    # Of one rank, without adapters and linear attention.
    unused = {"wire.layer", "engine.state", "adapter.operands", "adapter.merged"}
    assert {key for key, row in rows.items() if not row["trainer"] and not row["engine"]} == unused
    both = {"product.activation", "experts.weight", "norm.reduction", "scores.output", "router.logits", "head.logits"}
    assert all(rows[key]["trainer"].keys() == rows[key]["engine"].keys() == {*rows[key]["planned"]} for key in both)
    sizes = read_model(Path(stack.experiment.model.path)).sizes
    slots = stack.experiment.rollout.cache_tokens + 1  # and SGLang's padding slot
    assert rows["engine.kv_cache"]["bytes"] == 2 * 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * slots
    assert rows["engine.weight"]["engine"] == {"e4m3": sizes.layers * (4 + 3 * sizes.experts)}

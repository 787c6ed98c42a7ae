"""`fp8rl preflight` on the example, both sides started once for all tests. They stand in an order that allows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import pytest
from click.testing import Result

from fp8rl.diagnose import audit
from fp8rl.diagnose.audit import AuditReport as Audit
from fp8rl.diagnose.preflight import PreflightReport
from fp8rl.models import read_model
from fp8rl.rl.experiment import load_experiment
from fp8rl.rl.run.run import Run, open_pair
from tests.support.commands import result_of
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
def preflight(stack: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, PreflightReport]]:
    """Run the command on the stack that is up already."""

    def invoke(*arguments: str) -> tuple[Result, PreflightReport]:
        result = result_of("preflight", SPEC, *arguments, "--json")
        assert result.exit_code in (0, 1), (result.output, result.exception)
        return result, PreflightReport.from_json(result.stdout)

    monkeypatch.setattr("fp8rl.diagnose.preflight.open_pair", opened_as(stack))
    return invoke


def opened_as(stack: Run) -> Callable[..., AbstractContextManager[Run]]:
    """In place of `open_pair`."""

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[Run]:
        yield stack

    return opened


def test_a_bf16_trainer_beside_an_fp8_engine_fails(
    stack: Run, preflight: Callable[..., tuple[Result, PreflightReport]]
) -> None:
    exact = stack.numerics
    stack.numerics = replace(exact, trainer="bf16")
    stack.trainer.apply(methodcaller("set_numerics", stack.numerics))
    result, report = preflight("numerics.trainer=bf16", "--quick")
    stack.numerics = exact
    stack.trainer.apply(methodcaller("set_numerics", exact))

    assert result.exit_code == 1
    assert report.verdicts["bytes"] is True and report.verdicts["logprobs"] is False
    failed = {check.name: check for check in report.checks if not check.ok}
    assert {"precision of both sides", "quantized modules", "trainer against engine"} <= failed.keys()
    assert "numerics.trainer=fp8 numerics.rollout=fp8" in failed["trainer against engine"].remedy
    assert "only in the engine: model.layers.0." in failed["quantized modules"].found
    assert report.quantized["trainer"] == []
    measured = report.differences["trainer against engine"]
    assert measured.mean is not None and measured.mean > 1e-3
    # The engine agrees with itself all the same.
    assert report.differences["prefill against decode"].zero and report.differences["alone against together"].zero


def test_an_audit_of_the_example_finds_every_row_as_planned(stack: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that it watches is taken back, and the sides agree again."""
    monkeypatch.setattr(audit, "open_pair", opened_as(stack))
    before = stack.folder / "before"
    stack.trainer.save(before, {})
    result = result_of("audit", SPEC, "--json")
    stack.trainer.load(before)
    stack.syncing.sync()
    assert result.exit_code == 0, (result.output, result.exception)
    found = Audit.from_json(result.stdout)
    assert found.ok and found.unseen == [] and found.differences == []
    rows = {row.key: row for row in found.rows}
    # Of one rank, without adapters and linear attention.
    unused = {"wire.layer", "engine.state", "adapter.operands", "adapter.merged"}
    assert {key for key, row in rows.items() if not row.found} == unused
    sizes = read_model(Path(stack.experiment.model.path)).sizes
    slots = stack.experiment.rollout.cache_tokens + 1  # and SGLang's padding slot
    assert rows["engine.kv_cache"].bytes == 2 * 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * slots
    assert rows["engine.weight"].found == {"e4m3": sizes.layers * (4 + 3 * sizes.experts)}


def test_the_example_passes_with_equal_logprobs_and_no_noise(
    stack: Run, preflight: Callable[..., tuple[Result, PreflightReport]]
) -> None:
    """Its BF16/BF16 floor replaces the engine, so this stands last."""
    result, report = preflight()
    assert [check for check in report.checks if not check.ok] == []
    assert result.exit_code == 0 and json.loads(result.stdout)["ok"] is True
    assert report.verdicts == {"spec": True, "bytes": True, "logprobs": True}
    names = {"block alignment", "handshake", "quantized modules", "scale formats", "KV cache"}
    assert {check.name for check in report.checks} >= names | {"manifest", "sampler temperature"}

    config = json.loads((Path(stack.experiment.model.path) / "config.json").read_text())
    attention = [f"self_attn.{kind}_proj.weight" for kind in "qkvo"]
    experts = [
        f"mlp.experts.{i}.{kind}_proj.weight" for i in range(config["num_experts"]) for kind in ("gate", "up", "down")
    ]
    names = sorted(f"model.layers.{n}.{w}" for n in range(config["num_hidden_layers"]) for w in attention + experts)
    assert report.quantized == {"trainer": names, "engine": names}

    compared = {"trainer against engine", "prefill against decode", "alone against together", "BF16 on both sides"}
    assert report.differences.keys() == compared
    for found in report.differences.values():
        assert found.zero and found.tokens > 400

"""`fp8rl doctor` on the example; pairs that fail are in tests/diagnose/doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8rl.models import read_model
from fp8rl.rl.experiment import load_experiment
from tests.support.commands import report_of, result_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SPEC = "examples/arithmetic.yaml"


def test_the_example_passes_with_equal_logprobs_and_no_noise(stacks: None) -> None:
    result = result_of("doctor", SPEC, "rollout.top_p=0.95", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    report = report_of(result.stdout)
    assert {finding.grade for finding in report.findings} <= {"ok", "note"}
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
    experiment = load_experiment(Path(SPEC))
    sizes = read_model(Path(experiment.model.path)).sizes
    slots = experiment.rollout.cache_tokens + 1  # and SGLang's padding slot
    assert rows["engine.kv_cache"]["bytes"] == 2 * 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * slots
    assert rows["engine.weight"]["engine"] == {"e4m3": sizes.layers * (4 + 3 * sizes.experts)}

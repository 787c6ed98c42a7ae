"""The handshake names every difference, and says when the plugin is not there at all."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl.rollout.engine.protocol import EngineReport, check_report, failed_plugin, missing_report
from fp8rl.rollout.types import HandshakeError

NUMERICS = {"mode": "exact", "k_splits": 2, "spec": {"weight": {"format": "e4m3", "block": (128, 128)}}}
EXPECTED = EngineReport.model_validate(
    {"spec_digest": "ab12", "numerics": NUMERICS, "hooks": ("attention", "linear")}
    | {"versions": {"sglang": "0.5.19", "torch": "2.13.0"}, "code": "c0de", "weight_version": "4", "threads": 1}
    | {"row_variant_ops": (), "implementation": "torch"}
)


def reported(**changes: Any) -> EngineReport:
    """As it comes over HTTP, with hooks in another order."""
    data = EXPECTED.model_dump(mode="json") | {"hooks": ["linear", "attention"]} | changes
    return EngineReport.model_validate(data)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": "teacher"}, ["role", "'teacher'", "'policy'"]),
        ({"numerics": {**NUMERICS, "k_splits": 1}}, ["numerics.k_splits", "found 1", "expected 2"]),
        ({"numerics": {**NUMERICS, "spec": {"weight": {"format": "e4m3", "block": [1]}}}}, ["spec.weight.block"]),
        ({"hooks": ["linear"]}, ["hooks", "attention", "found 1 installed"]),
        ({"versions": {"sglang": "0.5.19"}}, ["versions.torch", "nothing", "'2.13.0'"]),
        ({"weight_version": "3"}, ["weight_version", "found '3'", "expected '4'"]),
        ({"row_variant_ops": ["linear"]}, ["row_variant_ops", "found ['linear']", "depends on its batch"]),
        ({"code": "0ld0"}, ["code", "'0ld0'", "'c0de'", "another checkout"]),
        ({"implementation": "triton"}, ["implementation", "'triton'", "'torch'", "GPUs of one kind"]),
        ({"threads": 2, "spec_digest": "ffff"}, ["threads", "found 2", "expected 1", "'ffff'", "'ab12'"]),
    ],
)
def test_a_difference_is_named_with_both_values(changes: dict[str, Any], said: list[str]) -> None:
    check_report(EXPECTED, reported())
    with pytest.raises(HandshakeError) as caught:
        check_report(EXPECTED, reported(**changes))
    message = str(caught.value)
    assert message.count("\n- ") == len(changes) and all(part in message for part in said), message


def test_a_missing_report_quotes_the_log_about_the_plugin_if_it_is_to_blame() -> None:
    log = "Load weight begin\nFailed to load plugin fp8rl from group sglang.srt.plugins\nImportError: no numerics\n"
    message = str(missing_report(log))
    assert "did not load" in message and "ImportError: no numerics" in message
    assert "Load weight begin" not in message
    log = "Failed to execute general plugin: fp8rl\nValueError: wrong\n\nAssertionError: requires AMX\n"
    assert "ValueError: wrong" in str(failed_plugin(log))
    assert failed_plugin("Load weight begin\nMemoryError\n") is None

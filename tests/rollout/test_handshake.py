"""The handshake names every difference, and says when the plugin is not there at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollout.errors import HandshakeError
from rollout.handshake import Handshake, check, failed_plugin

EXPECTED = Handshake(
    spec_digest="ab12",
    numerics={"mode": "exact", "k_splits": 2, "spec": {"weight": {"format": "e4m3", "block": (128, 128)}}},
    hooks=("attention", "linear"),
    versions={"sglang": "0.5.19", "torch": "2.13.0"},
    weight_version=4,
)
REPORT: dict[str, Any] = {
    "spec_digest": "ab12",
    "numerics": {"mode": "exact", "k_splits": 2, "spec": {"weight": {"format": "e4m3", "block": [128, 128]}}},
    "hooks": ["linear", "attention"],
    "versions": {"sglang": "0.5.19", "torch": "2.13.0", "python": "3.11.7"},
    "weight_version": "4",
    "row_invariant": True,
    "implementation": "torch",
    "threads": 1,
}


def states(**changes: Any) -> list[dict[str, Any]]:
    return [{"world_size": 1, "fp8rl": copy.deepcopy(REPORT) | changes}]


def test_a_report_as_expected_passes() -> None:
    check(EXPECTED, states())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec_digest": "ffff"}, ["spec_digest", "'ffff'", "'ab12'"]),
        ({"numerics": {**REPORT["numerics"], "k_splits": 1}}, ["numerics.k_splits", "found 1", "expected 2"]),
        (
            {"numerics": {**REPORT["numerics"], "spec": {"weight": {"format": "e5m2", "block": [128, 128]}}}},
            ["numerics.spec.weight.format", "'e5m2'", "'e4m3'"],
        ),
        (
            {"numerics": {**REPORT["numerics"], "spec": {"weight": {"format": "e4m3", "block": [1, 128]}}}},
            ["numerics.spec.weight.block", "[1, 128]", "[128, 128]"],
        ),
        ({"numerics": {**REPORT["numerics"], "surprise": 1}}, ["numerics.surprise", "found 1"]),
        ({"hooks": ["linear"]}, ["hooks", "attention", "found 1 installed"]),
        ({"hooks": ["linear", "attention", "sampler"]}, ["hooks", "sampler"]),
        ({"versions": {"sglang": "0.5.23", "torch": "2.13.0"}}, ["versions.sglang", "'0.5.23'", "'0.5.19'"]),
        ({"versions": {"sglang": "0.5.19"}}, ["versions.torch", "nothing", "'2.13.0'"]),
        ({"weight_version": "3"}, ["weight_version", "found 3", "expected 4"]),
        ({"row_invariant": False}, ["row_invariant", "found False"]),
        ({"implementation": "triton"}, ["implementation", "'triton'", "'torch'", "GPUs of one kind"]),
        ({"threads": 2}, ["threads", "found 2", "expected 1"]),
    ],
)
def test_a_difference_is_named_with_both_values(changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(HandshakeError) as caught:
        check(EXPECTED, states(**changes))
    message = str(caught.value)
    assert message.count("\n- ") == 1, message
    for part in said:
        assert part in message


@pytest.mark.parametrize("key", REPORT)
def test_an_absent_item_is_a_difference(key: str) -> None:
    report = {k: v for k, v in REPORT.items() if k != key}
    with pytest.raises(HandshakeError, match=key):
        check(EXPECTED, [{"fp8rl": report}])


def test_all_differences_are_listed_at_once() -> None:
    with pytest.raises(HandshakeError) as caught:
        check(EXPECTED, states(spec_digest="ffff", threads=8, hooks=[]))
    assert str(caught.value).count("\n- ") == 3


def test_every_scheduler_has_to_agree() -> None:
    with pytest.raises(HandshakeError, match="scheduler 1: threads: found 2"):
        check(EXPECTED, states() + states(threads=2))


def test_a_missing_report_quotes_the_log_about_the_plugin() -> None:
    log = "Load weight begin\nFailed to load plugin fp8rl from group sglang.srt.plugins\nImportError: no numerics\n"
    with pytest.raises(HandshakeError) as caught:
        check(EXPECTED, [{"world_size": 1}], log)
    message = str(caught.value)
    assert "did not load" in message and "ImportError: no numerics" in message
    assert "Load weight begin" not in message


def test_no_scheduler_is_no_agreement() -> None:
    with pytest.raises(HandshakeError, match="no scheduler"):
        check(EXPECTED, [])


def test_a_server_that_died_without_its_plugin_is_told_apart_from_others() -> None:
    log = "Failed to execute general plugin: fp8rl\nValueError: wrong\n\nAssertionError: requires AMX\n"
    assert "ValueError: wrong" in str(failed_plugin(log))
    assert failed_plugin("Load weight begin\nMemoryError\n") is None

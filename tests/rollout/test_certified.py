"""A stock engine, without our ops, is not exact, and `fp8rl certify` says so."""

import pytest

from fp8rl.diagnose.certify import certify_server
from fp8rl.rollout.server.server import SGLangServer
from tests.support.planted_server import ask_little


@pytest.mark.e2e
def test_a_stock_engine_is_broken_by_how_it_computes(server: SGLangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_little(monkeypatch)
    report = certify_server(server.endpoint.url, api_key=server.endpoint.api_key)
    assert report.verdict == "broken" and "prefill" in report.breaks, [(w.name, w.outcome, w.why) for w in report.ways]
    assert report.isolates and "not reached" not in {way.outcome for way in report.ways}

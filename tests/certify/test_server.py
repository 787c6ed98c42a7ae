"""Certifying a running server: what is planted in one is found and named, and bad input is one message."""

import json
import math
import random
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from fp8rl.diagnose import measure
from fp8rl_certify import api
from fp8rl_certify.api import Answer
from fp8rl_certify.compare import compare, difference
from fp8rl_certify.http import Http, ServerFailed, TimeUp
from fp8rl_certify.server import ServerReport, certify_server, rendered
from tests.support.commands import invoke, result_of, shown
from tests.support.planted_server import NAME, Planted, ask_little, serve


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_little(monkeypatch)
    monkeypatch.setattr(api, "LONGEST", 1000)


def certified(planted: Planted, path: str = "", **options: Any) -> ServerReport:
    with serve(planted) as url:
        return certify_server(url + path, **options)


@pytest.mark.slow
def test_a_server_is_certified_without_the_libraries_of_a_run() -> None:
    libraries = {"fp8rl", "ray", "megatron", "sglang", "transformers", "torch"}
    code = f"import fp8rl_certify.server, sys; print({libraries!r} & {{m.split('.')[0] for m in sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def outcomes(report: ServerReport) -> dict[str, str]:
    return {way.name: way.outcome for way in report.ways}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "/v1"])
@pytest.mark.parametrize("salts", [True, False])
def test_a_server_whose_rows_depend_on_nothing_is_certified(path: str, salts: bool) -> None:
    report = certified(Planted(salts=salts), path)
    assert (report.verdict, report.breaks) == ("certified", [])
    assert set(outcomes(report).values()) == {"equal"} and len(report.ways) == 11
    assert report.api == ("OpenAI" if path else "SGLang") and report.isolates == (salts or not path)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "/v1"])
@pytest.mark.parametrize(
    ("fault", "cause", "ways"),
    [("batch", "batch", ["in batches of 8"]), ("prefill", "prefill", ["prefilled, not decoded"]),
     ("chunk", "chunked prefill", ["long, their beginning cached"])],
)  # fmt: skip
def test_a_planted_dependence_is_named(fault: str, cause: str, ways: list[str], path: str) -> None:
    report = certified(Planted(fault), path)
    assert (report.verdict, report.breaks) == ("broken", [cause])
    assert [way.name for way in report.ways if way.outcome == "differs"] == ways
    found = next(way for way in report.ways if way.outcome == "differs").found
    assert found is not None and found.first is not None and found.size.max == 2.0**-20
    assert len(set(found.first.tokens)) == 1 and abs(float.__sub__(*found.first.logprobs)) == 2.0**-20


@pytest.mark.parametrize("salts", [True, False])
def test_a_dependence_on_the_cache_is_named(salts: bool) -> None:
    report = certified(Planted("cache", salts=salts), "/v1")
    assert report.breaks == ["cached prefix"] and outcomes(report)["its own prompt cached"] == "differs"


def test_a_server_that_never_says_the_same_is_broken_by_repetition() -> None:
    assert certified(Planted("repetition")).breaks[0] == "repetition"


@pytest.mark.slow
def test_what_a_server_has_not_got_does_not_stand_in_the_way() -> None:
    """No cache, no token ids, one prompt in a request: what can be compared is."""
    report = certified(Planted(native=False, ids=False, caches=False, lists=False))
    assert report.verdict == "certified" and report.api == "OpenAI"
    found = outcomes(report)
    assert found["in batches of 8"] == found["while others are sampled"] == "equal"
    assert found["prefilled, not decoded"] == found["continued in the middle"] == "absent"
    without_cache = certified(Planted(caches=False))
    assert without_cache.verdict == "certified" and outcomes(without_cache)["its own prompt cached"] == "absent"
    short = certified(Planted(context=180))
    assert short.verdict == "certified" and outcomes(short)["long, at the same time"] == "absent"


@pytest.mark.slow
def test_a_server_that_stops_answering_is_undecided() -> None:
    report = certified(Planted(stall_after=12), seconds=0.5)
    assert report.verdict == "undecided" and not report.ok
    assert report.ways[-1].outcome == "not reached" and "was over" in report.ways[-1].why


@pytest.mark.parametrize(("fault", "verdict"), [("", "certified"), ("chunk", "broken"), ("batch", "broken")])
def test_a_way_that_ends_early_has_a_verdict_on_a_few_prompts(fault: str, verdict: str, monkeypatch: Any) -> None:
    """Each way is tried with a few prompts before any is tried with all. What differed for some stays found."""
    why = "the server did not answer: gone" if fault == "batch" else "the time was over"
    asked, left = Http._asked, iter(range(30 if fault == "batch" else 45))

    def until_the_time_is_up(http: Http, method: str, path: str, body: Any, kind: Any) -> Any:
        load = body is not None and body["sampling_params"]["temperature"]  # whose requests come as they may
        if not load and next(left, None) is None and (fault != "batch" or len(body["input_ids"]) == 8):
            raise ServerFailed("gone") if fault == "batch" else TimeUp
        return asked(http, method, path, body, kind)

    monkeypatch.setattr(Http, "_asked", until_the_time_is_up)
    report = certified(Planted(fault))
    assert report.verdict == verdict and len(report.ways) == 11
    cut = [way for way in report.ways if way.why == why]
    assert cut and all(way.found is not None and way.found.answers < 3 for way in cut)
    assert f"asked with 1 of its prompts, then {why}" in shown(rendered(report))


def test_answers_are_compared_up_to_the_first_other_token() -> None:
    nan = float("nan")
    first = [Answer((5, 6, 7), (-1.0, nan, -2.0)), Answer((5, 6, 7), (-1.0, -1.5, -2.0))]
    second = [Answer((5, 6, 7), (-1.0, nan, -2.0)), Answer((5, 9, 7), (-1.25, -1.0, -2.0))]
    found = compare(first, second)
    assert (found.answers, found.tokens, found.differing, found.other_tokens) == (2, 5, 2, 1)
    assert found.first is not None and (found.first.prompt, found.first.position) == (1, 0)
    assert (found.size.max, found.size.tokens, found.size.nonfinite) == (0.25, 3, 0)
    shorter = compare([Answer((5, 6), (-1.0, -1.0))], [Answer((5,), (-1.0,))])
    assert (shorter.differing, shorter.tokens) == (1, 1)
    beside = compare([Answer((5,), (-1.0,), ((-0.5, -1.0),))], [Answer((5,), (-1.0,), ((-0.5, -1.125),))])
    assert (beside.differing, beside.size.max) == (1, 0.125), "a token beside it has another probability"


def test_differences_are_those_of_tensors() -> None:
    """The server's half does without torch; its numbers are those of every other diagnosis."""
    draw = random.Random(0)
    for count in (1, 2, 99, 100, 101, 1000):
        pairs = [(x := -draw.random(), x + draw.choice((0.0, 1e-7, -0.25, 30.0))) for _ in range(count)]
        for odd in ([], [(math.nan, math.nan)], [(math.nan, -1.0), (-math.inf, -1.0), (-math.inf, -math.inf)]):
            both = torch.tensor(pairs + odd, dtype=torch.float64)[None]
            expected = measure.difference(both[..., 0], both[..., 1], ~both.isnan().all(2))
            assert vars(difference(pairs + odd)) == pytest.approx(vars(expected), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "arguments", "message"),
    [(Planted(key="k"), [], "--api-key: found 'none, which http://127.0.0.1:PORT refuses (401)'"),
     (Planted(key="k"), ["--api-key", "x"], "--api-key: found 'one, which http://127.0.0.1:PORT refuses (401)'"),
     (Planted(), ["--model", "gpt-4"], f"--model: found 'gpt-4', expected one of this server's: {NAME}."),
     (Planted(logprobs=False), [], "--server: found 'answers of /generate without output_token_logprobs'"),
     (Planted(native=False, logprobs=False), [], "--server: found 'answers of /v1/completions without log-prob")],
)  # fmt: skip
def test_a_server_that_cannot_be_asked_is_one_message(planted: Planted, arguments: list[str], message: str) -> None:
    with serve(planted) as url:
        code, printed = invoke("certify", "--server", url, *arguments)
    assert code == 2 and message.replace("PORT", url.rpartition(":")[2]) in printed
    assert printed.count("\n") == 1 and "Traceback" not in printed


def test_where_no_server_is_that_is_said() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        code, printed = invoke("certify", "--server", url)
    assert code == 2 and f"--server: found 'nothing that answers at {url}" in printed
    code, printed = invoke("certify", "--server", "127.0.0.1:30000")
    assert code == 2 and "expected an address like http://127.0.0.1:30000" in printed


def test_the_command_says_what_breaks_a_server() -> None:
    with serve(Planted("batch", key="k")) as url:
        result = result_of("certify", "--server", url, "--api-key", "k")
        assert result.exit_code == 1 and result.stdout.startswith("broken: answers change with what else is in the")
        result = result_of("certify", "--server", url, "--api-key", "k", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"], found["breaks"]) == (1, "broken", ["batch"])
    assert ServerReport.from_json(result.stdout).breaks == ["batch"]

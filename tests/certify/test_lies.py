"""Certifying a server that lies, breaks off, drips or speaks another form: one sentence each, in its time."""

import gzip
import json
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from fp8rl_certify import api, probe
from fp8rl_certify.http import Http
from tests.support.commands import invoke
from tests.support.odd_input import VALUES, changed
from tests.support.planted_server import Planted, ask_little

run = partial(invoke, "certify", "--server")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_little(monkeypatch)
    for module, name, value in ((api, "SHORT", (5, 12)), (api, "FIRST", 2), (probe, "LOAD_TOKENS", 1)):
        monkeypatch.setattr(module, name, value)


@pytest.mark.slow
@pytest.mark.parametrize(("some", "native"), [(0, True), (1, False), (2, True)])
def test_whatever_stands_in_an_answer_is_a_verdict_or_one_sentence(some, native, monkeypatch) -> None:
    """A lie in one answer, or in all from one on, as JSON is written, NaN and a number of 400 digits among them."""
    codes = set()
    for seed in range(some * 25, some * 25 + 25):
        draw, planted = random.Random(seed), Planted(native=native, context=200 if seed % 5 else 2048)
        from_on, always, lock = draw.randrange(40) if draw.random() < 0.7 else 0, draw.random() < 0.5, threading.Lock()

        async def answer(
            http: Http, method: str, path: str, body,
            planted: Planted = planted, draw: random.Random = draw, from_on: int = from_on, always: bool = always,
            lock: threading.Lock = lock,
        ) -> tuple[int, bytes]:  # fmt: skip
            with lock:
                number = planted.requests
                planted.requests += 1
                status, value = planted.respond(path, body)
                if number == from_on or (always and number > from_on):
                    value = changed(value, draw) if value and draw.random() < 0.9 else draw.choice(VALUES)
            return status, json.dumps(value).encode()

        monkeypatch.setattr(Http, "_request", answer)
        code, printed = run("http://127.0.0.1:1", "--seconds", "60", "--json")
        codes.add(code)
        assert code in (0, 1, 2), seed
        sentences = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert len(sentences) == (code == 2), (seed, printed[:500])
        assert "Traceback" not in printed and all(len(line) < 1000 for line in sentences), seed
        if code != 2:
            found = json.loads(printed[printed.index("{") :])
            assert found["verdict"] == "certified" if code == 0 else found["verdict"] in ("broken", "undecided")
    assert len(codes) > 1


OK = b"HTTP/1.1 200 OK\r\n"
BODY = b'{"model_path": "m"}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
BROKEN = {
    "a page": OK + b"Content-Length: 14\r\n\r\n<html>no</html",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "a fault": b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\n\xff\x00\x1b[", "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "half of the headers": OK + b"Content-Le", "less than it says": OK + b"Content-Length: 100\r\n\r\n" + BODY,
    "two lengths": OK + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\n{}",
    "broken chunks": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "broken compression": OK + b"Content-Encoding: gzip\r\n" + LENGTH + BODY,
    "a bomb": OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(80 << 20), 1),
    "deep JSON": OK + b"\r\n" + b"[" * 200_000, "an empty body": OK + b"Content-Length: 0\r\n\r\n",
    "a long header": OK + b"X: " + b"y" * 200_000 + b"\r\n" + LENGTH + BODY,
}  # fmt: skip
SLOW = {
    "headers byte by byte": (OK, b"X-A: b\r\n"),
    "a body byte by byte": (OK + b"Content-Length: 1000000\r\n\r\n", b" "),
    "endless chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "interim answers for ever": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "silence": (b"", b""),
}  # fmt: skip


@contextmanager
def speaking(begin: bytes, again: bytes | None = None):
    """The address of a server that answers each connection with the bytes, and then with others again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def speak(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(begin)
            while again is not None and not over.wait(0.02):
                connection.sendall(again)

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=speak, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_is_none_is_one_sentence(name: str) -> None:
    with speaking(BROKEN[name]) as url:
        code, printed = run(url, "--seconds", "60")
    assert code == 2 and printed.startswith("error: --server") and printed.count("\n") == 1
    assert "neither /generate nor /v1/models" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_an_answer_that_never_ends_is_given_up_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    original = Http.__init__
    monkeypatch.setattr(Http, "__init__", lambda self, url, key, seconds: original(self, url, key, seconds / 20))
    with speaking(*SLOW[name]) as url:
        code, printed = run(url, "--seconds", "5")
    assert code == 2 and "which does not answer in time" in printed and printed.count("\n") == 1
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["http://x", "--seconds", "inf"], "--seconds: found inf, expected seconds"),
     (["http://x", "--api-key", "k\n"], "--api-key: found 'one with other characters than printable ASCII'"),
     *(([url], "--server: found") for url in ("http://\x00/", "http://[::1", "ftp://x", "", "http://x:99999")),
     (["http://" + "a" * 70_000], "--server: found")],
)  # fmt: skip
def test_what_no_request_can_be_made_of_is_refused(arguments: list[str], said: str) -> None:
    code, printed = run(*arguments)
    assert code == 2 and said in printed and len(printed) < 1000

"""Our rewards but for `integer`, called as a run calls them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollout.rewards.form import format
from rollout.rewards.length import length
from rollout.rewards.mathematics import math


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        (r"so it is $\frac{1}{2}$", "#### 0.5", 1.0),
        (r"\boxed{x^2+2x+1}", r"#### (x+1)^2", 1.0),
        (r"\boxed{0.25}", "#### 1/2", 0.0),
        ("#### 11", "#### 10", 0.0),
        ("13,18,10\n#### 10", "4+4\n#### 10", 1.0),
        ("", "#### 10", 0.0),
    ],
)
def test_math_compares_values(answer: str, reference: str, reward: float) -> None:
    assert math(answer, reference, finished=True) == reward
    assert math(answer, reference, finished=False) == 0.0


def test_math_says_which_reference_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="expected a reference with an expression"):
        math("3", "#### ", finished=True)


def test_format_wants_all_of_a_finished_answer() -> None:
    assert format("a\n#### 3", finished=True, pattern=r".*#### \d+") == 1.0
    assert format("a\n#### 3 ", finished=True, pattern=r".*#### \d+") == 0.0
    assert format("#### 3", finished=False, pattern=r".*") == 0.0


def test_length_is_free_up_to_a_point() -> None:
    assert [length("", tokens, free=10) for tokens in (0, 10, 15, 30)] == [0.0, 0.0, -0.5, -2.0]


@contextmanager
def service() -> Iterator[str]:
    """Answers with the number of letters of the answer, and what else it was told."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = json.dumps({"letters": len(asked["answer"]), "tokens": asked["tokens"], **asked["fields"]}).encode()
            self.send_response(500 if asked["answer"] == "bad" else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()

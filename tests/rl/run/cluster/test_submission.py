"""Submitting to a cluster that is not there; one that is there is in tests/e2e."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.commands import invoke
from tests.support.paths import EXAMPLES

SPEC = str(EXAMPLES / "arithmetic.yaml")


def typed(*arguments: str) -> tuple[int, str]:
    return invoke("submit", *arguments)


def test_a_cluster_that_does_not_answer_is_one_message() -> None:
    code, said = typed(SPEC, "--address", "http://127.0.0.1:9")
    assert code == 2 and said.startswith("error: --address: found 'http://127.0.0.1:9") and "ray start --head" in said


@pytest.mark.slow
def test_a_token_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    """In a process of its own: Ray keeps what it knows of tokens."""
    (path := tmp_path / "empty").touch()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    typed = ["from fp8rl.cli import main; main()", "submit", SPEC, "--address", "http://[::1]:9"]
    done = subprocess.run([sys.executable, "-c", *typed], env=os.environ | token, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --address: found ")
    assert str(path) in done.stderr and len(done.stderr.splitlines()) == 1


class Dying(http.server.BaseHTTPRequestHandler):
    """A dashboard that says its version, takes a job, and dies then."""

    def do_GET(self) -> None:
        if not self.path.endswith("/api/version"):
            return self.connection.close()
        self._say({"version": "4", "ray_version": "2", "ray_commit": "c", "session_name": "s"})

    def do_POST(self) -> None:
        self._say({"job_id": "job-1", "submission_id": "job-1"})

    def _say(self, values: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(values).encode())

    def log_message(self, format: str, *values: object) -> None: ...


@pytest.mark.slow
def test_a_head_that_dies_while_the_job_runs_is_one_message() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dying)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    code, said = typed(SPEC, "--address", address, "--wait")
    server.shutdown()
    assert code == 2 and said.splitlines()[-1].startswith("error: --address: found ") and address in said
    assert "job      job-1" in said


def test_a_spec_that_would_be_refused_is_refused_here() -> None:
    code, said = typed(SPEC, "run.stepz=3", "--address", "http://127.0.0.1:9")
    assert code == 2 and "run.stepz" in said

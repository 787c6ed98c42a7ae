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
@pytest.mark.parametrize("path", ["missing", "empty", "folder"])
def test_a_token_that_cannot_be_read_is_one_message(path: str, tmp_path: Path) -> None:
    """In a process of its own: Ray keeps what it knows of tokens."""
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / path)}
    command = [
        sys.executable,
        "-c",
        "from fp8rl.cli import main; main()",
        "submit",
        SPEC,
        "--address",
        "http://[::1]:9",
    ]
    done = subprocess.run(command, env=os.environ | token, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --address: found ")
    assert str(tmp_path / path) in done.stderr and len(done.stderr.splitlines()) == 1


class Dying(http.server.BaseHTTPRequestHandler):
    """A dashboard that says its version, takes a job if it is `taking`, and dies then."""

    taking = False

    def do_GET(self) -> None:
        if not self.path.endswith("/api/version"):
            return self.connection.close()
        self._say({"version": "4", "ray_version": "2", "ray_commit": "c", "session_name": "s"})

    def do_POST(self) -> None:
        if not self.taking:
            return self.connection.close()
        self._say({"job_id": "job-1", "submission_id": "job-1"})

    def _say(self, values: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(values).encode())

    def log_message(self, format: str, *values: object) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("taking", [False, True], ids=["before it takes the job", "while the job runs"])
def test_a_head_that_dies_is_one_message(taking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dying, "taking", taking)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dying)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    code, said = typed(SPEC, "--address", address, "--wait")
    server.shutdown()
    assert code == 2 and said.splitlines()[-1].startswith("error: --address: found ") and address in said
    assert ("job      job-1" in said) == taking


def test_a_spec_that_would_be_refused_is_refused_here() -> None:
    code, said = typed(SPEC, "run.stepz=3", "--address", "http://127.0.0.1:9")
    assert code == 2 and "run.stepz" in said


def test_what_is_typed_here_is_typed_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entrypoints: list[str] = []

    class Client:
        def __init__(self, address: str) -> None: ...

        def submit_job(self, entrypoint: str) -> str:
            entrypoints.append(entrypoint)
            return "job-1"

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    folder = tmp_path / "with space"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code, said = typed(SPEC, "run.name=a", "--address", "http://x:1", "--resume")
    assert code == 0 and "ray job stop --address http://x:1 job-1" in said
    (entrypoint,) = entrypoints
    assert entrypoint.startswith(f"cd '{folder}' && exec ") and entrypoint.endswith(
        f"fp8rl train {SPEC} run.name=a --resume"
    )

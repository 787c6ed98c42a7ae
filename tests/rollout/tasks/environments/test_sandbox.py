"""Code that goes wrong harms nobody: each case runs in the real sandbox."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from pathlib import Path

import psutil
import pytest

from fp8rl.rollout.tasks.environments.sandbox import LONGEST_OUTPUT, Ran, run_python
from tests.support.servers import wait_until

pytestmark = pytest.mark.slow


def ran(code: str, timeout_s: float = 20.0, memory_mib: int = 256) -> Ran:
    return asyncio.run(run_python(code, timeout_s=timeout_s, memory_mib=memory_mib))


def test_output_comes_back_and_is_bounded() -> None:
    assert ran("print(2 + 3)") == Ran("5\n", True)
    assert len(ran("for _ in range(1000): print('y' * 1000)").text) == LONGEST_OUTPUT


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("1/0", "ZeroDivisionError"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("open('file', 'w').write('x' * 10**8)", "File too large"),
        ("import os; os.kill(os.getpid(), 9)", "it was ended by SIGKILL"),
        ("input()", "EOFError"),
    ],
)
def test_an_error_is_told(code: str, expected: str) -> None:
    found = ran(code)
    assert not found.ok and expected in found.text


def test_there_is_no_network_here_or_in_a_child() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connects = f"import socket; socket.create_connection({server.getsockname()!r})"
        assert "PermissionError" in ran(connects).text
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {connects!r}])"
        assert "PermissionError" in ran(child).text


def test_time_is_bounded_and_children_end_too_even_those_of_another_session() -> None:
    mark = uuid.uuid4().hex
    sleeps = f"import os, time\nos.setsid() if os.fork() == 0 else 0\ntime.sleep(600)  # {mark}"
    began = time.monotonic()
    code = f"import subprocess, sys\nfor _ in range(3): subprocess.Popen([sys.executable, '-c', {sleeps!r}])\n" + sleeps
    found = ran(code, timeout_s=2.0)
    assert found == Ran("\nit took more than 2 s", False) and time.monotonic() - began < 20
    assert not _with_mark(mark)


def test_who_gives_up_waiting_leaves_nothing_running() -> None:
    mark = uuid.uuid4().hex

    async def given_up() -> None:
        await asyncio.wait_for(run_python(f"import time; time.sleep(600)  # {mark}", timeout_s=600), 2)

    before = set(Path("/tmp").glob("fp8rl-python-*"))
    with pytest.raises(TimeoutError):
        asyncio.run(given_up())
    assert wait_until(lambda: not set(Path("/tmp").glob("fp8rl-python-*")) - before, 5)


def _with_mark(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(mark in part for part in p.info["cmdline"] or [])]
